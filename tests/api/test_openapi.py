"""`/openapi.json` and `/v1/embeddings`: what there is, and what there is not."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.api.apis import BODIES
from tests.api.apps import http_client, make_app


async def test_every_path_that_takes_a_body_is_described() -> None:
    app = make_app()
    posted = {path for path, (method, _) in app._routes.items() if method == "POST"}
    assert posted == set(BODIES)
    async with http_client(app) as client:
        document = (await client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            (method,) = operations
            known = await client.request(method, path.replace("{name}", "tiny"))
            assert known.status_code not in (404, 405), path
    assert document["openapi"].startswith("3.1")


async def test_limits_are_those_that_are_checked() -> None:
    async with http_client(make_app()) as client:
        document = (await client.get("/openapi.json")).json()
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"]
    (temperature, nothing) = chat["properties"]["temperature"]["anyOf"]
    assert (temperature["minimum"], temperature["maximum"]) == (0.0, 2.0)
    assert nothing == {"type": "null"}
    unresolved = _refs(document) - {
        f"#/components/schemas/{name}" for name in document["components"]["schemas"]
    }
    assert not unresolved


def _refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(_refs, value.values()))
    return set().union(*map(_refs, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": "tiny", "input": "hi"}, "invalid_value", "model"),
        ({"model": "nope", "input": "hi"}, "model_not_found", "model"),
        ({"model": "tiny"}, "missing_required_parameter", "input"),
    ],
)
async def test_embeddings_are_refused_in_words(body: Any, code: str, param: str) -> None:
    async with http_client(make_app()) as client:
        error = (await client.post("/v1/embeddings", json=body)).json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    if code == "invalid_value":
        assert "pooling head" in error["message"]
