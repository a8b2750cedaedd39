"""A model in this process: its answers are those of the same model over HTTP, token for token."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from disagg import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from disagg.config import ASSETS
from disagg.errors import ContextLengthExceeded, InvalidRequest, StartupError

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "num_gpu_blocks_override": 96,
    "max_model_len": 512,
    "max_num_seqs": 8,
}
HELLO = [{"role": "user", "content": "hello"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def caller() -> Iterator[LLM]:
    with LLM(str(ASSETS / "demo-tools"), num_threads=1, max_num_seqs=4) as running:
        yield running


def over_http(llm: LLM, path: str, **body: Any) -> dict[str, Any]:
    """The answer of the HTTP application of the same model, in the loop in which it runs."""

    content = msgspec.json.encode({"return_token_ids": True, **body})
    headers = {"content-type": "application/json"}

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(llm._llm._started().ingress.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            return await client.post(path, content=content, headers=headers, timeout=60)

    reply = llm._wait(post())
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=20),
    "seeded": SamplingParams(temperature=1.3, top_p=0.9, top_k=40, seed=5, max_tokens=20, n=3),
    "penalties": SamplingParams(temperature=0, presence_penalty=1.5, repetition_penalty=1.2),
    "bias": SamplingParams(temperature=0, logit_bias={65: 100.0}, bad_words=["b"], min_tokens=3),
    "regex": SamplingParams(
        seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[ab]{4}c")
    ),
    "choice": SamplingParams(
        seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_http(llm: LLM, name: str) -> None:
    params = CASES[name]
    (output,) = llm.generate("The weather", params)
    answer = over_http(llm, "/v1/completions", prompt="The weather", **params.fields())
    assert [(each.text, each.token_ids, each.finish_reason) for each in output.outputs] == [
        (each["text"], each["token_ids"], each["finish_reason"]) for each in answer["choices"]
    ]
    assert output.prompt_token_ids == answer["choices"][0]["prompt_token_ids"]
    (ids,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, params)
    assert ids.outputs == output.outputs and ids.prompt is None


def test_log_probabilities_are_those_of_http(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("The weather", params)
    answer = over_http(llm, "/v1/completions", prompt="The weather", **params.fields())
    (choice,) = answer["choices"]
    (found,) = output.outputs
    assert found.logprobs is not None and output.prompt_logprobs is not None
    chosen = [at[token_id] for at, token_id in zip(found.logprobs, found.token_ids, strict=True)]
    assert [each.logprob for each in chosen] == choice["logprobs"]["token_logprobs"]
    assert found.cumulative_logprob == sum(choice["logprobs"]["token_logprobs"])
    assert [
        {each.decoded_token: each.logprob for each in at.values()} for at in found.logprobs
    ] == choice["logprobs"]["top_logprobs"]
    assert all(each.rank == 1 for each in chosen)
    assert output.prompt_logprobs[0] is None
    assert [
        {str(token_id): vars(each) for token_id, each in at.items()} if at else None
        for at in output.prompt_logprobs
    ] == choice["prompt_logprobs"]


def test_chats_and_their_calls_are_those_of_http(caller: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    for choice in ("auto", "required", "none"):
        fields: dict[str, Any] = {"tools": [ADD], "tool_choice": choice}
        (output,) = caller.chat(messages, params, **fields)
        answer = over_http(
            caller, "/v1/chat/completions", messages=messages, **params.chat_fields(), **fields
        )
        (expected,), (found,) = answer["choices"], output.outputs
        message = expected["message"]
        assert (found.text or None) == (message["content"] or None)
        assert (found.token_ids, found.finish_reason) == (
            expected["token_ids"],
            expected["finish_reason"],
        )
        assert [(each.name, each.arguments) for each in found.tool_calls] == [
            (each["function"]["name"], each["function"]["arguments"])
            for each in message.get("tool_calls", ())
        ]
        assert bool(found.tool_calls) == (choice != "none")


def test_outputs_are_in_the_order_of_their_prompts(llm: LLM) -> None:
    """More prompts than are sent at a time, each with parameters of its own."""
    prompts = [f"prompt {number}" for number in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 5) for number in range(40)]
    outputs = llm.generate(prompts, params)
    assert [each.prompt for each in outputs] == prompts
    assert [len(each.outputs[0].token_ids) for each in outputs] == [1 + n % 5 for n in range(40)]
    several = llm.chat([HELLO, [{"role": "user", "content": "bye"}], HELLO], params[0])
    assert several[0].outputs == several[2].outputs
    assert several[0].prompt_token_ids != several[1].prompt_token_ids
    assert llm.generate([]) == []


def test_a_stream_has_what_is_new(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    asked: list[tuple[Any, Any]] = [("The weather", llm.generate), (HELLO, llm.chat)]
    for prompt, whole in asked:
        (output,) = whole(prompt, params)
        pieces = list(llm.stream(prompt, params))
        assert "".join(each.outputs[0].text for each in pieces) == output.outputs[0].text
        ids = [token_id for each in pieces for token_id in each.outputs[0].token_ids]
        assert ids == output.outputs[0].token_ids
        assert [each.finished for each in pieces] == [False] * (len(pieces) - 1) + [True]
    for _ in llm.stream("left early", SamplingParams(max_tokens=None, ignore_eos=True)):
        break
    gc.collect()
    assert llm.generate("the next", params)[0].finished


def test_answers_end_where_they_are_told_to(llm: LLM) -> None:
    (free,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=12))
    fourth, text = free.outputs[0].token_ids[3], free.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=None, stop_token_ids=[fourth])
    assert llm.generate("x", params)[0].outputs[0].stop_reason == fourth
    (cut,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=12, stop=text[2:5]))
    assert (cut.outputs[0].text, cut.outputs[0].stop_reason) == (text[:2], text[2:5])


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda llm: llm.generate(["a", "b" * 600]), ContextLengthExceeded, "Prompt 1 of 2: "),
        (lambda llm: llm.generate("a", SamplingParams(top_p=2.0)), InvalidRequest, "top_p"),
        (lambda llm: llm.generate(["a", 5]), TypeError, "token ids"),
        (lambda llm: llm.generate(["a"], [SamplingParams()] * 2), ValueError, "1 prompts and 2"),
        (lambda llm: llm.chat(HELLO, tool=[ADD]), TypeError, "'tool'"),
        (lambda llm: llm.chat([{"role": "me", "content": ""}]), InvalidRequest, "messages"),
        (lambda llm: LLM("demo-small", max_len=4), StartupError, "max_len"),
        (lambda llm: LLM("demo-small", dtype="int3"), StartupError, "bfloat16"),
        (lambda llm: LLM("demo-small", num_decode=0), StartupError, "decode"),
        (lambda llm: LLM("no-such-model"), StartupError, "demo-small"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said(
    llm: LLM, ask: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ask(llm)
    assert llm.generate("it goes on")[0].finished


async def test_the_async_twin_disaggregates(model: Path, llm: LLM) -> None:
    """Prefill and decode on workers of their own, in the loop of the program."""
    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [f"{number} and a prompt of some blocks, " * 4 for number in range(6)]
    async with AsyncLLM(str(model), num_prefill=1, num_decode=2, **SMALL) as twin:
        outputs = await asyncio.gather(*(twin.generate(each, params) for each in prompts))
        async for piece in twin.stream(prompts[0], params):
            assert isinstance(piece, RequestOutput)
    alone = await asyncio.to_thread(llm.generate, prompts, params)
    assert [each.outputs for (each,) in outputs] == [each.outputs for each in alone]


def test_a_closed_one_says_so_and_leaves_no_thread(model: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(str(model), **SMALL)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()


def test_a_program_ends_without_closing_it(model: Path) -> None:
    code = f"""
import sys, disagg
assert not {{"torch", "ray", "msgspec", "asyncio"}} & sys.modules.keys()
llm = disagg.LLM({str(model)!r}, **{SMALL!r})
print(llm.generate("a")[0].finished)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("True\n", "", 0)
