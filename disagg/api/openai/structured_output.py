"""Structured output: turns request fields into a checked grammar.

The fields are OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`
fields. A schema is always enforced. A `response_format` is also made strict unless it has `strict:
false`: objects may then have only the properties that the schema names, and integers at most 18
digits. Otherwise a weak model may generate properties or digits until its tokens are used up. An
answer that is valid for the strict schema is also valid for the client's. Strings, lists and
fractions get no limits: a string that is cut at a limit would look complete.

Schemas that cannot be enforced are refused before the request is sent to a worker.
`engine/sched/grammar.py` computes which tokens a grammar allows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from disagg.api.openai.fields import SamplingFields
from disagg.api.refusals import invalid_value, missing_parameter
from disagg.api.served_model import ServedModel
from disagg.engine.sched.grammar import Compiled, Grammars
from disagg.engine.sched.json_schema import Part, mapped, resolved
from disagg.errors import GrammarError, InvalidRequest
from disagg.messages import Grammar, GrammarKind

# CPU time limit to compile one grammar. Ordinary schemas take about a millisecond.
MAX_COMPILE_S = 0.5
ANY_OBJECT = Grammar("json", '{"type":"object"}')


def requested_grammar(
    request: SamplingFields, required_calls: Grammar | None = None
) -> tuple[str, Grammar] | None:
    """The field that asks for a grammar, and its grammar; None if no such field is set.

    Raises:
        InvalidRequest: several fields are set, one is incomplete, or another field would move the
            end of the answer.
    """
    grammars = _find_grammars(request)
    if required_calls is not None:
        grammars["tool_choice"] = required_calls
    if not grammars:
        return None
    (param, grammar), *others = grammars.items()
    if others:
        raise invalid_value(
            others[0][0], f"{param} already restricts the answer; set only one of the two."
        )
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise invalid_value(
                name, f"it cannot be combined with {param}, which determines where an answer ends."
            )
    return param, grammar


def _find_grammars(request: SamplingFields) -> dict[str, Grammar]:
    grammars: dict[str, Grammar] = {}
    form = request.response_format
    if form is not None and form.type == "json_object" and form.schema is not None:
        param = "response_format.schema"
        grammars[param] = Grammar("json", json_text(make_strict(form.schema), param))
    elif form is not None and form.type == "json_object":
        grammars["response_format"] = ANY_OBJECT
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise missing_parameter("response_format.json_schema")
        param = "response_format.json_schema.schema"
        schema = form.json_schema.schema
        schema = schema if form.json_schema.strict is False else make_strict(schema)
        grammars[param] = Grammar("json", json_text(schema, param))
    outputs = request.structured_outputs
    if outputs is not None:
        found = _grammars("structured_outputs.", partial(getattr, outputs))
        if outputs.json_object:
            found["structured_outputs.json_object"] = ANY_OBJECT
        if not found:
            raise invalid_value("structured_outputs", "it is empty.")
        grammars |= found
    return grammars | _grammars("guided_", lambda name: getattr(request, f"guided_{name}"))


# The names of fields with a grammar, and the kinds of the grammars.
_KINDS: dict[str, GrammarKind] = {
    "json": "json", "regex": "regex", "choice": "choice", "grammar": "lark",
}  # fmt: skip


def _grammars(prefix: str, value_of: Callable[[str], Any]) -> dict[str, Grammar]:
    values = {f"{prefix}{name}": (kind, value_of(name)) for name, kind in _KINDS.items()}
    return {
        param: Grammar(kind, json_text(value, param))
        for param, (kind, value) in values.items()
        if value is not None
    }


def json_text(value: dict[str, Any] | list[str] | str, param: str) -> str:
    """The JSON of a value of field `param`; a text is JSON already."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise _refused(param, "it is nested too deeply.") from None


