"""The two completion endpoints through the real OpenAI client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from disagg.api.http.app import AsgiApp
from disagg.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Unavailable,
)
from tests.api.apps import (
    HI,
    chat,
    chat_chunks,
    complete,
    http_client,
    make_app,
    openai_client,
)
from tests.api.fakes import FakeGenerate, served_model

TEXT = "the quick brown fox"
NUM_TOKENS = len(FakeGenerate(TEXT).token_ids) + 1  # and the end token


async def test_chat_answer_whole() -> None:
    answer = await chat(make_app(FakeGenerate(TEXT, num_cached_tokens=4)))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.created) == ("tiny", 1000)
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + NUM_TOKENS
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("per_delta", [1, 2, 100])
async def test_chat_stream_has_role_text_end_usage_in_this_order(per_delta: int) -> None:
    app = make_app(FakeGenerate(TEXT, per_delta=per_delta))
    chunks = await chat_chunks(app, stream_options={"include_usage": True})
    first, *middle, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == TEXT
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert (end.choices[0].finish_reason, end.choices[0].delta.content) == ("stop", "")
    assert usage.choices == []
    assert usage.usage.completion_tokens == NUM_TOKENS
    assert {chunk.id for chunk in chunks} == {first.id}


async def test_usage_in_every_event_counts_up() -> None:
    """As guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    app = make_app(FakeGenerate(TEXT, per_delta=1))
    _, *chunks = await chat_chunks(app, extra_body={"stream_options": options})
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == len(chunks)
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (1, NUM_TOKENS)
    assert len({usage.prompt_tokens for usage in usages}) == 1


async def test_no_usage_unless_asked_for() -> None:
    async with http_client(make_app()) as client:
        reply = await client.post(
            "/v1/chat/completions", json={"messages": HI, "model": "tiny", "stream": True}
        )
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert "usage" not in reply.text
    assert '"choices":[]' not in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")
    assert reply.text.count('"finish_reason":"stop"') == 1


async def test_several_choices_have_seeds_of_their_own_and_share_the_prompt() -> None:
    generate = FakeGenerate(TEXT, num_cached_tokens=4)
    answer, again = [await chat(make_app(generate), n=3, seed=9) for _ in range(2)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage == again.usage
    assert answer.usage.completion_tokens == 3 * NUM_TOKENS
    assert answer.usage.prompt_tokens == generate.requests[0].num_prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    seeds = [request.sampling.seed for request in generate.requests]
    assert seeds[0] == 9
    assert len(set(seeds[:3])) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])


async def test_as_many_choices_as_openai_allows() -> None:
    """As estimates of pass@k ask for."""
    app = make_app(FakeGenerate(TEXT))
    answer = await chat(app, n=128)
    with pytest.raises(openai.BadRequestError, match="n"):
        await chat(app, n=129)
    assert [choice.index for choice in answer.choices] == list(range(128))


async def test_streamed_choices_interleave_and_each_ends_once() -> None:
    texts, ends = {0: "", 1: "", 2: ""}, []
    for chunk in await chat_chunks(make_app(FakeGenerate(TEXT)), n=3):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            ends.append(choice.index)
    assert set(texts.values()) == {TEXT}
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_cut_and_close_the_source(stream: bool) -> None:
    generate = FakeGenerate(TEXT)
    app, with_stop = make_app(generate), {"include_stop_str_in_output": True}
    kept = await _chat_text(app, stream, stop=["brown f"])
    included = await _chat_text(app, stream, stop="quick", extra_body=with_stop)
    assert kept == ("the quick ", "stop")
    assert included == ("the quick", "stop")
    assert (generate.num_open, generate.num_closed) == (0, 2)


async def _chat_text(app: AsgiApp, stream: bool, **fields: Any) -> tuple[str, str | None]:
    if not stream:
        (choice,) = (await chat(app, **fields)).choices
        return choice.message.content, choice.finish_reason
    choices = [chunk.choices[0] for chunk in await chat_chunks(app, **fields)]
    return "".join(each.delta.content or "" for each in choices), choices[-1].finish_reason


async def test_length_ends_an_answer_and_shows_held_text() -> None:
    answer = await chat(make_app(FakeGenerate(TEXT)), max_tokens=2, stop=["quick brown"])
    assert answer.choices[0].message.content == "the quick"
    assert answer.choices[0].finish_reason == "length"


