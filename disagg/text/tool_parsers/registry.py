"""All tool call formats, with vLLM's names, and how chat templates show which one is used."""

from __future__ import annotations

import functools
from functools import partial

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
    ToolFormat(
        ("pythonic", "llama4_pythonic"), read_pythonic, ("[func_name1(",),
        ("<|python_start|>", "<|python_end|>"),
    ),
    LLAMA3_JSON,
)  # fmt: skip
NAMES = ("none", *(name for each in FORMATS for name in each.names))


@functools.lru_cache(maxsize=64)
def tool_format_of(template_source: str, name: str = "") -> ToolFormat | None:
    """The format in which a model writes calls; None if it is unknown.

    Args:
        name: name of a parser; "" detects it from the chat template.
    """
    return choose_format(FORMATS, template_source, name)
