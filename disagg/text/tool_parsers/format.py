"""The common parts of tool call parsers.

A parser reads an answer after its reasoning, and puts text and calls into a sink. A call is put
there while it is generated. What turns out not to be a call of an offered function stays text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from disagg.text.answer_delta import CallIdStyle, Sink, Trimmed
from disagg.text.incoming import Incoming, Marks, Reading

Reader: TypeAlias = Callable[[Incoming, Sink], Reading[None]]


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls.

    Attributes:
        names: its names for `--tool-call-parser`, which are vLLM's.
        read: parses the calls in an answer.
        shown_by: a chat template with any of these texts uses this format.
        marks: texts that the reader looks for and that may be control tokens.
        call_id_style: see `Sink`.
    """

    names: tuple[str, ...]
    read: Reader
    shown_by: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    call_id_style: CallIdStyle = "openai"


class _Named(Protocol):
    """A format of calls, or of reasoning."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def shown_by(self) -> tuple[str, ...]: ...


Named = TypeVar("Named", bound=_Named)


def choose_format(formats: Iterable[Named], template_source: str, name: str) -> Named | None:
    """The format with this name, or for "" the first one that the chat template uses, if any."""
    for each in formats:
        if name in each.names or (not name and any(m in template_source for m in each.shown_by)):
            return each
    return None


@dataclass(frozen=True)
class Marked:
    """Reads calls that begin with a mark, anywhere in an answer.

    Attributes:
        begins: the marks.
        read_call: reads what follows the given mark; returns whether that was calls. If it was not,
            or not to its end, what was recorded meanwhile is text.
    """

    begins: tuple[str, ...]
    read_call: Callable[[Incoming, Sink, str], Reading[bool]]

    def __call__(self, text: Incoming, sink: Sink, dropped: tuple[str, ...] = ()) -> Reading[None]:
        """Read the rest of an answer. `dropped` are marks that are not part of its text."""
        trimmed = Trimmed(sink.text)
        while (yield from self.until_call(text, sink, trimmed, dropped)):
            pass
        if sink.num_calls:
            trimmed.drop()
        trimmed.flush()

    def until_call(
        self, text: Incoming, sink: Sink, take: Trimmed, ends: tuple[str, ...]
    ) -> Reading[str]:
        """Pass text to `take` up to a call, which is read, or up to one of `ends`.

        Returns the mark that was found; "" at the end of the answer.
        """
        while mark := (yield from text.until(marks_of(self.begins + ends), take)):
            if mark in ends:
                return mark
            num_calls = sink.num_calls
            text.record(mark)
            is_whole = yield from self.read_call(text, sink, mark)
            rest = "" if is_whole else text.recorded()
            if sink.num_calls > num_calls:
                take.drop()
                sink.text(rest)
                return mark
            take(rest)
        return ""


marks_of = functools.cache(lambda marks: Marks(*marks))


def read_text(text: Incoming, sink: Sink, before: str = "") -> Reading[None]:
    """Read the rest as text. White space after calls is dropped.

    Args:
        before: text that was read already.
    """
    take = Trimmed(sink.text) if sink.num_calls else sink.text
    take(before)
    yield from text.until(marks_of(()), take)