async def test_a_stop_token_is_shown_only_on_request() -> None:
    for included, text in ((False, TEXT), (True, TEXT + "<|im_end|>")):
        asked = {"skip_special_tokens": False, "include_stop_str_in_output": included}
        answer = await complete(make_app(FakeGenerate(TEXT)), max_tokens=50, extra_body=asked)
        assert answer.choices[0].text == text


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_have_one_entry_per_token(stream: bool) -> None:
    app, fields = make_app(FakeGenerate(TEXT)), {"logprobs": True, "top_logprobs": 2}
    answers = await chat_chunks(app, **fields) if stream else [await chat(app, **fields)]
    found = [each.choices[0].logprobs for each in answers]
    scored = [token for logprobs in found if logprobs for token in logprobs.content or []]
    assert len(scored) == NUM_TOKENS
    assert [entry.token for entry in scored[:2]] == ["the", " quick"]
    assert bytes(scored[1].bytes or []) == b" quick"
    assert [top.logprob for top in scored[0].top_logprobs] == [-0.5, -1.5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("fox", ["fox"]), (["fox", "dog"], ["fox", "dog"]), ([70, 71], ["de"]), ([[70], [71]], "de")],
    ids=repr,
)
async def test_prompts_of_all_kinds_with_echo(prompt: Any, texts: list[str], stream: bool) -> None:
    async with openai_client(make_app(FakeGenerate(TEXT))) as client:
        answer: Any = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=50, echo=True, n=2, stream=stream
        )
        found = [""] * (2 * len(texts))
        if stream:
            async for chunk in answer:
                found[chunk.choices[0].index] += chunk.choices[0].text
        else:
            found = [choice.text for choice in answer.choices]
    assert found == [text + TEXT for text in texts for _ in range(2)]


async def test_completion_logprobs() -> None:
    answer = await complete(make_app(FakeGenerate(TEXT)), max_tokens=50, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == TEXT + "<|im_end|>"
    assert logprobs.token_logprobs == [-0.5] * NUM_TOKENS
    assert logprobs.text_offset[:3] == [0, 3, 9]
    assert len(logprobs.top_logprobs) == NUM_TOKENS
    for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True):
        assert top[token] == -0.5  # the chosen token is always there


async def test_streamed_completion_logprobs() -> None:
    found: list[Any] = []
    async with openai_client(make_app(FakeGenerate(TEXT))) as client:
        async for chunk in await client.completions.create(
            model="tiny", prompt="a", max_tokens=50, logprobs=0, stream=True
        ):
            found += [chunk.choices[0].logprobs] if chunk.choices[0].logprobs else []
    assert "".join(token for part in found for token in part.tokens) == TEXT + "<|im_end|>"
    assert [offset for part in found for offset in part.text_offset][:3] == [0, 3, 9]


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (Overloaded("busy", retry_after_s=2.5), openai.RateLimitError, 429),
        (Unavailable("nobody"), openai.InternalServerError, 503),
        (DeadlineExceeded("late"), openai.InternalServerError, 504),
        (EngineFailed("broke"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_have_a_status(
    error: Exception, raised: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    with pytest.raises(raised) as caught:
        await chat(make_app(FakeGenerate(fail_after=0, error=error)), stream=stream)
    assert caught.value.status_code == status
    after = caught.value.response.headers.get("retry-after")
    assert after == {429: "3", 503: "1"}.get(status)


async def test_the_client_retries_what_may_be_retried_and_nothing_else() -> None:
    busy = FakeGenerate(fail_after=0, error=Overloaded("busy", retry_after_s=0.01))
    async with openai_client(make_app(busy), max_retries=1) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=HI)
        assert len(busy.requests) == 2
    late = FakeGenerate(fail_after=0, error=ContextLengthExceeded("too long"))
    async with openai_client(make_app(late), max_retries=1) as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="tiny", messages=HI)
        assert len(late.requests) == 1


async def test_a_failure_inside_a_stream_is_an_event_and_no_done_follows() -> None:
    generate = FakeGenerate(TEXT, fail_after=2, error=EngineFailed("The device failed."))
    app = make_app(generate)
    with pytest.raises(openai.APIError, match="The device failed"):
        await chat_chunks(app)
    async with http_client(app) as http:
        reply = await http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HI, "stream": True}
        )
    assert reply.status_code == 200
    assert reply.text.rstrip().splitlines()[-1].startswith('data: {"error":{"message"')
    assert "[DONE]" not in reply.text
    assert generate.num_open == 0


async def test_a_failure_inside_a_whole_answer_is_never_a_partial_success() -> None:
    generate = FakeGenerate(TEXT, fail_after=2, error=EngineFailed("The device failed."))
    with pytest.raises(openai.InternalServerError):
        await chat(make_app(generate), n=2)
    assert generate.num_open == 0


async def test_errors_of_no_known_kind_say_nothing_about_the_inside() -> None:
    secret = "/root/secret/file.py at 0x7f0000"
    app = make_app(FakeGenerate(fail_after=0, error=RuntimeError(secret)))
    async with http_client(app) as client:
        reply = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (500, "server_error")
    assert "secret" not in reply.text
    assert "0x" not in reply.text
    assert reply.headers["x-request-id"] in error["message"]


async def test_models_without_a_template_take_prompts_only() -> None:
    app = make_app(None, served_model(template=None))
    with pytest.raises(openai.BadRequestError, match="chat template"):
        await chat(app)
    assert (await complete(app)).choices[0].text


async def test_the_model_must_be_named_where_there_are_several() -> None:
    app = make_app(None, served_model("one"), served_model("two"))
    async with http_client(app) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": HI})
        assert reply.status_code == 400
        assert "one, two" in reply.json()["error"]["message"]
        reply = await client.post("/v1/chat/completions", json={"messages": HI, "model": "two"})
        assert reply.json()["model"] == "two"
