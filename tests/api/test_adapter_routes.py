"""Requests of other APIs become chats field by field, and answers repeat what was asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.api import anthropic as messages
from disagg.api import responses
from disagg.api.anthropic import error_body
from disagg.api.json_body import read_body
from disagg.api.openai import fields as tools
from disagg.api.openai.fields import ChatRequest
from disagg.api.refusals import UnknownUrl
from disagg.errors import DeadlineExceeded, DisaggError, RateLimited, Unavailable
from tests.api.apps import http_client, make_app
from tests.api.fakes import FakeGenerate, served_model
from tests.api.openai.test_tools import HERMES

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "fox"}}</tool_call>'


def from_response(**fields: Any) -> ChatRequest:
    body = json.dumps({"input": "hi"} | fields).encode()
    return responses.as_chat(read_body(body, responses.ResponsesRequest))


def from_message(**fields: Any) -> ChatRequest:
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(asked | fields).encode()
    return messages.as_chat(read_body(body, messages.MessagesRequest))


def values(chat: ChatRequest) -> dict[str, Any]:
    """The fields that say something, but for the messages."""
    fields = {name: getattr(chat, name) for name in chat.__struct_fields__ if name != "messages"}
    return {name: value for name, value in fields.items() if value is not None}


def test_fields_of_a_response() -> None:
    asked = {
        "model": "m", "stream": True, "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.25,
        "parallel_tool_calls": False, "reasoning": {"effort": "low"}, "truncation": "auto",
        "priority": 3, "tool_choice": "required",
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA,
                   "strict": True}],
    }  # fmt: skip
    function = tools.FunctionDefinition("f", "d", SCHEMA, True)
    assert values(from_response(**asked)) == {
        "model": "m", "stream": True, "max_completion_tokens": 7, "temperature": 0.5,
        "top_p": 0.25, "parallel_tool_calls": False, "reasoning_effort": "low",
        "truncate_prompt_tokens": -1, "priority": 3, "tool_choice": "required",
        "tools": [tools.Tool("function", function)],
    }  # fmt: skip
    chosen = from_response(tool_choice={"type": "function", "name": "f"}).tool_choice
    assert chosen == tools.NamedTool("function", tools.NamedFunction("f"))


@pytest.mark.parametrize("strict", [True, False, None])
def test_the_format_of_a_response(strict: bool | None) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": strict}
    found = from_response(text={"format": form}).response_format
    assert found is not None and found.type == "json_schema" and found.json_schema is not None
    assert (found.json_schema.name, found.json_schema.schema) == ("n", SCHEMA)
    assert found.json_schema.strict == strict
    loose = from_response(text={"format": {"type": "json_object"}}).response_format
    assert loose is not None and loose.type == "json_object"


def test_fields_of_a_message() -> None:
    asked = {
        "model": "m", "stream": True, "max_tokens": 7, "temperature": 0.5, "top_p": 0.25,
        "top_k": 5, "stop_sequences": ["a"], "thinking": {"type": "enabled", "budget_tokens": 4},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    }  # fmt: skip
    function = tools.FunctionDefinition("f", "d", SCHEMA)
    assert values(from_message(**asked)) == {
        "model": "m", "stream": True, "max_tokens": 7, "temperature": 0.5, "top_p": 0.25,
        "top_k": 5, "stop": ["a"], "thinking_token_budget": 4, "tool_choice": "required",
        "parallel_tool_calls": False, "tools": [tools.Tool("function", function)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        (
            {"type": "tool", "name": "f"},
            tools.NamedTool("function", tools.NamedFunction("f")),
        ),
    ],
)
def test_choices_of_tools_of_a_message(choice: Any, expected: Any) -> None:
    chat = from_message(tools=[{"name": "f", "input_schema": SCHEMA}], tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, True)


def test_calls_and_results_keep_their_ids() -> None:
    conversation = [
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {"at": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
    ]  # fmt: skip
    items = [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"at":1}'},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ]
    for chat in (from_message(messages=conversation), from_response(input=items)):
        asked, answered = chat.messages
        (call,) = asked.tool_calls or []
        assert (call.id, call.function.name, call.function.arguments) == ("a", "f", '{"at":1}')
        assert (answered.role, answered.tool_call_id, answered.content) == ("tool", "a", "x")


async def answers_of(url: str, asked: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """A whole answer, and the events of a streamed one."""
    generate, model = FakeGenerate(CALL, num_cached_tokens=4), served_model(template=HERMES)
    async with http_client(make_app(generate, model)) as client:
        whole = (await client.post(url, json=asked)).json()
        streamed = (await client.post(url, json=asked | {"stream": True})).text
    lines = [line for line in streamed.splitlines() if line.startswith("data: ")]
    return whole, [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_response_repeats_the_request_and_names_its_items() -> None:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    asked = {
        "input": "hi", "tools": [tool], "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "max_output_tokens": 99,
    }  # fmt: skip
    whole, events = await answers_of("/v1/responses", asked)
    ends = (whole, events[-1]["response"])
    for each in ends:
        assert [{**tool, "description": None, "strict": None}] == each["tools"]
        assert (each["metadata"], each["parallel_tool_calls"]) == ({"a": "b"}, False)
        (call,) = each["output"]
        assert call["call_id"].startswith("call_") and call["id"].startswith("fc_")
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {ends[1]["output"][0]["id"]}


async def test_calls_of_a_message_have_ids_and_cached_tokens_count_apart() -> None:
    asked = {
        "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "look", "input_schema": SCHEMA}],
    }  # fmt: skip
    whole, events = await answers_of("/v1/messages", asked)
    (begun,) = (event for event in events if event["type"] == "content_block_start")
    ids = [whole["content"][0]["id"], begun["content_block"]["id"]]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    (start,) = (event["message"] for event in events if event["type"] == "message_start")
    assert whole["usage"]["input_tokens"] == start["usage"]["input_tokens"] - 4


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RateLimited("x"), "rate_limit_error"),
        (Unavailable("x"), "overloaded_error"),
        (DeadlineExceeded("x"), "timeout_error"),
        (DisaggError("x"), "api_error"),
        (UnknownUrl("x"), "not_found_error"),
    ],
)
def test_errors_of_messages_are_anthropics(error: DisaggError, kind: str) -> None:
    told = {"type": "error", "error": {"type": kind, "message": "x"}}
    assert json.loads(error_body(error)) == told
