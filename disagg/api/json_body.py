"""JSON bodies, read once and strictly, and msgspec's complaints in OpenAI's terms."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from disagg.api.refusals import missing_parameter
from disagg.errors import InvalidRequest


def load_object(body: bytes) -> dict[str, Any]:
    """`json` rather than msgspec: it lets us refuse a key that is given twice."""
    try:
        text = body.decode("utf-8-sig")
        raw = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_float=_finite,
            parse_constant=_finite,
        )
        if "\\ud" in text or "\\uD" in text:
            _refuse_surrogates(raw, "")
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(
            f"The body is not valid JSON: {reason[:200]}.", code="invalid_json"
        ) from None
    if not isinstance(raw, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json_object")
    return raw


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    raw = dict(pairs)
    if len(raw) != len(pairs):
        twice = next(name for name, num in Counter(name for name, _ in pairs).items() if num > 1)
        raise InvalidRequest(
            f"The key {twice[:64]!r} is given twice.", code="duplicate_key", param=twice[:64]
        )
    return raw


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:32]} is not a finite number")
    return number


def _refuse_surrogates(value: Any, path: str) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"Invalid {path or 'body'}: it holds half of a surrogate pair (\\ud800-\\udfff).",
                code="invalid_unicode",
                param=path or None,
            ) from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _refuse_surrogates(name, path)
            _refuse_surrogates(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_surrogates(item, f"{path}[{index}]")


_CODES = (  # of msgspec's sentences, first match wins
    (r"Expected `int` (>|>=) ", "integer_below_min_value"),
    (r"Expected `int` (<|<=) ", "integer_above_max_value"),
    (r"Expected `float` (>|>=) ", "decimal_below_min_value"),
    (r"Expected `float` (<|<=) ", "decimal_above_max_value"),
    (r"Expected `array` of length >= 1", "empty_array"),
    (r"Expected `(array|object)` of length <= ", "array_above_max_length"),
    (r"Expected `str` of length <= ", "string_above_max_length"),
    (r"Expected `str` (of length >= |matching )|Invalid enum value", "invalid_value"),
)


def invalid_field(sentence: str, parent: str = "") -> InvalidRequest:
    """Turn msgspec's "Expected ... - at `$.path`" into a refusal with code and JSON path."""
    detail, _, path = sentence.partition(" - at `")
    path = parent + path.removesuffix("`").removeprefix("$")
    param = path.removeprefix(".").replace("[...]", "")
    missing = re.match(r"Object missing required field `(\w+)`", detail)
    if missing is not None:
        return missing_parameter(f"{param}.{missing[1]}".removeprefix("."))
    code = next((code for form, code in _CODES if re.match(form, detail)), "invalid_type")
    return InvalidRequest(
        f"Invalid {param}: {detail[0].lower()}{detail[1:]}.", code=code, param=param[:128]
    )
