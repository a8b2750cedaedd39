"""Which paths there are, and who may call them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disagg.config import HttpConfig
from tests.api.apps import http_client, make_app
from tests.contract.contract import KEY, routes

ROUTES = routes()
SECURITY_PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def test_there_are_no_others() -> None:
    app = make_app()
    routes = {**app._routes, **app._prefix_routes}
    found = {path: method for path, (method, _) in routes.items()}
    assert found == {path: of["method"] for path, of in ROUTES.items()}


@pytest.mark.parametrize("path", ROUTES)
async def test_without_a_key(path: str) -> None:
    app = make_app(config=HttpConfig(api_key=KEY))
    async with http_client(app) as client:
        for url in (path, path + "x" if path.endswith("/") else path + "?a=1"):
            reply = await client.request(ROUTES[path]["method"], url)
            assert (reply.status_code == 401) == (ROUTES[path]["who"] == "key")


def test_the_page_names_the_open_ones() -> None:
    (row,) = re.findall(r"\| clients \|.*", SECURITY_PAGE.read_text())
    named = set(re.findall(r"`(/\w+)`", row))
    assert named == {path for path, of in ROUTES.items() if of["who"] == "everybody"}
