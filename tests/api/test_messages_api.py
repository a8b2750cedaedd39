"""Anthropic's `/v1/messages`: the shapes that its clients read, whole and streamed."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx2
import pytest

from disagg.config import HttpConfig
from tests.api.apps import http_client, make_app
from tests.api.fakes import TOKENIZER, FakeGenerate, served_model, turns_template
from tests.api.openai.test_reasoning import OPEN, app
from tests.api.openai.test_tools import HERMES
from tests.api.test_responses_api import CALL, UNENDED

TEXT = "the quick brown fox"
URL = "/v1/messages"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "hi"}],
}
DOT = {"type": "base64", "media_type": "image/png", "data": "aGk="}
LOOK = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}


async def post(generate: FakeGenerate, template: str | None = None, **fields: Any) -> Any:
    model = served_model() if template is None else served_model(template=template)
    async with http_client(make_app(generate, model)) as client:
        reply = await client.post(URL, json=ASKED | fields)
    assert reply.status_code == 200, reply.text
    return reply


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert fields["type"] == name.removeprefix("event: ")
        events.append((fields["type"], fields))
    return events


async def test_a_whole_message() -> None:
    message = (await post(FakeGenerate(TEXT, num_cached_tokens=4), system="be brief")).json()
    usage = message.pop("usage")
    assert message == {
        "id": "msg_id1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["cache_read_input_tokens"] == 4
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "stop"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["brown"]}, "stop_sequence", "brown"),
        ({}, "end_turn", None),
    ],
)
async def test_why_it_stopped(
    fields: dict[str, Any], reason: str, stop: str | None, stream: bool
) -> None:
    reply = await post(FakeGenerate(TEXT), stream=stream, **fields)
    if stream:
        (end,) = (
            event["delta"] for kind, event in events_of(reply.text) if kind == "message_delta"
        )
    else:
        end = reply.json()
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, stop)


async def test_events_of_a_text() -> None:
    events = events_of((await post(FakeGenerate(TEXT), stream=True)).text)
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [event["delta"] for kind, event in events if kind == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == TEXT
    message = events[0][1]["message"]
    assert message["content"] == [] and message["usage"]["input_tokens"] > 0
    assert events[-2][1]["usage"]["output_tokens"] > 0


async def test_a_call_is_a_block_after_the_text() -> None:
    said = "see: " + CALL
    whole = (await post(FakeGenerate(said), HERMES, tools=[LOOK])).json()
    text, call = whole["content"]
    assert text == {"type": "text", "text": "see:"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "fox"})
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"at": "\\ud800"}',
        '{"at": ' * 2000 + "1" + "}" * 2000,
        '{"at": NaN}',
    ],
    ids=["half a pair", "deep", "no number"],
)
async def test_arguments_that_are_no_json_are_no_fault_of_the_server(arguments: str) -> None:
    said = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    model = served_model(template=HERMES, max_model_len=1 << 16)
    async with http_client(make_app(FakeGenerate(said), model)) as client:
        reply = await client.post(URL, json=ASKED | {"tools": [LOOK], "max_tokens": 1 << 15})
    (call,) = reply.json()["content"]
    assert (call["name"], call["input"]) == ("look", {})


@pytest.mark.parametrize("per_delta", [1, 5, 1000])
@pytest.mark.parametrize(
    "said", ["</think>" + UNENDED, "So.</think>Hi!" + UNENDED, "So.\n</think>\n\nHi!"]
)
async def test_a_stream_adds_up_to_the_message_wherever_it_is_cut_off(
    said: str, per_delta: int
) -> None:
    model = served_model(template=HERMES + OPEN, max_model_len=2048)
    async with http_client(make_app(FakeGenerate(said, per_delta=per_delta), model)) as client:
        for most in range(1, len(TOKENIZER.encode(said, add_special_tokens=False)) + 2):
            whole, streamed = await both(client, ASKED | {"max_tokens": most, "tools": [LOOK]})
            for block in whole + streamed:
                assert block["type"] != "tool_use" or block.pop("id")
            assert streamed == whole, most


@pytest.mark.parametrize("per_delta", [1, 5, 28, 38, 57, 1000])
async def test_a_stream_adds_up_where_text_follows_a_call(per_delta: int) -> None:
    """The whole message has the text before the calls; the stream has it where it was said."""
    model = served_model(template=HERMES, max_model_len=2048)
    asked = ASKED | {"tools": [LOOK], "max_tokens": 999}
    for said in (CALL + " Wait.", f"See: {CALL} Wait. {CALL} So.", f"{CALL}{CALL} Wait."):
        async with http_client(make_app(FakeGenerate(said, per_delta=per_delta), model)) as client:
            whole, streamed = await both(client, asked)
        calls = [[b for b in content if b["type"] == "tool_use"] for content in (whole, streamed)]
        texts = [
            "".join(block["text"] for block in content if block["type"] == "text")
            for content in (whole, streamed)
        ]
        assert len(calls[0]) == len(calls[1]) == said.count(CALL)
        for call in calls[0] + calls[1]:
            assert call.pop("id")
            assert call == {"type": "tool_use", "name": "look", "input": {"at": "fox"}}
        assert texts[0] == texts[1] and "Wait." in texts[0]


async def both(
    client: httpx2.AsyncClient, asked: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The content of an answer, whole and from its stream."""
    whole = (await client.post(URL, json=asked)).json()
    streamed = await client.post(URL, json=asked | {"stream": True})
    return whole["content"], content_of(events_of(streamed.text))


