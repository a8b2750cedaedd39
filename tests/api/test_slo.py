from __future__ import annotations

import math

import openai
import pytest

from disagg.api.http.app import AsgiApp
from disagg.api.request_spec import RequestSlo, choose_slo, in_headers
from disagg.config import TenantConfig
from disagg.errors import InvalidRequest
from tests.api.apps import openai_client as client_of
from tests.api.fakes import FakeGenerate
from tests.api.http.test_quota import KEYS, MESSAGES, tenants_app


@pytest.mark.parametrize(
    ("text", "seconds"), [(b"250", 0.25), (b" 0.5 ", 0.0005), (b"none", math.inf), (b"", 0.0)]
)
def test_headers_are_milliseconds_or_none(text: bytes, seconds: float) -> None:
    assert in_headers({b"x-slo-ttft-ms": text}) == RequestSlo(seconds, 0.0)
    assert in_headers({b"x-slo-tpot-ms": text}) == RequestSlo(0.0, seconds)


@pytest.mark.parametrize("text", [b"0", b"-1", b"nan", b"inf", b"1e12", b"fast", b"\xff"])
def test_what_is_no_time_is_refused_with_the_headers_name(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="milliseconds") as caught:
        in_headers({b"x-slo-tpot-ms": text})
    assert caught.value.param == "x-slo-tpot-ms"


def test_the_body_comes_before_the_headers_and_neither_below_the_least() -> None:
    least, model = RequestSlo(0.2), RequestSlo(0.5, 0.01)
    assert choose_slo(RequestSlo(0.5), RequestSlo(0.3, 0.02), least, model) == RequestSlo(0.5, 0.02)
    assert choose_slo(RequestSlo(), RequestSlo(), least, model) == RequestSlo()
    assert choose_slo(RequestSlo(math.inf, math.inf), RequestSlo(0.1), least, model).kind == "none"
    with pytest.raises(InvalidRequest, match="100 ms is less than 200 ms") as caught:
        choose_slo(RequestSlo(0.1), RequestSlo(), least, model)
    assert caught.value.param == "slo_ttft_ms"
    with pytest.raises(InvalidRequest) as caught:
        choose_slo(RequestSlo(), RequestSlo(0.0, 0.001), least, model)
    assert caught.value.param == "x-slo-tpot-ms"


def app_of(generate: FakeGenerate) -> AsgiApp:
    return tenants_app({"alice": TenantConfig(min_tpot_slo_s=0.01)}, generate)


async def test_requests_carry_what_they_ask_for_to_the_router() -> None:
    generate = FakeGenerate()
    async with client_of(app_of(generate), api_key=KEYS["alice"]) as client:
        cases: list[tuple[dict[str, str], dict[str, object]]] = [
            ({}, {}),
            ({"x-slo-ttft-ms": "300", "x-slo-tpot-ms": "20"}, {}),
            ({"x-slo-ttft-ms": "300"}, {"slo_ttft_ms": "none", "slo_tpot_ms": 15}),
        ]
        for headers, body in cases:
            await client.chat.completions.create(
                model="tiny", messages=MESSAGES, extra_headers=headers, extra_body=body
            )
        with pytest.raises(openai.BadRequestError, match="less than 10 ms") as caught:
            await client.chat.completions.create(
                model="tiny", messages=MESSAGES, extra_body={"slo_tpot_ms": 5}
            )
    assert caught.value.param == "slo_tpot_ms"
    asked = [(each.ttft_slo_s, each.tpot_slo_s) for each in generate.requests]
    assert asked == [(0.0, 0.0), (0.3, 0.02), (math.inf, 0.015)]
