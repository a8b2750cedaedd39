"""All tool call formats, with vLLM's names, and which of them a chat template uses."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from disagg.text.answer_delta import CallIdStyle, Reader, Sink, join_calls
from disagg.text.chat_template import PROBE_ARGUMENTS, PROBE_NAME, ChatTemplate
from disagg.text.incoming import Incoming
from disagg.text.tool_parsers.harmony import MARKS as HARMONY_MARKS
from disagg.text.tool_parsers.harmony import read_harmony
from disagg.text.tool_parsers.json_calls import (
    DEEPSEEK,
    KIMI_K2,
    MARK_ENDS,
    read_deepseek,
    read_functionary,
    read_kimi_k2,
    read_llama3_json,
    read_marked_json,
    read_mistral,
)
from disagg.text.tool_parsers.literals import (
    FUNCTION_GEMMA,
    GEMMA_4,
    read_braces,
    read_lfm2,
    read_pythonic,
)
from disagg.text.tool_parsers.tags import (
    GLM45,
    HY_V3,
    MINICPM5,
    MINIMAX_M2,
    QWEN3_CODER,
    Tags,
    read_deepseek_v32,
)


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


HARMONY = ToolFormat(
    ("openai",), partial(read_harmony, read_final=None), ("<|channel|>",), HARMONY_MARKS
)
# Also the format of answers that a grammar restricts.
LLAMA3_JSON = ToolFormat(
    ("llama3_json", "llama4_json"), read_llama3_json, ('"parameters": ',), ("<|python_tag|>",)
)
# Its text tells models the format, whatever it shows: Llama 4's shows calls as JSON.
PYTHONIC = ToolFormat(
    ("pythonic", "llama4_pythonic"), read_pythonic, ("[func_name1(",),
    ("<|python_start|>", "<|python_end|>"),
)  # fmt: skip


def _json(names: tuple[str, ...], *begins: str) -> ToolFormat:
    """JSON between marks; a template with the first of `begins` uses it."""
    ends = tuple(MARK_ENDS[begin] for begin in begins)
    return ToolFormat(names, read_marked_json(begins), begins[:1], (*begins, *filter(None, ends)))


def _tags(names: tuple[str, ...], tags: Tags, shown_by: str) -> ToolFormat:
    return ToolFormat(names, tags.reader, (shown_by,), tags.marks)


# The first format whose texts a template has is used, so texts of several formats come later.
FORMATS = (
    HARMONY,
    ToolFormat(("deepseek_v3", "deepseek_v31"), read_deepseek, (DEEPSEEK[2],), DEEPSEEK),
    ToolFormat(("kimi_k2",), read_kimi_k2, (KIMI_K2[2],), KIMI_K2),
    ToolFormat(("deepseek_v32", "deepseek_v4"), read_deepseek_v32, ("｜DSML｜",), ("｜DSML｜",)),
    _tags(("qwen3_coder", "qwen3_xml"), QWEN3_CODER, "<function="),
    _tags(("glm45", "glm47"), GLM45, "<arg_key>"),
    _tags(("hy_v3",), HY_V3, "<tool_sep:opensource>"),
    _tags(("minimax_m2",), MINIMAX_M2, "<minimax:tool_call>"),
    _tags(("minicpm5",), MINICPM5, "<param name="),
    ToolFormat(("gemma4",), read_braces(*GEMMA_4), ("<|tool_call>call:",), GEMMA_4),
    ToolFormat(
        ("functiongemma",), read_braces(*FUNCTION_GEMMA), ("<start_function_call>",),
        FUNCTION_GEMMA,
    ),
    _json(("granite", "phi4_mini_json"), "<|tool_call|>", "<tool_call>"),
    _json(("cohere_command3", "cohere_command4"), "<|START_ACTION|>"),
    _json(("gigachat3",), "<|function_call|>", "function call<|role_sep|>"),
    _json(("nemotron_json",), "<TOOLCALL>"),
    _json(("minimax",), "<tool_calls>"),
    _json(("hermes",), "<tool_call>"),
    ToolFormat(
        ("mistral",), read_mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        call_id_style="mistral",
    ),
    ToolFormat(("functionary",), read_functionary),
    ToolFormat(
        ("lfm2",), read_lfm2, ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    PYTHONIC,
    LLAMA3_JSON,
)  # fmt: skip
NAMES = ("none", *(name for each in FORMATS for name in each.names))


@functools.lru_cache(maxsize=64)
def tool_format_of(template: ChatTemplate | None, name: str = "") -> ToolFormat | None:
    """The format in which a model writes calls; None if it is unknown.

    It is a format in which a call that the template shows is read back, and the first such whose
    texts the template has. A template that shows no calls is recognised by these texts only.

    Args:
        name: name of a parser; "" recognises it from the chat template.
    """
    if name or template is None:
        return choose_format(FORMATS, "", name)
    likely = choose_format(FORMATS, template.source, "")
    if not template.shown_calls or likely is PYTHONIC:
        return likely
    candidates = (likely, *FORMATS) if likely else FORMATS
    return next((each for each in candidates if _reads(each, template.shown_calls)), None)


def _reads(form: ToolFormat, answers: Iterable[str]) -> bool:
    """Whether the call in one of the answers is read in this format."""
    for answer in answers:
        text, sink = Incoming(), Sink("", {PROBE_NAME: {}})
        text.push(answer, is_end=True)
        for _ in form.read(text, sink):
            pass
        sink.end_call()
        calls = join_calls(sink.take().calls)
        with suppress(ValueError):
            if [json.loads(call.arguments) for call in calls] == [PROBE_ARGUMENTS]:
                return True
    return False
