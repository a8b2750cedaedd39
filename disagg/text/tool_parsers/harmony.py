"""GPT-OSS's answers: messages, each with a channel, and calls as messages to a function.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`; see the harmony guide at
https://github.com/openai/harmony. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re

from disagg.text.answer_delta import Reader, Sink
from disagg.text.incoming import Incoming, Marks, Reading

MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>",
         "<|constrain|>")  # fmt: skip
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final"  # in the header of messages to the user
FINAL_THEN = "<|message|>"
FORCE_FINAL = "<|end|><|start|>assistant" + FINAL  # ends an unfinished analysis

_HEADER_END = Marks("<|message|>", "<|end|>", "<|call|>", "<|return|>")
_MESSAGE_END = Marks("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEADER_BEGINS = ("<|start|>", "<|channel|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def read_harmony(text: Incoming, sink: Sink, read_final: Reader | None) -> Reading[None]:
    """Read an answer.

    Args:
        read_final: reads messages to the user; None reads them as text.
    """
    sink.is_reasoning = False
    mark = ""  # the mark that ended the previous message
    while (yield from text.more()):
        header, before = mark if mark in _HEADER_BEGINS else "", ""
        if not header:
            yield from text.spaces()
            text.record()
            yield from text.skip("assistant")  # its <|start|> is in the prompt, or forgotten
            yield from text.spaces()
            header = yield from text.skip_one(_HEADER_BEGINS)
            before = text.take_record()
        if not header:  # without a header it is a message to the user
            sink.text(before)
            mark = yield from text.until(_MESSAGE_END, sink.text)
            continue
        rest, mark = yield from text.collect(_HEADER_END)
        if mark == "<|message|>":
            mark = yield from _read_message(text, sink, header + rest, read_final)


def _read_message(
    text: Incoming, sink: Sink, header: str, read_final: Reader | None
) -> Reading[str]:
    """Read a message after its header. Returns the mark that ends it."""
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient and sink.begin_call(recipient[1].removeprefix("functions.")):
        mark = yield from text.until(_MESSAGE_END, sink.arguments)
        if mark:
            sink.end_call()
        return mark
    if channel is None or channel[1] in ("final", "commentary"):
        if read_final is None or channel is None or channel[1] != "final":
            return (yield from text.until(_MESSAGE_END, sink.text))
        yield from read_final(text, sink)
        return ""
    sink.is_reasoning = True
    mark = yield from text.until(_MESSAGE_END, sink.reasoning)
    sink.is_reasoning = False
    return mark
