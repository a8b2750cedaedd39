"""Parses JSON bodies strictly, and converts msgspec's errors to those of OpenAI's API.

The values of a body are counted before it is parsed: five million empty lists are 15 MB of text but
half a gigabyte of objects, and no other thread runs for seconds while the parser creates them.
Work on large bodies runs in threads, because the event loop writes all streams of this process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import msgspec

from disagg.api.refusals import missing_parameter, only_text, refuse_fields
from disagg.errors import InvalidRequest

# Largest cost of a text. A value costs 1, a string 1 more, a container `_CONTAINER_COST` more.
MAX_COST = 1 << 20
MAX_DEPTH = 128  # deepest nesting of lists and objects; the code that reads them recurses

_CONTAINER_COST = 4  # making an empty list takes as long as making this many numbers
_STRING = re.compile('"[^"]*"')  # matches strings in a text without escaped quotes


def load_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `InvalidRequest`.

    It uses `json` instead of msgspec, which cannot refuse duplicate keys.
    """
    try:
        raw = _parse(
            body.decode("utf-8-sig"),
            object_pairs_hook=_unique_keys,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(
            f"The body is not valid JSON: {reason[:200]}.", code="invalid_json"
        ) from None
    if not isinstance(raw, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json_object")
    return raw


class Body(msgspec.Struct, kw_only=True):
    """The fields of a request, with their types and bounds. Unknown ones are ignored.

    Attributes:
        refused: fields that are refused, and why; see `refuse_fields`.
    """

    refused: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def prepare(raw: dict[str, Any]) -> None:
        """Called with the raw fields before they are converted; may raise `InvalidRequest`."""


Read = TypeVar("Read", bound=Body)


def read_body(body: bytes, kind: type[Read]) -> Read:
    """Parse a request and check types and bounds.

    Raises:
        InvalidRequest: has the JSON path of the first invalid field as `param`.
    """
    raw = load_object(body)
    refuse_fields(raw, kind.refused)
    kind.prepare(raw)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from None


def load_arguments(text: str) -> Any:
    """Parse the arguments of a call that a model wrote.

    Raises:
        ValueError: it is not JSON, is nested too deeply, has too many values, or has an unpaired
            surrogate, which cannot be encoded in UTF-8.
    """
    try:
        return _parse(text)
    except (InvalidRequest, RecursionError) as error:
        raise ValueError(str(error)) from None


def _parse(text: str, **options: Any) -> Any:
    """`json.loads` with limits, and with garbage collection disabled.

    Collections would find nothing, but take two thirds of the time if there are many lists, and no
    other thread runs meanwhile.
    """
    check_cost(text)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        raw = json.loads(text, parse_int=_integer, **options)
    finally:
        if was_enabled:
            gc.enable()
    _check_depth(text, raw)
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(raw, "")
    return raw


def check_cost(text: str) -> None:
    """Raises `InvalidRequest` if JSON text has too many values."""
    if _cost(text) <= MAX_COST:
        return
    # Many of the counted characters may be in strings. Emptying these is slow, so only do it now.
    if "\\" in text:
        text = text.replace("\\\\", "").replace('\\"', "")
    if _cost(_STRING.sub('""', text, count=MAX_COST)) > MAX_COST:
        raise InvalidRequest(
            f"The body has too many values: at most {MAX_COST} are allowed, where a string counts"
            f" as 2 and a list or an object as {_CONTAINER_COST + 1}. Send several requests.",
            code="too_many_values",
        )


def _cost(text: str) -> int:
    num_containers = text.count("[") + text.count("{")
    return text.count(",") + text.count('"') // 2 + _CONTAINER_COST * num_containers


def _check_depth(text: str, raw: Any) -> None:
    """Raises `InvalidRequest` if a parsed text is nested too deeply."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [raw]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, list | dict)
        ]
        if not level:
            return
    raise InvalidRequest(
        f"The body is nested too deeply: at most {MAX_DEPTH} levels are allowed.",
        code="invalid_json",
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    raw = dict(pairs)
    if len(raw) != len(pairs):
        twice = next(name for name, num in Counter(name for name, _ in pairs).items() if num > 1)
        raise InvalidRequest(
            f"The key {twice[:64]!r} appears twice.", code="duplicate_key", param=twice[:64]
        )
    return raw


def _integer(text: str) -> int:
    """Parse an integer.

    A Python function lets other threads run between integers; the parser alone would block them
    for 40 ms per million.
    """
    try:
        return int(text)
    except ValueError:  # Python's limit is 4,300 digits; its own message is for programmers
        digits = len(text.lstrip("-"))
        raise ValueError(f"an integer has {digits} digits, which is too many") from None


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
                f"Invalid {path or 'body'}: it has an unpaired surrogate (\\ud800-\\udfff).",
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


_CODES = (  # regular expressions for msgspec's messages; the first match applies
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
    """Convert msgspec's "Expected ... - at `$.path`" to an error with code and JSON path."""
    detail, _, path = sentence.partition(" - at `")
    path = path.removeprefix("key` in `")  # an invalid key is reported at its object
    path = parent + path.removesuffix("`").removeprefix("$")
    param = path.removeprefix(".").replace("[...]", "")
    missing = re.match(r"Object missing required field `(\w+)`", detail)
    if missing is not None:
        return missing_parameter(f"{param}.{missing[1]}".removeprefix("."))
    if unknown := re.match("Invalid value '(.*)'", detail):  # none of the tags of a union
        return only_text(param[:128], unknown[1])
    code = next((code for regex, code in _CODES if re.match(regex, detail)), "invalid_type")
    return InvalidRequest(
        f"Invalid {param}: {detail[0].lower()}{detail[1:]}.", code=code, param=param[:128]
    )


Result = TypeVar("Result")

INLINE_NBYTES = 64 << 10  # work on a larger input goes to a thread

# Threads share the interpreter lock with the loop: each busy thread delays it by up to 5 ms.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="large-request")


async def off_loop(nbytes: int, work: Callable[[], Result]) -> Result:
    """Run `work`, which reads `nbytes` of input, and return its result. Raises its exceptions.

    At most two large pieces of work run at a time. If the caller is cancelled, waiting work is
    never started, and running work runs to its end.
    """
    if nbytes <= INLINE_NBYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
