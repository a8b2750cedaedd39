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
from tests.api.fakes import FakeGenerate, served_model
from tests.api.hostile_requests import (
    ABSENT,
    BODIES,
    CHAT,
    CHAT_REFUSALS,
    TEXT,
    TEXT_REFUSALS,
    Refusal,
    changed,
)

JSON = {"content-type": "application/json"}
REFUSALS = [("/v1/chat/completions", CHAT, row) for row in CHAT_REFUSALS]
REFUSALS += [("/v1/completions", TEXT, row) for row in TEXT_REFUSALS]


def _name(value: Any) -> str:
    return repr(value.change)[:60] if isinstance(value, Refusal) else ""


@pytest.mark.parametrize(("url", "base", "row"), REFUSALS, ids=_name)
async def test_a_wrong_field_is_refused_by_name(
    url: str, base: dict[str, Any], row: Refusal
) -> None:
    generate = FakeGenerate()
    async with http_client(make_app(generate)) as client:
        reply = await client.post(url, json=changed(base, row.change))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (
            row.status,
            row.code,
            row.param,
        )
        assert error["type"] == "invalid_request_error"
        assert reply.headers["x-should-retry"] == "false"
        assert len(reply.content) < 2000
        assert generate.requests == []  # refused before any work
        assert (await client.post(url, json=base)).status_code == 200


@pytest.mark.parametrize(("body", "code"), BODIES, ids=lambda value: repr(value)[:40])
async def test_a_body_that_is_no_request_is_refused(body: bytes, code: str) -> None:
    async with http_client(make_app()) as client:
        for url in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            reply = await client.post(url, content=body, headers=JSON)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    "change",
    [
        {"foo": 1, "store": True, "service_tier": "auto"},
        {"model": ABSENT},
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
        reply = await client.post("/v1/chat/completions", json=changed(CHAT, change))
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
        lambda: understand_tokenize(read_request(body, TokenizeRequest)),
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
