"""Parses tool calls out of a streamed answer, in the format that the model was trained on.

The chat template shows earlier calls in the model's format, so it also says how to parse. Text that
may be the beginning of a call is held back until that is clear; a call is passed on when it is
complete; text that turned out to be no call is passed on as text.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn


class CallFormat(NamedTuple):
    """Where calls stand: JSON objects with a name and arguments, or lists of them, between marks.

    Args:
        begin: "": an answer that begins with JSON is calls as a whole, any other is text.
        end: "": the end of the answer.
    """

    begin: str = ""
    end: str = ""


HERMES = CallFormat("<tool_call>", "</tool_call>")  # Qwen2.5 and Qwen3 as well
MISTRAL = CallFormat("[TOOL_CALLS]")
WHOLE = CallFormat()  # Llama 3.1 and later; and what a grammar makes of any model's answer

_PYTHON_TAG = "<|python_tag|>"  # Llama's, before some calls


@functools.lru_cache(maxsize=64)
def format_of(template_source: str) -> CallFormat | None:
    """The way in which a chat template shows calls; None where it is none that is known here."""
    for form in (HERMES, MISTRAL):
        if form.begin in template_source:
            return form
    return WHOLE if '"parameters": ' in template_source else None


class Call(NamedTuple):
    """One call, the how many-th of its answer, from 0; `arguments` is JSON text."""

    number: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CallSyntax:
    """How the calls in a request's answers are read.

    Args:
        function: the whole answer is the arguments of this function, or, if "", as `form` says.
        parallel: whether an answer may have several calls; otherwise it ends with the first.
    """

    form: CallFormat = WHOLE
    function: str = ""
    parallel: bool = True


class CallReader:
    """Splits one answer, piece by piece, into what is said and what is called.

    Args:
        answer_id: makes the calls' ids, which must differ within a conversation.
    """

    def __init__(self, syntax: CallSyntax, answer_id: str) -> None:
        self._form, self._function = syntax.form, syntax.function
        self._most = None if syntax.parallel else 1
        self._answer_id = answer_id
        self._held = ""  # not handed on yet
        self._is_in_call = False
        self._is_text = False  # the whole answer, as its beginning showed
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    @property
    def is_done(self) -> bool:
        """Whether no more calls are wanted."""
        return self._num_calls == self._most

    def push(self, text: str, *, is_end: bool) -> tuple[str, list[Call]]:
        """What `text`, the next of the answer, adds: text to show, and calls that are complete."""
        self._held += text
        said, calls = "", list[Call]()
        while self._held and not self.is_done:
            if not self._is_in_call:
                said += self._said_before_a_call(is_end)
            body = self._body(is_end) if self._is_in_call else None
            if body is None:
                break
            self._is_in_call = False
            found = _parsed(body, self._form, self._function)
            if found is None:
                said += body
            calls += [self._call(*each) for each in (found or ())[: self._most]]
        return said, calls

    def _said_before_a_call(self, is_end: bool) -> str:
        """Takes what is certainly text from what is held, up to a call if one begins.

        White space around calls says nothing.
        """
        begin = self._form.begin
        if begin:
            self._is_in_call = begin in self._held
            if is_end and not self._is_in_call:
                rest = self._take(len(self._held))
                return rest.rstrip() if self._num_calls else rest
            return self._take(_num_before(self._held, begin))
        if not self._is_text:
            rest = self._held.lstrip()
            is_json = rest.startswith(("{", "[", _PYTHON_TAG))
            self._is_in_call = is_json or bool(self._function)
            is_open = _PYTHON_TAG.startswith(rest) and not is_end
            self._is_text = not self._is_in_call and not is_open
        return self._take(len(self._held)) if self._is_text else ""

    def _body(self, is_end: bool) -> str | None:
        """Takes the call that is held, with its marks; None: more of it is to come."""
        end = self._form.end
        stop = self._held.find(end) if end else -1
        if stop >= 0:
            return self._take(stop + len(end))
        return self._take(len(self._held)) if is_end else None

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    def _call(self, name: str, arguments: str) -> Call:
        number = self._num_calls
        self._num_calls += 1
        digest = blake2b(f"{self._answer_id}/{number}".encode(), digest_size=12).hexdigest()
        return Call(number, f"call_{digest}", name, arguments)


def _num_before(text: str, mark: str) -> int:
    """The length of what stands before `mark`, or before what may become one, and white space."""
    start = text.find(mark)
    if start < 0:
        size = next(size for size in range(len(mark), -1, -1) if text.endswith(mark[:size]))
        start = len(text) - size
    return len(text[:start].rstrip())


def _parsed(body: str, form: CallFormat, function: str) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls in `body`; None: it is not made of calls."""
    text = body.strip().removeprefix(form.begin).removesuffix(form.end)
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    values: list[Any] = []
    try:
        while text:  # Llama puts semicolons between them
            value, size = _DECODER.raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[size:].lstrip().removeprefix(";").lstrip()
        if function:
            (arguments,) = values
            return [(function, _json_text(arguments))]
        return [_name_and_arguments(value) for value in values] or None
    except (ValueError, RecursionError):
        return None


def _name_and_arguments(value: Any) -> tuple[str, str]:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("it is not a call")
    arguments = value.get("arguments", value.get("parameters", {}))
    # Some models write JSON in JSON.
    return name, arguments if isinstance(arguments, str) else _json_text(arguments)


def _json_text(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("arguments have names")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
