"""All tool call formats, with vLLM's names, and which of them a chat template uses."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from disagg.text.answer_delta import Sink, joined
from disagg.text.chat_template import PROBE_ARGUMENTS, PROBE_NAME, ChatTemplate
from disagg.text.incoming import Incoming
from disagg.text.tool_parsers.format import ToolFormat, choose_format
from disagg.text.tool_parsers.harmony import MARKS as HARMONY_MARKS
from disagg.text.tool_parsers.harmony import read_harmony
from disagg.text.tool_parsers.json_calls import (
    DEEPSEEK,
    KIMI_K2,
    read_deepseek,
    read_granite,
    read_hermes,
    read_kimi_k2,
    read_llama3_json,
    read_mistral,
)
from disagg.text.tool_parsers.pythonic import read_pythonic
from disagg.text.tool_parsers.tags import read_glm45, read_minimax_m2, read_qwen3_coder

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

# The first format whose texts a template has is used, so texts of several formats come later.
FORMATS = (
    HARMONY,
    ToolFormat(("deepseek_v3", "deepseek_v31"), read_deepseek, (DEEPSEEK[2],), DEEPSEEK),
    ToolFormat(("kimi_k2",), read_kimi_k2, (KIMI_K2[2],), KIMI_K2),
    ToolFormat(
        ("qwen3_coder", "qwen3_xml"), read_qwen3_coder, ("<function=",),
        ("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        ("glm45", "glm47"), read_glm45, ("<arg_key>",),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat(
        ("minimax_m2",), read_minimax_m2, ("<minimax:tool_call>",),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolFormat(
        ("granite", "phi4_mini_json"), read_granite, ("<|tool_call|>",),
        ("<|tool_call|>", "<tool_call>", "</tool_call>", "<|/tool_call|>"),
    ),
    ToolFormat(("hermes",), read_hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    ToolFormat(
        ("mistral",), read_mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        call_id_style="mistral",
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
        sink.end()
        calls = joined(sink.take().calls)
        with suppress(ValueError):
            if [json.loads(call.arguments) for call in calls] == [PROBE_ARGUMENTS]:
                return True
    return False
