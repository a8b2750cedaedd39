"""`/openapi.json`: what there is, and what there is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.apps import app_with_files, http_client, make_app


async def test_every_path_is_described_and_answers(tmp_path: Path) -> None:
    async with http_client(app_with_files(tmp_path)) as client:
        document = (await client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method in operations:
                known = await client.request(method, path.replace("{name}", "tiny"))
                assert known.status_code != 405, path
                missing = known.status_code == 404
                assert missing == ("{id}" in path), path
                assert not missing or known.json()["error"]["code"] == "not_found"
    assert document["openapi"].startswith("3.1")
    assert {"/v1/files", "/v1/batches", "/v1/batches/{id}/cancel"} < set(document["paths"])
    form = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    assert form["multipart/form-data"]["schema"]["required"] == ["file", "purpose"]


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
