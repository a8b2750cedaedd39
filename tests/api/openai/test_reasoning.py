"""Reasoning over HTTP: apart from what is said, in answers, streams and usage."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from disagg.api.apis import CHAT
from disagg.api.http.app import AsgiApp
from disagg.api.served_model import ServedModel
from disagg.api.service import Caller, Service
from disagg.config import ASSETS
from disagg.errors import InvalidRequest, ModelError
from disagg.messages import GenerateRequest
from disagg.models.description import describe_model
from disagg.text.tokenizer import Tokenizer
from tests.api.apps import HI, chat, chat_chunks, complete, make_app, openai_client
from tests.api.fakes import (
    CHATML,
    TOKENIZER,
    FakeGenerate,
    NoAdapters,
    byte_level_core,
    served_model,
)
from tests.api.openai.test_tools import LOOK

# As Qwen3's: the model writes both marks, or the template does.
THINKING = (
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% endfor %}"
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}" + CHATML
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)  # fmt: skip
OPEN = THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'


def app(says: str, template: str = THINKING, per_delta: int = 3) -> tuple[AsgiApp, FakeGenerate]:
    generate = FakeGenerate(says, per_delta=per_delta)
    return make_app(generate, served_model(template=template, max_model_len=2048)), generate


@pytest.mark.parametrize(
    ("template", "says"),
    [(THINKING, "<think>\nSo, yes.\n</think>\n\nHi!"), (OPEN, "So, yes.\n</think>\n\nHi!")],
)
async def test_reasoning_is_a_field_of_its_own(template: str, says: str) -> None:
    serving, _ = app(says, template)
    answer = await chat(serving)
    hidden = await chat(serving, extra_body={"include_reasoning": False})
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hi!", "So, yes.")
    assert message.reasoning == message.reasoning_content
    thought = len(TOKENIZER.encode("So, yes.\n", add_special_tokens=False))
    counted = answer.usage.completion_tokens_details.reasoning_tokens
    assert thought - 2 <= counted <= thought + 12  # marks are several tokens of this tokenizer
    assert hidden.choices[0].message.content == "Hi!"
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert hidden.usage == answer.usage


@pytest.mark.parametrize("per_delta", [1, 5, 1000])
async def test_a_stream_adds_up_to_the_answer(per_delta: int) -> None:
    other = CALL.replace("look", "walk")  # no function's call, which does not end the reasoning
    serving, _ = app(f"So {other}?\n</think>\n\nWell.\n{CALL}", OPEN, per_delta)
    request: Any = {"tools": [LOOK], "max_tokens": 400}
    (whole,) = (await chat(serving, **request)).choices
    chunks = await chat_chunks(serving, **request)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    message, deltas = whole.message, [choice.delta for choice in choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == message.reasoning_content == f"So {other}?"
    assert "".join(delta.content or "" for delta in deltas) == message.content == "Well."
    (call,) = message.tool_calls
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].id and calls[0].function.name == call.function.name == "look"
    assert "".join(each.function.arguments for each in calls) == call.function.arguments
    assert json.loads(call.function.arguments) == {"where": "here"}
    assert choices[-1].finish_reason == whole.finish_reason == "tool_calls"


@pytest.mark.parametrize("per_delta", [1, 5, 1000])
@pytest.mark.parametrize(
    ("says", "stop", "reasoning", "content", "has_call", "reason"),
    [
        ("So, yes.\n</think>\nHi all, bye", ["yes", "bye"], "So, yes.", "Hi all, ", False, "stop"),
        ("So, yes.\n</think>\nHi", [".", "i"], "So, yes.", "H", False, "stop"),
        (f"So.</think>\n{CALL}", ["here", "}", "call"], "So.", None, True, "tool_calls"),
        (f"So.</think>\nI do{CALL} so it is", ["it"], "So.", "I do so ", True, "tool_calls"),
        (f"So.</think>\nI do{CALL}", ["do"], "So.", "I ", False, "stop"),
        ("So.</think>\nI d", ["do"], "So.", "I d", False, "stop"),  # held back to the end
    ],
)
async def test_stop_strings_end_what_is_said_only(
    says: str,
    stop: list[str],
    reasoning: str,
    content: str | None,
    has_call: bool,
    reason: str,
    per_delta: int,
) -> None:
    serving, _ = app(says, OPEN, per_delta)
    (choice,) = (await chat(serving, tools=[LOOK], stop=stop, max_tokens=400)).choices
    message = choice.message
    assert (message.reasoning_content, message.content) == (reasoning, content)
    assert (bool(message.tool_calls), choice.finish_reason) == (has_call, reason)
    for call in message.tool_calls or []:
        assert json.loads(call.function.arguments) == {"where": "here"}


async def test_an_answer_that_is_cut_while_thinking_says_nothing() -> None:
    serving, _ = app("So, yes and no and yes", OPEN)
    answer = await chat(serving, max_tokens=4)
    message = answer.choices[0].message
    assert message.content is None and message.reasoning_content.startswith("So")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_earlier_reasoning_reaches_the_template(name: str) -> None:
    serving, generate = app("ok")
    earlier: Any = {"role": "assistant", "content": "a", name: "because"}
    async with openai_client(serving) as client:
        await client.chat.completions.create(model="tiny", messages=[*HI, earlier, *HI])
    prompt = TOKENIZER.decode(generate.requests[0].token_ids, skip_special_tokens=False)
    assert prompt.startswith("<think>because</think>")


async def test_text_completions_are_as_the_model_wrote_them() -> None:
    serving, _ = app("<think>So</think>Hi")
    answer = await complete(serving, max_tokens=100)
    assert answer.choices[0].text == "<think>So</think>Hi"


MARKED = byte_level_core()
MARKED.add_tokens(["<think>", "</think>"])
START_ID, END_ID = (MARKED.token_to_id(mark) for mark in ("<think>", "</think>"))


def thinker(template: str = THINKING, **fields: Any) -> ServedModel:
    """A model whose marks are tokens, as those of real models are."""
    model = served_model(template=template, max_model_len=2048)
    tokenizer = Tokenizer(MARKED)
    return replace(model, tokenizer=tokenizer, vocab_size=tokenizer.num_ids, **fields)


async def asked(model: ServedModel, **fields: Any) -> GenerateRequest:
    """What workers are asked for a chat with these fields."""
    body = json.dumps({"messages": HI, **fields}).encode()
    service = Service({"tiny": model}, FakeGenerate(), NoAdapters())
    job = await service.prepare(CHAT, body, Caller("r"))
    return job.requests[0]


def prompt_of(request: GenerateRequest) -> str:
    return Tokenizer(MARKED).decode(request.token_ids, skip_special_tokens=False)


async def test_engines_are_told_of_a_budget() -> None:
    budgeted = (await asked(thinker(), thinking_token_budget=7)).sampling.thinking
    assert budgeted is not None and budgeted.budget == 7 and not budgeted.is_open
    assert budgeted.starts[0] == (START_ID,) and budgeted.starts[1][-1] == START_ID
    assert budgeted.end == budgeted.forced_end == (END_ID,)
    opened = (await asked(thinker(OPEN), thinking_token_budget=0)).sampling.thinking
    assert opened is not None and opened.is_open and opened.budget == 0
    for fields in ({}, {"thinking_token_budget": -1}, {"thinking_token_budget": None}):
        assert (await asked(thinker(), **fields)).sampling.thinking is None


async def test_a_grammar_begins_behind_the_reasoning() -> None:
    form = {"response_format": {"type": "json_object"}}
    thinking = (await asked(thinker(OPEN), **form)).sampling.thinking
    assert thinking is not None and thinking.is_open and thinking.budget is None
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert (await asked(thinker(), **form, **off)).sampling.thinking is None  # it begins at once
    open_later = (await asked(thinker(), **form)).sampling.thinking
    assert open_later is not None and not open_later.is_open
    assert (await asked(served_model(), **form)).sampling.thinking is None


EFFORT = "{{ reasoning_effort }}" + CHATML
HARMONY = EFFORT + "{% if add_generation_prompt %}<|channel|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "fields", "written"),
    [
        (THINKING, {"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        (THINKING, {"reasoning_effort": "medium"}, "assistant\n"),
        (THINKING, {"chat_template_kwargs": {"thinking": False}}, "<think>\n\n</think>\n\n"),
        (CHATML, {"reasoning_effort": "none"}, "assistant\n"),
        (CHATML, {"chat_template_kwargs": {"enable_thinking": False}}, "assistant\n"),
        (CHATML + "{{ reasoning_effort }}", {"reasoning_effort": "high"}, "high"),
        (CHATML + "{{ colour }}", {"chat_template_kwargs": {"colour": "red"}}, "red"),
    ],
)
async def test_what_a_template_reads_it_is_told(
    template: str, fields: dict[str, Any], written: str
) -> None:
    assert prompt_of(await asked(thinker(template), **fields)).endswith(written)


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (THINKING, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHATML, {"reasoning_effort": "medium"}, "reasoning_effort"),
        (HARMONY, {"reasoning_effort": "none"}, "reasoning_effort"),
        (THINKING, {"reasoning_effort": "much"}, "reasoning_effort"),
        (CHATML, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (THINKING, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (CHATML, {"chat_template_kwargs": {"enable_thinking": True}},
         "chat_template_kwargs.enable_thinking"),
        (HARMONY, {"chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs.enable_thinking"),
        (CHATML, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused(
    template: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await asked(thinker(template), **fields)
    assert refused.value.param == param


async def test_marks_of_several_tokens_bear_no_budget() -> None:
    with pytest.raises(InvalidRequest, match="ordinary text"):
        await asked(served_model(template=THINKING), thinking_token_budget=5)


async def test_a_parser_can_be_named() -> None:
    model = thinker(CHATML, reasoning_parser="deepseek_r1", tool_call_parser="hermes")
    thinking = (await asked(model, thinking_token_budget=5)).sampling.thinking
    assert thinking is not None and thinking.is_open
    off = thinker(reasoning_parser="none")
    assert off.reasoning_format is None and off.tool_format is not None


@pytest.mark.parametrize("param", ["reasoning_parser", "tool_call_parser"])
def test_a_parser_that_is_not_there_is_refused_at_start(param: str) -> None:
    with pytest.raises(ModelError, match=r"'qwen' *; choose from none, ") as refused:
        name: Any = {param: "qwen"}
        ServedModel.from_description(
            describe_model(ASSETS / "demo-small"), name="m", block_size=4, **name
        )
    assert refused.value.param == param


SHOWS_CALLS = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
LOOKED: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{}"}}],
}


async def test_harmony_takes_reasoning_and_text_beside_a_call() -> None:
    """GPT-OSS's template refuses both, and tools without a description."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<|channel|>commentary"
        " to=functions.{{ c.function.name }}<|message|>{{ c.function.arguments | tojson }}"
        "<|call|>{% endfor %}{% endfor %}"
        + HARMONY
        + "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('both') }}{% endif %}{{ m.thinking or '' }}{% endfor %}"
        "{% for tool in tools %}{{ '|' + tool.function.description }}{% endfor %}"
    )
    earlier = LOOKED | {"content": "I look.", "reasoning": "So."}
    bare = {"type": "function", "function": {"name": "look"}}
    request = await asked(thinker(template), messages=[*HI, earlier], tools=[bare])
    assert prompt_of(request).endswith("So.\n\nI look.|")


async def test_a_message_without_text_is_shown_to_templates_that_look_into_it() -> None:
    """As Qwen3's: with null, as the client libraries send it beside calls, it fails."""
    template = "{% for m in messages %}{% if '<x>' in m.content %}{% endif %}{% endfor %}" + CHATML
    request = await asked(thinker(template + SHOWS_CALLS), messages=[*HI, LOOKED])
    assert "'name': 'look'" in prompt_of(request)