class GrammarChecks:
    """Compiles grammars as workers do, to refuse those that workers could not compile."""

    def __init__(self) -> None:
        self._of_models: dict[str, Grammars] = {}

    async def check(self, param: str, grammar: Grammar, model: ServedModel) -> None:
        """Compile a grammar.

        Raises:
            InvalidRequest: it cannot be enforced; the message says why.
            Overloaded: too many other grammars are being compiled.
        """
        if not model.eos_token_ids:
            raise _refused(param, f"the model {model.name!r} has no token that ends an answer.")
        grammars = self._of_models.get(model.name)
        if grammars is None:
            core, ends = model.tokenizer.core, model.eos_token_ids
            grammars = Grammars(
                core.to_str, ends, vocab_size=model.vocab_size, max_compile_s=MAX_COMPILE_S
            )
            self._of_models[model.name] = grammars
        try:
            await _done(grammars.compile(grammar))
        except GrammarError as error:
            raise _refused(param, error.message) from None


async def _done(future: Future[Compiled]) -> None:
    """Wait for a result, and raise its error. Cancelling the wait does not cancel `future`, which
    others may share, and logs no error that nobody waits for, as `asyncio.shield` would."""
    if not future.done():
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(is_done.set))
        await is_done.wait()
    future.result()


def _refused(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid {param}: {message}", code=GrammarError.code, param=param)


LARGEST = 10**18  # llguidance needs bounds that a float represents exactly

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum",
           "const")  # fmt: skip
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_MAX_PARTS = 32  # of one object; more are left open


def make_strict(schema: Part) -> Part:
    """A strict copy of `schema`.

    If an object must match several schemas, each names only some of its properties. So those stay
    open, and the whole is closed with the properties of all.
    """
    open_ids: set[int] = set()

    def note(copied: Part, original: Part) -> Part:
        open_ids.update(map(id, _find_joined(original, schema)))
        return copied

    mapped(schema, note)
    closed: Part = mapped(schema, partial(_make_strict, root=schema, open_ids=open_ids))
    return closed


def _make_strict(part: Part, original: Part, root: Part, open_ids: Container[int]) -> Part:
    if id(original) not in open_ids:
        names = _property_names(original, root)
        if names is not None:
            own = part.get("properties", {})
            part["properties"] = own | {name: True for name in names if name not in own}
            part["additionalProperties"] = False
    if "integer" in _kinds(original) and not any(key in original for key in _BOUNDS):
        part |= {"minimum": -LARGEST, "maximum": LARGEST}
    return part


def _property_names(part: Part, root: Part) -> list[str] | None:
    """The properties of an object that may be closed; None if it may not, or is no object."""
    parts = [part, *_find_joined(part, root)]
    named = [each["properties"] for each in parts if _has_members(each)]
    is_object = any("object" in _kinds(each) for each in parts)
    if not named or not is_object or len(parts) > _MAX_PARTS:
        return None
    if any(key in each for each in parts for key in _OPEN):
        return None
    return [name for properties in named for name in properties]


def _find_joined(part: Part, root: Part) -> list[Part]:
    """The further schemas that an object of `part` must match, if several name its properties.

    Alternatives count only beside properties of the whole; otherwise each is closed by itself.
    """
    found = _follow(part, root, ["allOf"])
    if any(map(_has_members, [part, *found])):
        found = _follow(part, root, ["allOf", "anyOf", "oneOf"])
    return found if sum(map(_has_members, [part, *found])) > 1 else []


def _follow(part: Part, root: Part, keys: Sequence[str]) -> list[Part]:
    """The schemas to which `$ref` and the lists at `keys` lead, from one to the next."""
    parts: dict[int, Part] = {}
    waiting = [part]
    while waiting and len(parts) <= _MAX_PARTS:
        each = waiting.pop()
        lists = [each[key][:_MAX_PARTS] for key in keys if isinstance(each.get(key), list)]
        further = [one for listed in lists for one in listed if isinstance(one, dict)]
        for one in [*further, resolved(each, root)]:
            if id(one) not in parts and one is not part:
                parts[id(one)] = one
                waiting.append(one)
    return list(parts.values())


def _has_members(part: Part) -> bool:
    return isinstance(part.get("properties"), dict)


def _kinds(part: Part) -> list[Any]:
    kinds = part.get("type")
    return kinds if isinstance(kinds, list) else [kinds]
