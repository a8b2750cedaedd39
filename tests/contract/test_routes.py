"""Which paths there are, and who may call them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.apps import app_with_files, http_client, make_app
from tests.contract.contract import KEY, TEXT, routes

ROUTES = routes()
SECURITY_PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def test_there_are_no_others(tmp_path: Path) -> None:
    routes = app_with_files(tmp_path).routes.values()
    found = {each.path: ", ".join(each.methods) for each in routes if each.path[:4] != "/ui/"}
    assert found == {path: of["method"] for path, of in ROUTES.items()}


@pytest.mark.parametrize("path", ROUTES)
async def test_without_a_key(path: str, tmp_path: Path) -> None:
    async with http_client(app_with_files(tmp_path, api_key=KEY)) as client:
        for url in (path, f"http://test/{path}/", path + "?a=1"):
            reply = await client.request(ROUTES[path]["method"].split(", ")[0], url)
            assert (reply.status_code == 401) == (ROUTES[path]["who"] == "key")


async def test_the_first_page_names_paths_that_there_are() -> None:
    async with http_client(make_app()) as client:
        reply = await client.get("/")
    assert reply.headers["content-type"].startswith("text/plain")
    named = re.findall(r"(/[\w./]+)", reply.text)
    assert {"/v1", "/metrics", "/ready", "/openapi.json"} <= set(named)
    assert set(named) - {"/v1"} <= set(ROUTES)


async def test_slashes_around_a_path_are_ignored() -> None:
    async with http_client(make_app()) as client:
        for url in ("/v1/models/", "http://test//v1/models", "/v1/models/tiny/"):
            assert (await client.get(url)).status_code == 200, url
        for url in ("http://test//v1/completions", "/v1/completions/"):
            assert (await client.post(url, json=TEXT)).status_code == 200, url


def test_the_page_names_the_open_ones() -> None:
    (row,) = re.findall(r"\| clients \|.*", SECURITY_PAGE.read_text())
    named = set(re.findall(r"`(/\w*)`", row))
    assert named == {path for path, of in ROUTES.items() if of["who"] == "everybody"}
