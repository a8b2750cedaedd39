"""Tokenizers and templates of real models, which `make test-families` fetches (145 MB).

They are files of other projects, so they are fetched and not kept here.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from disagg.api.request_spec import RequestSpec
from disagg.api.served_model import ServedModel
from disagg.api.service import thinking_of
from disagg.messages import Grammar, SamplingParams
from disagg.text.answer_reader import AnswerReader, AnswerSyntax, prompt_tail
from disagg.text.chat_template import CallShape, ChatTemplate
from disagg.text.detokenizer import Detokenizer
from disagg.text.tokenizer import Tokenizer
from tests.text.answers import TOOLS, Found

FETCHED = Path(__file__).parents[2] / ".venv" / ".families"
SHA256 = {
    "gemma3": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    "gpt4o": "43a3ad4618a6a938f8c2614154ea10c31ad53a62d5683ae0b0e6133575cef07e",
    "llama2": "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
    "llama3": "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    "deepseek_v3": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
    "gptoss": "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
    "llama3_1": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    "qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
}
# What is not in the tokenizer's files: GPT-OSS's own template begins and ends prompts like this.
TEMPLATES = {"gptoss": "<|channel|>{{ messages[0].content }}<|end|><|start|>assistant"}
TEXTS = [
    "Hello, wörld! 你好，世界。 שלום 👩‍👩‍👧‍👦 naïve café",
    "def f(x):\n    return {'a': x ** 2}\n\n\n# 12345678  \t end",
    "  leading and trailing  ",
]
LOOK = ("look", '{"where": "Zürich 🏔"}')
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "description": "looks", "parameters": {}},
}
CALLED: Any = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": None, "reasoning_content": "Let me think.",
     "tool_calls": [{"id": "call00001", "type": "function",
                     "function": {"name": "look", "arguments": {"where": "here"}}}]},
    {"role": "tool", "content": "here", "tool_call_id": "call00001"},
]  # fmt: skip
SEP = "<｜tool▁sep｜>"
# An answer of each family as its model writes it, and what is in it.
ANSWERS = [
    ("qwen3", "<think>\nHm, 你好.\n</think>\n\nWell.\n<tool_call>\n"
     '{"name": "look", "arguments": {"where": "Zürich 🏔"}}\n</tool_call><|im_end|>',
     Found("Hm, 你好.", "Well.", (LOOK,))),
    ("gptoss", "<|channel|>analysis<|message|>Hm, 你好.<|end|><|start|>assistant"
     "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
     '{"where": "Zürich 🏔"}<|call|>',
     Found("Hm, 你好.", "", (LOOK,))),
    ("gptoss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
     "<|message|>你好 👩‍👩‍👧<|return|>", Found("Hm.", "你好 👩‍👩‍👧")),
    ("deepseek_v3", f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}look\n```json\n"
     '{"where": "Zürich 🏔"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
     Found("", "Well.", (LOOK,))),
    ("llama3_1", '{"name": "look", "parameters": {"where": "Zürich 🏔"}}<|eot_id|>',
     Found("", "", (LOOK,))),
]  # fmt: skip


@cache
def model(name: str) -> ServedModel:
    directory = FETCHED / name / "package" / "models"
    assert directory.exists(), "make test-families fetches it"
    raw = (directory / "tokenizer.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == SHA256[name], f"{name} is another one"
    tokenizer = Tokenizer.from_json(raw.decode(), name)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    source = config.get("chat_template") or TEMPLATES.get(name, "")
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        template=ChatTemplate(source, {"bos_token": "<s>"}),
        fingerprint=name,
        vocab_size=tokenizer.num_ids,
        max_model_len=4096,
        block_size=16,
        tool_call_parser="llama3_json" if name == "llama3_1" else "",
    )


@pytest.mark.parametrize("name", SHA256)
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_token_by_token(name: str, text: str) -> None:
    tokenizer = model(name).tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(token_ids) == text


@pytest.mark.parametrize(("name", "answer", "found"), ANSWERS)
def test_an_answer_is_read_token_by_token(name: str, answer: str, found: Found) -> None:
    its = model(name)
    tokenizer = its.tokenizer
    syntax = AnswerSyntax(its.reasoning_format, its.tool_format, TOOLS)
    kept = tokenizer.control_ids_in(syntax.marks)
    detokenizer, reader = Detokenizer(tokenizer, kept=kept), AnswerReader(syntax, "a")
    reasoning, text, arguments, names = "", "", "", []
    for token_id in [*tokenizer.encode(answer, add_special_tokens=False), None]:
        is_end = token_id is None
        piece = detokenizer.finish() if token_id is None else detokenizer.push(token_id)
        delta = reader.push(piece, is_end=is_end)
        reasoning, text = reasoning + delta.reasoning, text + delta.text
        arguments += "".join(call.arguments for call in delta.calls)
        names += [call.name for call in delta.calls if call.name]
    calls = tuple((called, arguments) for called in names)
    assert Found(reasoning, text, calls) == found


def test_earlier_calls_and_reasoning_reach_the_prompt() -> None:
    qwen3, deepseek = model("qwen3").template, model("deepseek_v3").template
    assert qwen3 is not None and deepseek is not None
    assert qwen3.call_shape == CallShape(no_content="")  # it fails on null
    assert deepseek.call_shape == CallShape(has_text_arguments=True)
    said = [each | {"content": each["content"] or ""} for each in CALLED]
    prompt = qwen3.render(said, tools=[TOOL])
    assert "<think>\nLet me think.\n</think>" in prompt and '"where": "here"' in prompt
    assert qwen3.arguments == {"enable_thinking"}


def test_marks_of_reasoning_are_tokens() -> None:
    for name, text in (("qwen3", "<|im_start|>assistant\n"), ("gptoss", "<|channel|>")):
        its = model(name)
        spec = RequestSpec(
            model=its,
            prompts=(),
            prompt_param="",
            sampling=SamplingParams(max_tokens=1),
            syntax=AnswerSyntax(its.reasoning_format, None, {}),
            thinking_token_budget=3,
        )
        encode = its.tokenizer.encode
        thinking = thinking_of(spec, Grammar("regex", "a"), encode(text, add_special_tokens=False))
        assert thinking is not None and not thinking.is_open
        special = {its.tokenizer.core.token_to_id(mark) for mark in ("<think>", "</think>")}
        if name == "qwen3":
            assert {thinking.starts[0][0], *thinking.end} == special
            assert len(thinking.starts[1]) == 2 and thinking.forced_end == thinking.end
        else:
            assert [len(each) for each in (thinking.starts[0], thinking.end, thinking.then)] == [
                3,
                2,
                1,
            ]
            assert thinking.forced_end[-2:] == thinking.end
        assert prompt_tail(its.tokenizer, encode(text, add_special_tokens=False)) == text
        if name == "qwen3":  # where the template has closed the reasoning, a grammar begins at once
            closed = encode("<think>\n\n</think>\n\n", add_special_tokens=False)
            assert thinking_of(spec, Grammar("regex", "a"), closed) is None
