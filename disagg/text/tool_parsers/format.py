"""The common parts of tool call parsers.

A parser is a generator function that reads an answer after its reasoning, and puts text and calls
into a sink. A call is put there while it is generated. If it turns out not to be a call before its
name is known, it stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from disagg.text.answer_delta import CallIdStyle, Sink, Trimmed
from disagg.text.incoming import Incoming, Marks, Reading

# Name of an offered function -> JSON schema of its parameters.
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
Reader: TypeAlias = Callable[[Incoming, Sink, Tools], Reading[None]]


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


def read_marked(
    text: Incoming, sink: Sink, begin: Marks, read_calls: Callable[[str], Reading[bool]]
) -> Reading[None]:
    """Read text with calls that follow marks.

    Args:
        read_calls: reads what follows the given mark; returns whether a call has begun. If not,
            the mark and the text that was read stay text.
    """
    trimmed = Trimmed(sink.text)
    while mark := (yield from text.until(begin, trimmed)):
        text.record()
        is_call = yield from read_calls(mark)
        read = text.recorded()
        if is_call:
            trimmed.drop()
        else:
            trimmed(mark + read)
    if sink.num_calls:
        trimmed.drop()
    trimmed.flush()


def read_text(text: Incoming, sink: Sink, before: str = "") -> Reading[None]:
    """Read the rest as text. White space after calls is dropped.

    Args:
        before: text that was read already.
    """
    take = Trimmed(sink.text) if sink.num_calls else sink.text
    take(before)
    yield from text.until(_NOTHING, take)


_NOTHING = Marks()
