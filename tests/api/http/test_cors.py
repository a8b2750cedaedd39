"""Calls from the scripts of websites, which browsers allow only with the right headers."""

from __future__ import annotations

import httpx2
import pytest

from disagg.config import HttpConfig
from tests.api.apps import URL, http_client, make_app
from tests.contract.contract import CHAT

UI = "http://localhost:3000"
PREFLIGHT = {
    "origin": UI,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
KEY = {"authorization": "Bearer secret"}


def config_of(*origins: str) -> HttpConfig:
    return HttpConfig(api_key="secret", allowed_origins=origins)


def allowed(reply: httpx2.Response) -> str | None:
    return reply.headers.get("access-control-allow-origin")


@pytest.mark.parametrize(("origins", "answer"), [((UI, "https://b.example"), UI), (("*",), "*")])
async def test_a_preflight_needs_no_key(origins: tuple[str, ...], answer: str) -> None:
    async with http_client(make_app(config=config_of(*origins))) as client:
        reply = await client.options(URL, headers=PREFLIGHT)
    assert (reply.status_code, allowed(reply)) == (200, answer)
    assert reply.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("origins", [(UI,), ("*",)])
async def test_answers_streams_and_errors_have_the_headers(origins: tuple[str, ...]) -> None:
    answer = "*" if origins == ("*",) else UI
    async with http_client(make_app(config=config_of(*origins))) as client:
        for body, key, status in [
            (CHAT, KEY, 200),
            ({**CHAT, "stream": True}, KEY, 200),
            ({**CHAT, "model": "none"}, KEY, 404),
            (CHAT, {}, 401),
        ]:
            reply = await client.post(URL, json=body, headers={"origin": UI, **key})
            assert (reply.status_code, allowed(reply)) == (status, answer)
            assert reply.headers["access-control-expose-headers"] == "*"
            assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize("origins", [(), ("https://b.example",), ("http://localhost:30000",)])
async def test_other_origins_get_no_headers(origins: tuple[str, ...]) -> None:
    async with http_client(make_app(config=config_of(*origins))) as client:
        preflight = await client.options(URL, headers=PREFLIGHT)
        reply = await client.post(URL, json=CHAT, headers={"origin": UI, **KEY})
    assert preflight.status_code == (400 if origins else 401)
    assert allowed(preflight) is None
    assert (reply.status_code, allowed(reply)) == (200, None)
    # A cache must not give this answer to an origin that is allowed.
    assert reply.headers.get("vary") == ("Origin" if origins else None)


async def test_an_options_request_that_is_no_preflight_is_refused() -> None:
    async with http_client(make_app(config=config_of(UI))) as client:
        reply = await client.options(URL, headers={"origin": UI, **KEY})
    assert (reply.status_code, allowed(reply)) == (405, UI)
