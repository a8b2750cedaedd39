"""The common parts of tool call parsers.

A parser is a generator function that reads an answer after its reasoning, and puts text and calls
into a sink. A call is put there while it is generated. Text that turns out not to be a call before
its name is known stays text.
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
    """
    Attributes:
        names: what `--tool-call-parser` calls it; vLLM's names.
        read: finds the calls in an answer.
        shown_by: texts of which a chat template that shows such calls has at least one.
        marks: what the reader looks for and tokenizers may hold as control tokens.
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
    """The one of this name; "": the first that the chat template shows. None: there is none."""
    for each in formats:
        if name in each.names or (not name and any(m in template_source for m in each.shown_by)):
            return each
    return None


def read_marked(
    text: Incoming, sink: Sink, begin: Marks, read_calls: Callable[[str], Reading[bool]]
) -> Reading[None]:
    """Text with calls behind marks.

    Args:
        read_calls: given the mark, reads what follows; returns whether a call has begun. If not,
            the mark and what was read is text.
    """
    said = Trimmed(sink.text)
    while mark := (yield from text.until(begin, said)):
        text.record()
        is_call = yield from read_calls(mark)
        read = text.recorded()
        if is_call:
            said.drop()
        else:
            said(mark + read)
    if sink.num_calls:
        said.drop()
    said.flush()


def read_text(text: Incoming, sink: Sink, before: str = "") -> Reading[None]:
    """The rest is text; white space behind calls says nothing.

    Args:
        before: text that was read already.
    """
    said = Trimmed(sink.text) if sink.num_calls else sink.text
    said(before)
    yield from text.until(_NOTHING, said)


_NOTHING = Marks()
