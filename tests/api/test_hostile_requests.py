"""Odd requests that are right, and any others at all; wrong ones are in `tests/contract`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api import apis
from disagg.api.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    understand_count,
)
from disagg.api.apis import Api
from disagg.api.json_body import read_body
from disagg.api.openai.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from disagg.api.openai.requests import understand_tokenize
from disagg.api.responses import ResponsesRequest
from disagg.api.served_model import ServedModel
from disagg.errors import RequestError
from tests.api.apps import http_client, make_app
from tests.api.fakes import CHATML, served_model
from tests.contract.contract import CHAT, TEXT

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "change",
    [
        {"foo": 1, "store": True, "service_tier": "auto"},
        {"model": None},
        {"temperature": 1e-9},
        {"top_k": -1},
        {"top_k": 10**9},
        {"n": 2, "temperature": 0},
        {"stream_options": None, "stop": None, "logit_bias": {}, "tools": None, "user": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "developer", "content": "be kind"}]},
        {"messages": [{"role": "user", "content": "a\0\u202e\u200b<|im_end|>"}]},
        {"max_tokens": 1000, "max_completion_tokens": 4},
        {"temperature": 1, "top_p": 1},
    ],
    ids=repr,
)
async def test_odd_but_right_requests_are_served(change: dict[str, Any]) -> None:
    async with http_client(make_app()) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT | change)
        assert reply.status_code == 200, reply.text


async def test_a_byte_order_mark_is_skipped() -> None:
    async with http_client(make_app()) as client:
        body = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
        reply = await client.post("/v1/chat/completions", content=body, headers=JSON)
        assert reply.status_code == 200


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
# Each is of the right type for some fields, so that what fields mean together is looked at as well.
VALUES: list[Any] = [
    True, False, 1, -1, 0.5, "auto", "required", "none", "low", "json_object", "a", ["a"], [1], {},
    {"type": "json_object"}, {"effort": "high"}, {"enable_thinking": False}, {"json": {}},
    {"type": "function", "name": "f", "function": {"name": "f"}}, {"type": "tool", "name": "f"},
    {"type": "any"}, {"type": "enabled", "budget_tokens": 9}, {"format": {"type": "text"}},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": [{}], "anyOf": 5}}},
    [{"type": "function", "name": "f", "function": {"name": "f", "parameters": {"type": 5}},
      "input_schema": {"properties": {"a": {"enum": 2**70}}}}],
    [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "a"}],
    [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
    [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}],
    [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
]  # fmt: skip
KINDS: dict[type[Any], dict[str, Any]] = {
    ChatRequest: CHAT,
    CompletionRequest: TEXT,
    TokenizeRequest: TEXT,
    DetokenizeRequest: {"tokens": [1]},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: CHAT,
    CountTokensRequest: CHAT,
}
SHOWS_ALL = (
    "{% for tool in tools or [] %}<tool_call>{{ tool }}{% endfor %}{{ enable_thinking }}<think>"
)
MODELS = (served_model(), served_model(template=SHOWS_ALL + CHATML), served_model(template=None))


def of_type(wanted: Any) -> list[Any]:
    def fits(value: Any) -> bool:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(value, wanted)
            return True
        return False

    return [None, *(value for value in VALUES if fits(value))]


def changes(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of the right types, and at most one that is anything."""
    fields = {each.name: of_type(each.type) for each in msgspec.structs.fields(kind)}
    right = st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in fields.items()}
    )
    odd = st.dictionaries(st.sampled_from(list(fields)), TREES, max_size=1)
    return st.builds(lambda *parts: parts[0] | parts[1], right, odd)


CHANGES = {kind: changes(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.sampled_from(MODELS))
def test_any_json_is_taken_or_refused(
    kind: type[Any], data: st.DataObject, model: ServedModel
) -> None:
    change = data.draw(CHANGES[kind])
    body = json.dumps(KINDS[kind] | change).encode()

    def step_by_step(api: Api) -> None:
        api.understand(read_body(body, api.request), model)

    steps: dict[type[Any], Callable[[], Any]] = {
        ChatRequest: lambda: step_by_step(apis.CHAT),
        CompletionRequest: lambda: step_by_step(apis.COMPLETIONS),
        ResponsesRequest: lambda: step_by_step(apis.RESPONSES),
        MessagesRequest: lambda: step_by_step(apis.MESSAGES),
        CountTokensRequest: lambda: understand_count(read_body(body, CountTokensRequest), model),
        TokenizeRequest: lambda: understand_tokenize(read_body(body, TokenizeRequest), model),
        DetokenizeRequest: lambda: read_body(body, DetokenizeRequest),
    }
    try:
        steps[kind]()
    except RequestError as error:
        assert error.http_status == 400
        assert error.code != "internal_error"


@given(st.binary(max_size=64))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read_body(body, ChatRequest)
