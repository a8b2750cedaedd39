"""Tenants over HTTP: their keys, limits, headers and priorities, as OpenAI's client meets them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from disagg.api.http.app import AsgiApp
from disagg.api.http.quota import Quota, duration
from disagg.config import HttpConfig, TenantConfig
from disagg.errors import Overloaded
from disagg.store.limits import Limits
from tests.api.apps import http_client, make_app, openai_client
from tests.api.fakes import FakeGenerate

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def tenants_app(
    settings: dict[str, TenantConfig], generate: FakeGenerate | None = None, **options: Any
) -> AsgiApp:
    """With alice's and bob's keys; time stands still."""

    def tenant(name: str) -> TenantConfig:
        return settings.get(name) or TenantConfig()

    limits = Limits(tenant, clock=lambda: 50.0)
    quota = Quota(tenant, lambda name: name if name in settings else "default", limits)
    config = HttpConfig(api_keys={**KEYS}, **options)
    return make_app(generate or FakeGenerate(), config=config, quota=quota)


async def ask(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=8, **more
    )


async def test_a_key_says_whose_request_it_is_and_whose_cache() -> None:
    generate = FakeGenerate()
    app = tenants_app({}, generate, api_key="key-of-the-house")
    for key in (*KEYS.values(), "key-of-the-house"):
        async with openai_client(app, api_key=key) as client:
            await ask(client)
    assert [each.tenant for each in generate.requests] == ["alice", "bob", ""]
    assert len({each.hash_root for each in generate.requests}) == 3  # nobody hits another's prefix
    for wrong in ("key-of-alic", "key-of-alice2", "alice", "KEY-OF-ALICE"):
        async with openai_client(app, api_key=wrong) as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client)


async def test_a_tenant_beyond_its_limit_is_told_and_others_are_not() -> None:
    app = tenants_app({"alice": TenantConfig(requests_per_minute=2, tokens_per_minute=10_000)})
    async with openai_client(app, api_key=KEYS["alice"]) as client:
        first = await ask(client)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        num_prompt_tokens = first.parse().usage.prompt_tokens
        left = 10_000 - num_prompt_tokens  # the answer is not known when its head is sent
        assert first.headers["x-ratelimit-remaining-tokens"] == str(left)
        second = await ask(client)
        left -= num_prompt_tokens + first.parse().usage.completion_tokens
        assert second.headers["x-ratelimit-remaining-tokens"] == str(left)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
    response = caught.value.response
    assert caught.value.code == "rate_limit_exceeded"
    assert response.headers["retry-after"] == "30"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert response.headers["x-ratelimit-reset-requests"] == "1m0s"
    async with openai_client(app, api_key=KEYS["bob"]) as client:
        for _ in range(4):
            free = await ask(client)
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]
    async with http_client(app) as raw:
        shown = (await raw.get("/metrics")).text
    refused = 'disagg_request_refused_total{reason="tenant_limit",route="/v1/chat/completions"'
    assert f'{refused},tenant="alice"}} 1.0' in shown


async def test_a_stream_has_the_headers_too_and_its_answer_is_counted_at_its_end() -> None:
    app = tenants_app({"alice": TenantConfig(tokens_per_minute=10_000)})
    async with openai_client(app, api_key=KEYS["alice"]) as client:
        stream = await ask(client, stream=True, stream_options={"include_usage": True})
        assert stream.headers["x-ratelimit-limit-tokens"] == "10000"
        (usage,) = [each.usage async for each in stream.parse() if each.usage is not None]
        later = await ask(client)
    left = 10_000 - usage.total_tokens - usage.prompt_tokens
    assert later.headers["x-ratelimit-remaining-tokens"] == str(left)


async def test_requests_in_flight_are_given_back_however_they_end() -> None:
    settings = {"alice": TenantConfig(max_num_requests=1)}
    failing = FakeGenerate(fail_after=0, error=Overloaded("full"))
    app = tenants_app(settings, failing)
    async with openai_client(app, api_key=KEYS["alice"]) as client:
        for _ in range(3):
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(client)
            assert caught.value.code == "overloaded"
        with pytest.raises(openai.BadRequestError):
            await ask(client, temperature=9.0)
    async with openai_client(tenants_app(settings), api_key=KEYS["alice"]) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=400, stream=True
        )
        await stream.close()
        await ask(client)


async def test_priorities_are_bounded_by_what_a_key_may_ask_for() -> None:
    generate = FakeGenerate()
    settings = {"alice": TenantConfig(min_priority=-5), "bob": TenantConfig(min_priority=3)}
    app = tenants_app(settings, generate)
    async with openai_client(app, api_key=KEYS["alice"]) as client:
        for priority in (-5, 0, 7):
            await ask(client, extra_body={"priority": priority})
        await ask(client)
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, extra_body={"priority": -6})
    assert caught.value.param == "priority"
    async with openai_client(app, api_key=KEYS["bob"]) as client:
        await ask(client)
        with pytest.raises(openai.BadRequestError, match="0 is below 3"):
            await ask(client, extra_body={"priority": 0})
    assert [each.priority for each in generate.requests] == [-5, 0, 7, 0, 3]


async def test_hints_of_agents_are_followed_as_far_as_a_key_may_ask() -> None:
    generate = FakeGenerate()
    app = tenants_app({"alice": TenantConfig(min_priority=-5)}, generate)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"agent_hints": {"priority": 3, "osl": 100, "speculative_prefill": True}}, -3),
        ({"agent_hints": {"priority": 3, "strict_priority": 4}}, -4),
        ({"agent_hints": {"priority": 9}}, -5),
        ({"agent_hints": {"priority": -(2**31)}}, 1000),
        ({"agent_hints": {}}, 0),
        ({"annotations": []}, 0),
    ]
    async with openai_client(app, api_key=KEYS["alice"]) as client:
        for nvext, _ in cases:
            await ask(client, extra_body={"nvext": nvext})
        hint = {"agent_hints": {"priority": 3}}
        await ask(client, extra_body={"nvext": hint, "priority": 2})
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, extra_body={"nvext": {"agent_hints": {"priority": "high"}}})
    assert caught.value.param == "nvext.agent_hints.priority"
    assert [each.priority for each in generate.requests] == [*(n for _, n in cases), 2]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0ms"), (0.02, "20ms"), (1.0, "1s"), (30.0, "30s"), (60.0, "1m0s"), (361.4, "6m1s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words
