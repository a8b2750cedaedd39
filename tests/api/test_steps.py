"""The five steps of a request, each by itself; `test_service` has them in a row."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from disagg.api.json_body import read_body
from disagg.api.openai.fields import REFUSED, ChatRequest, CompletionRequest
from disagg.api.openai.requests import (
    understand_chat,
    understand_completion,
)
from disagg.api.openai.structured_output import GrammarChecks
from disagg.api.prompts import tokenize_prompts
from disagg.api.request_spec import Conversation, RequestSpec, Text
from disagg.api.served_model import ServedModel
from disagg.api.service import fit, name_choices
from disagg.blocks import hash_blocks
from disagg.errors import InvalidRequest
from disagg.messages import Grammar, SamplingParams
from disagg.text.chat_template import ChatTemplate
from tests.api.fakes import END, TOKENIZER, served_model
from tests.api.openai.test_tools import HERMES, LOOK
from tests.generate_requests import new_request

HI: dict[str, Any] = {"messages": [{"role": "developer", "content": "hi"}]}


def chat(model: ServedModel | None = None, **fields: Any) -> RequestSpec:
    request = read_body(json.dumps(HI | fields).encode(), ChatRequest)
    return understand_chat(request, model or served_model())


def completion(**fields: Any) -> RequestSpec:
    request = read_body(json.dumps({"prompt": "a"} | fields).encode(), CompletionRequest)
    return understand_completion(request, served_model())


def test_understanding_needs_no_tokenizer() -> None:
    """Whatever it would ask of one fails here."""
    model = replace(served_model(template=HERMES), tokenizer=None)  # type: ignore[arg-type]
    spec = chat(model, tools=[LOOK], response_format=None, temperature=0.5, timeout=3, n=2)
    assert spec.prompts == [Conversation([{"role": "system", "content": "hi"}], [LOOK])]
    assert spec.sampling == SamplingParams(max_tokens=0, temperature=0.5, stop_token_ids=(END,))
    assert (spec.timeout_s, spec.num_choices, spec.syntax is not None) == (3.0, 2, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [LOOK]}, "tools"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
        ({"truncation_side": "right", "truncate_prompt_tokens": 5}, "truncation_side"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_needs_no_tokenizer_is_refused_without(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(replace(served_model(), tokenizer=None), **fields)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_refused_fields_may_ask_for_what_is_done_anyway() -> None:
    chat(served_model(), **dict.fromkeys(REFUSED))
    chat(
        served_model(),
        function_call="auto",
        functions=[],
        length_penalty=1.0,
        modalities=["text"],
        return_token_offsets=False,
        suffix="",
        truncation_side="left",
        use_beam_search=False,
    )


async def test_long_arguments_of_earlier_calls_leave_the_event_loop() -> None:
    threads = []

    class Seen(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            threads.append(threading.current_thread())
            return super().render(*args, **options)

    template = Seen("{{ messages[0].tool_calls[0].id }}", {})
    assert template.call_shape and not template.needs_parts and threads  # found at start
    threads.clear()
    model = replace(served_model(), template=template)
    for num_chars in (10, 10_000):
        call = {
            "id": "c",
            "function": {"name": "f", "arguments": json.dumps({"a": "b" * num_chars})},
        }
        spec = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
        await tokenize_prompts(spec.prompts, model)
    assert [each is threading.current_thread() for each in threads] == [True, False]


async def test_other_requests_go_on_between_prompts() -> None:
    num_turns, texts = 0, [Text("the fox")] * 20

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert len(await tokenize_prompts(texts, served_model())) == len(texts)
    counting.cancel()
    assert num_turns >= len(texts) - 1


async def test_fitting_completes_what_is_left_open() -> None:
    spec, checks = completion(top_k=10**9, guided_regex="a+"), GrammarChecks()
    sampling = await fit(spec, [[5] * 500, [5]], checks)
    assert sampling.max_tokens == 512 - 500
    assert sampling.top_k == TOKENIZER.num_ids
    assert sampling.grammar == Grammar("regex", "a+")
    assert (await fit(spec, [[5]], checks)).max_tokens == 16
    assert (await fit(structs.replace(spec, max_tokens=40), [[5]], checks)).max_tokens == 40


async def test_tokens_are_favoured_allowed_and_banned_as_asked() -> None:
    fields = {"logit_bias": {"5": -1, "7": 2.5}, "allowed_token_ids": [5, 7, END]}
    sampling = await fit(completion(**fields), [[5]], GrammarChecks())
    assert sampling.logit_bias == ((5, -1.0), (7, 2.5))
    assert sampling.allowed_token_ids == (5, 7, END)


async def test_bad_words_are_banned_within_a_text_and_at_its_beginning() -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(TOKENIZER.encode(text, add_special_tokens=False))

    asked = completion(bad_words=["quick", "x", "quick zebra"])
    words = (await fit(asked, [[5]], GrammarChecks())).bad_words_token_ids
    # " x" ends with the token of "x", which never comes anyway.
    expected = {ids("quick"), ids(" quick"), ids("x"), ids("quick zebra"), ids(" quick zebra")}
    assert set(words) == expected
    assert len(ids(" quick")) == 1 < len(ids("quick zebra"))
    everything = completion(bad_words=["x"], allowed_token_ids=[*ids("x")])
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        await fit(everything, [[5]], GrammarChecks())


async def test_ends_of_the_model_may_lie_beyond_the_vocabulary_of_prompts() -> None:
    model = replace(served_model(), eos_token_ids=(10**6,))
    spec = structs.replace(chat(model), prompts=[[5]])
    assert (await fit(spec, [[5]], GrammarChecks())).stop_token_ids == (10**6,)


def test_every_choice_has_an_id_and_a_seed_and_shares_its_prompts_blocks() -> None:
    spec = completion(prompt=[[5] * 9, [6] * 4], n=2, echo=True)
    common = new_request((), request_id="id", seed=7, tenant="t", traceparent="trace")
    requests, echoes = name_choices(spec, [[5] * 9, [6] * 4], common)
    assert [request.request_id for request in requests] == ["id", "id-1", "id-2", "id-3"]
    assert len({request.sampling.seed for request in requests}) == 4
    assert requests[0].sampling == common.sampling
    assert [len(request.block_hashes) for request in requests] == [2, 2, 1, 1]
    root = requests[0].hash_root
    assert list(requests[1].block_hashes) == hash_blocks(root, [5] * 9, 4)
    assert {(r.tenant, r.traceparent) for r in requests} == {("t", "trace")}
    assert echoes == tuple(TOKENIZER.decode(ids) for ids in ([5] * 9, [6] * 4))
