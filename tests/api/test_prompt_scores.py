"""Log-probabilities of prompts, token ids in answers, cut prompts and continued messages."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.api.prompts import tokenize_prompts
from disagg.api.request_spec import Conversation
from disagg.text.chat_template import ChatTemplate
from tests.api.apps import http_client, make_app, openai_client
from tests.api.fakes import CHATML, END, TOKENIZER, FakeGenerate, served_model

HI: Any = [{"role": "user", "content": "hi"}]
TEXT = "the quick brown fox"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def post(url: str, generate: FakeGenerate | None = None, **fields: Any) -> Any:
    async with http_client(make_app(generate or FakeGenerate(TEXT))) as client:
        reply = await client.post(url, json=fields)
        assert reply.status_code == 200, reply.text
        return reply.json()


async def complete(generate: FakeGenerate | None = None, **fields: Any) -> Any:
    answer = await post("/v1/completions", generate, **fields)
    return answer if len(answer["choices"]) > 1 else answer["choices"][0]


@pytest.mark.parametrize("prompt", ["the lazy dog", ids("the lazy dog")])
async def test_echo_with_logprobs_scores_prompt_and_answer(prompt: Any) -> None:
    """As lm-eval reads it: places of both, and text offsets into the whole text."""
    choice = await complete(prompt=prompt, max_tokens=1, echo=True, logprobs=1)
    token_ids = [*ids("the lazy dog"), ids(TEXT)[0]]
    scores, text = choice["logprobs"], choice["text"]
    assert scores["tokens"] == [TOKENIZER.token_text(i) for i in token_ids]
    assert text == "".join(scores["tokens"])
    assert scores["token_logprobs"] == [None, *(-i for i in range(1, len(token_ids) - 1)), -0.5]
    likeliest = {TOKENIZER.token_text(7): -0.25}  # and the prompt's own token
    tops = [likeliest | {scores["tokens"][i]: -i} for i in range(1, len(token_ids) - 1)]
    assert scores["top_logprobs"][:-1] == [None, *tops]
    ends = [*scores["text_offset"][1:], len(text)]
    parts = [text[a:b] for a, b in zip(scores["text_offset"], ends, strict=True)]
    assert parts == scores["tokens"]
    assert "prompt_logprobs" not in choice


async def test_several_prompts_are_scored_each_for_itself() -> None:
    answer = await complete(prompt=[[5, 6, 7], [8]], max_tokens=1, echo=True, logprobs=0)
    scores = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert scores == [[None, -1, -2, -0.5], [None, -0.5]]


async def test_no_tokens_and_echo_is_the_prompt_alone() -> None:
    generate = FakeGenerate(TEXT)
    answer = await post(
        "/v1/completions", generate, prompt="the fox", max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the fox", "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids("the fox"))
    assert answer["usage"]["completion_tokens"] == 0
    assert generate.requests[0].sampling.max_tokens == 1


async def test_prompt_logprobs_are_vllms() -> None:
    (*_, last_id) = token_ids = ids("the lazy dog")
    choice = await complete(prompt=token_ids, max_tokens=1, prompt_logprobs=1)
    assert choice["logprobs"] is None
    first, *_, last = choice["prompt_logprobs"]
    rank = len(token_ids) - 1
    assert first is None and len(choice["prompt_logprobs"]) == len(token_ids)
    assert last == {
        str(last_id): {
            "logprob": -rank,
            "rank": rank,
            "decoded_token": TOKENIZER.token_text(last_id),
        },
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": TOKENIZER.token_text(7)},
    }
    chat = await post("/v1/chat/completions", messages=HI, prompt_logprobs=0, n=2)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_token_ids_are_returned_where_they_are_asked_for() -> None:
    answer_ids = [*ids(TEXT), END]
    choice = await complete(prompt=[5, 6], max_tokens=50, return_token_ids=True)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], answer_ids)
    chat = await post("/v1/chat/completions", messages=HI, return_token_ids=True)
    assert chat["choices"][0]["token_ids"] == answer_ids
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    for answer in (await complete(prompt="a"), await post("/v1/chat/completions", messages=HI)):
        assert "token_ids" not in str(answer)


@pytest.mark.parametrize("per_delta", [1, 3])
async def test_a_stream_has_every_token_id_once(per_delta: int) -> None:
    asked: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "stream": True}
    app = make_app(FakeGenerate(TEXT + "é ☃", per_delta=per_delta))
    async with openai_client(app) as client:
        texts = await client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=50, stop="zebra", **asked
        )
        chats = await client.chat.completions.create(model="tiny", messages=HI, n=2, **asked)
        prompts: list[Any] = []
        found: dict[Any, list[int]] = {"text": [], 0: [], 1: []}
        async for text in texts:
            prompts += getattr(text.choices[0], "prompt_token_ids", None) or []
            found["text"] += getattr(text.choices[0], "token_ids", None) or []
        num_prompts = 0
        async for chunk in chats:
            num_prompts += hasattr(chunk, "prompt_token_ids")
            found[chunk.choices[0].index] += getattr(chunk.choices[0], "token_ids", None) or []
    assert (prompts, num_prompts) == ([5, 6], 1)
    assert all(each == [*ids(TEXT + "é ☃"), END] for each in found.values())


async def test_a_prompt_is_cut_to_its_last_tokens() -> None:
    generate = FakeGenerate(TEXT)
    text = "a " * 600  # more than the model takes
    num_all = len(ids(text))
    answer = await post(
        "/v1/completions", generate, prompt=text, truncate_prompt_tokens=9, max_tokens=4, echo=True
    )
    assert answer["usage"]["prompt_tokens"] == 9
    assert generate.requests[0].token_ids == tuple(ids(text)[-9:])
    assert answer["choices"][0]["text"].startswith(TOKENIZER.decode(ids(text)[-9:]))
    for max_tokens in (100, None):
        answer = await post(
            "/v1/completions", prompt=text, truncate_prompt_tokens=-1, max_tokens=max_tokens
        )
        assert answer["usage"]["prompt_tokens"] == min(num_all, 512 - (max_tokens or 16))
    async with http_client(make_app()) as client:
        long = {"prompt": "a " * 20_000, "truncate_prompt_tokens": 9}
        refused = (await client.post("/v1/completions", json=long)).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    short = await complete(prompt=[5, 6], truncate_prompt_tokens=9, return_token_ids=True)
    assert short["prompt_token_ids"] == [5, 6]


async def test_a_final_message_is_continued() -> None:
    """Its end token and whatever else a template puts behind it are left out."""
    model = served_model()
    messages = [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one, two, "},
    ]
    asked = Conversation(messages, add_generation_prompt=False, continue_final_message=True)
    (token_ids,) = await tokenize_prompts([asked], model)
    expected = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\none, two, "
    assert token_ids == ids(expected)
    trimmed = served_model(template=CHATML.replace("message['content']", "message['content']|trim"))
    assert await tokenize_prompts([asked], trimmed) == [token_ids], "white space at its end counts"
    generate = FakeGenerate(TEXT)
    await post("/v1/chat/completions", generate, messages=messages, continue_final_message=True)
    assert list(generate.requests[0].token_ids) == token_ids


async def test_a_template_without_the_final_message_is_refused() -> None:
    model = served_model(template="{{ messages[0].content }}")
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    async with http_client(make_app(FakeGenerate(), model)) as client:
        reply = await client.post(
            "/v1/chat/completions", json={"messages": asked, "continue_final_message": True}
        )
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "continue_final_message"
    assert isinstance(model.template, ChatTemplate)


async def test_too_many_log_probabilities_are_refused() -> None:
    body = {"prompt": [[5] * 500] * 60, "prompt_logprobs": 20}
    async with http_client(make_app()) as client:
        reply = await client.post("/v1/completions", json=body)
    assert reply.json()["error"]["param"] == "prompt_logprobs"
