"""Odd requests that are right, and any others at all; wrong ones are in `tests/contract`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api import apis
from disagg.api.apis import Api
from disagg.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read_request,
)
from disagg.api.openai.understand import understand_tokenize
from disagg.errors import RequestError
from tests.api.apps import http_client, make_app
from tests.api.fakes import served_model
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
FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "tokens", "tools"}
)


@given(
    st.dictionaries(st.sampled_from(FIELDS), TREES, max_size=4),
    st.sampled_from([CHAT, TEXT]),
)
def test_any_json_is_taken_or_refused(change: dict[str, Any], base: dict[str, Any]) -> None:
    body, model = json.dumps(base | change).encode(), served_model()

    def step_by_step(api: Api[Any]) -> None:
        api.understand(api.read(body), model, 0)

    for steps in (
        lambda: step_by_step(apis.CHAT),
        lambda: step_by_step(apis.COMPLETIONS),
        lambda: understand_tokenize(read_request(body, TokenizeRequest), model),
        lambda: read_request(body, DetokenizeRequest),
    ):
        try:
            steps()
        except RequestError as error:
            assert error.http_status == 400
            assert error.code != "internal_error"


@given(st.binary(max_size=64))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read_request(body, ChatRequest)