def content_of(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The blocks of a stream, each of which is complete before the next one begins."""
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for kind, event in events:
        if not kind.startswith("content_block"):
            continue
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            block, pieces = event["content_block"], []
        elif kind == "content_block_delta":
            assert event["index"] == len(blocks)
            name = event["delta"]["type"].removesuffix("_delta")
            assert name == {"tool_use": "input_json"}.get(block["type"], block["type"])
            pieces.append(event["delta"]["partial_json" if name == "input_json" else name])
        else:
            said = "".join(pieces)
            if block["type"] == "tool_use":
                with contextlib.suppress(ValueError):  # where it is cut off
                    block["input"] = json.loads(said)
            else:
                block[block["type"]] = said
            blocks.append(block)
    return blocks


async def test_tokens_of_a_prompt_are_counted() -> None:
    asked = {name: ASKED[name] for name in ("model", "messages")} | {"system": "be brief"}
    usage = (await post(FakeGenerate(TEXT), **asked)).json()["usage"]
    async with http_client(make_app()) as client:
        reply = await client.post(URL + "/count_tokens", json=asked)
        assert reply.json() == {"input_tokens": usage["input_tokens"]}
        refused = await client.post(URL + "/count_tokens", json=asked | {"messages": []})
    assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_a_conversation_with_tools_becomes_a_chat() -> None:
    template = turns_template("{{ c.function.name }} {{ c.function.arguments.at }}")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "what is there?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "wait"},
            {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "x"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "fox"},
            {"type": "text", "text": "so?"}]},
    ]  # fmt: skip
    generate = FakeGenerate()
    system = [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]
    await post(generate, template, messages=messages, system=system)
    said = served_model().tokenizer.decode(list(generate.requests[0].token_ids))
    assert said == "system(look)user(what is there?)assistant(hm wait[look x])tool(fox)user(so?)"


@pytest.mark.parametrize("kind", ["auto", "none"])
async def test_without_tools_nothing_need_be_called(kind: str) -> None:
    message = (await post(FakeGenerate(TEXT), tool_choice={"type": kind})).json()
    assert message["content"] == [{"type": "text", "text": TEXT}]


async def test_what_claude_code_sends_beside_a_chat_is_accepted() -> None:
    generate = FakeGenerate()
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    fields = {
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": schema}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    await post(generate, "{{ messages[0].content }}", **fields)  # which reads no effort
    await post(generate, "{{ reasoning_effort }}", **fields)
    said = [TOKENIZER.decode(list(request.token_ids)) for request in generate.requests]
    assert said == ["hi", "high"]
    grammar = generate.requests[0].sampling.grammar
    assert grammar is not None and json.loads(grammar.source)["properties"] == schema["properties"]


async def test_the_prompts_of_claude_code_share_their_prefix() -> None:
    generate = FakeGenerate()
    for number in range(2):
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        system = [bill, {"type": "text", "text": "help"}]
        messages = [*ASKED["messages"], {"role": "system", "content": "be brief"}]
        await post(generate, turns_template(""), system=system, messages=messages)
    said = {TOKENIZER.decode(list(request.token_ids)) for request in generate.requests}
    assert said == {"system(help)user(hi)system(be brief)"}


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    generate = FakeGenerate()
    messages = [*ASKED["messages"], {"role": "assistant", "content": "one, two,"}]
    await post(generate, messages=messages)
    said = served_model().tokenizer.decode(list(generate.requests[0].token_ids))
    assert said.endswith("one, two,")


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"messages": []}, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": DOT}]}]},
         "invalid_request_error", "messages[0].content[0].type: only text is supported"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a",
             "content": [{"type": "image", "source": DOT}]}]}]},
         "invalid_request_error", "content[0].content[0].type: only text is supported"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "invalid_request_error", "messages[0].content[0]"),
        ({"mcp_servers": [{"type": "url"}]}, "invalid_request_error", "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "invalid_request_error", "clear_tool_uses"),
        ({"tools": [LOOK]}, "invalid_request_error", "tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "invalid_request_error", "name"),
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "'required' needs tools"),
        ({"tool_choice": {"type": "tool", "name": "look"}}, "invalid_request_error", "'look'"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "invalid_request_error", "needs tools"),
        ({"temperature": 1.5}, "invalid_request_error", "temperature"),
        ({"model": "nope"}, "not_found_error", "nope"),
    ],
)  # fmt: skip
async def test_refusals_are_anthropics(fields: dict[str, Any], kind: str, words: str) -> None:
    generate = FakeGenerate()
    async with http_client(make_app(generate)) as client:
        body = {name: value for name, value in (ASKED | fields).items() if value is not None}
        reply = await client.post(URL, json=body)
    error = reply.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert words in error["error"]["message"]
    assert generate.requests == []


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    reply = await post(FakeGenerate(TEXT, fail_after=2), stream=True)
    kind, event = events_of(reply.text)[-1]
    assert (kind, event["error"]["type"]) == ("error", "api_error")


async def test_the_key_is_where_anthropics_clients_put_it() -> None:
    app = make_app(config=HttpConfig(api_key="secret-key-of-the-tests"))
    async with http_client(app) as client:
        for name, key, status in (
            ("x-api-key", "secret-key-of-the-tests", 200),
            ("x-api-key", "wrong", 401),
            ("x-other", "secret-key-of-the-tests", 401),
        ):
            reply = await client.post(URL, json=ASKED, headers={name: key})
            assert reply.status_code == status
    assert reply.json()["error"]["type"] == "authentication_error"


async def test_thinking_is_a_block_before_the_text() -> None:
    serving, _ = app("So, yes.\n</think>\n\nHi!", OPEN)
    async with http_client(serving) as client:
        thinking, text = (await client.post(URL, json=ASKED)).json()["content"]
    assert thinking == {"type": "thinking", "thinking": "So, yes.", "signature": ""}
    assert text == {"type": "text", "text": "Hi!"}


async def test_thinking_that_is_turned_off_is_turned_off() -> None:
    serving, generate = app(
        "Hi!", OPEN.replace("{% if add_generation_prompt %}<think>", "{% if 0 %}")
    )
    async with http_client(serving) as client:
        reply = await client.post(URL, json=ASKED | {"thinking": {"type": "disabled"}})
    assert reply.status_code == 200, reply.text
    prompt = TOKENIZER.decode(list(generate.requests[0].token_ids))
    assert prompt.endswith("<think>\n\n</think>\n\n")
