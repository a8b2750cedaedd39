"""The page at `/ui`: its files, its policy, its sessions, and what it may ask for with them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.api.http.keys import CHAT, LIFETIME_S, SessionCookies
from disagg.api.http.page import DIRECTORY
from disagg.config import HttpConfig
from tests.api.apps import http_client, make_app

SECRET = b"of all ingresses"
KEYED = HttpConfig(api_key="house", api_keys={"alice": "key-of-alice"}, metrics_key="metrics")


async def test_its_files_come_from_here_and_load_nothing_from_elsewhere() -> None:
    async with http_client(make_app()) as client:
        first = await client.get("/ui")
        assert (first.status_code, first.headers["location"]) == (307, "ui/")
        for file in DIRECTORY.iterdir():
            name = "" if file.name == "index.html" else file.name
            reply = await client.get(f"/ui/{name}")
            assert reply.status_code == 200 and reply.content == file.read_bytes()
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';") and "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            # Its own icon's namespace is a name, and the page never makes markup from text.
            hosts = set(re.findall(r"https?://[^\s\"')]+", reply.text))
            assert hosts <= {"http://www.w3.org/2000/svg"}
            assert not re.search(
                r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", reply.text
            )
            assert not re.search(r"<[^>]+\s(style|on\w+)=", reply.text), "inline, so blocked"
        assert (await client.get("/ui/../config.py")).status_code == 404


async def test_it_is_small_enough_to_be_read() -> None:
    assert sum(len(each.read_text().splitlines()) for each in DIRECTORY.iterdir()) <= 1350


async def test_browsers_are_led_to_it_and_others_read_text() -> None:
    async with http_client(make_app()) as client:
        browser = await client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert (browser.status_code, browser.headers["location"]) == (307, "ui/")
        assert (await client.get("/")).text.startswith("This is disagg")


async def test_it_can_be_left_out() -> None:
    async with http_client(make_app(config=HttpConfig(ui=False))) as client:
        for path in ("/ui", "/ui/app.js", "/ui/session", "/ui/plan"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/", headers={"accept": "text/html"})).status_code == 200


async def test_a_session_stands_for_its_key_in_all_ingresses() -> None:
    ingresses = [make_app(config=KEYED, secret=SECRET) for _ in range(2)]
    async with http_client(ingresses[0]) as client:
        begun = await client.post("/ui/session", headers={"authorization": "Bearer key-of-alice"})
        assert begun.status_code == 200
        cookie = begun.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "key-of" not in cookie
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/debug/fleet")).status_code == 401
        said = (await client.get("/ui/session")).json()
        assert said == {
            "needs_key": True,
            "may_chat": True,
            "is_operator": False,
            "tenant": "alice",
        }
        await client.post("/ui/session", headers={"authorization": "Bearer metrics"})
        assert (await client.get("/debug/fleet")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200, "both sessions last"
        async with http_client(ingresses[1]) as other:
            other.cookies = client.cookies
            assert (await other.get("/v1/models")).status_code == 200
        await client.delete("/ui/session")
        assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("key", ["", "wrong", "key-of-alic"])
async def test_no_session_begins_without_a_key(key: str) -> None:
    async with http_client(make_app(config=KEYED)) as client:
        reply = await client.post("/ui/session", headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == 401 and "set-cookie" not in reply.headers


async def test_plans_need_a_key() -> None:
    async with http_client(make_app(config=KEYED)) as client:
        assert (await client.get("/ui/plan")).status_code == 401
        await client.post("/ui/session", headers={"authorization": "Bearer house"})
        assert (await client.get("/ui/plan")).status_code == 404, "this app has no planner"


async def test_a_session_of_another_origin_does_not_count() -> None:
    async with http_client(make_app(config=KEYED)) as client:
        await client.post("/ui/session", headers={"authorization": "Bearer house"})
        for site, status in (("same-origin", 200), ("none", 200), ("same-site", 401), ("x", 401)):
            reply = await client.get("/v1/models", headers={"sec-fetch-site": site})
            assert reply.status_code == status, site


async def test_a_session_ends_with_its_key() -> None:
    async with http_client(make_app(config=KEYED, secret=SECRET)) as client:
        await client.post("/ui/session", headers={"authorization": "Bearer key-of-alice"})
        without = HttpConfig(api_key="house")
        async with http_client(make_app(config=without, secret=SECRET)) as later:
            later.cookies = client.cookies
            assert (await later.get("/v1/models")).status_code == 401


def read(cookies: SessionCookies, value: str, name: str = CHAT) -> bytes | None:
    request: Any = SimpleNamespace(headers={b"cookie": f"a=b; {name}={value}".encode()})
    return cookies.digest(name, request)


def test_a_cookie_has_an_end_and_cannot_be_changed() -> None:
    now = [1000.0]
    cookies = SessionCookies(SECRET, now=lambda: now[0])
    _, header = cookies.begin(CHAT, b"digest")
    value = header.decode().partition("=")[2].partition(";")[0]
    assert read(cookies, value) == b"digest"
    assert read(SessionCookies(b"another"), value) is None
    assert read(cookies, value, "disagg-operator") is None, "it is the other kind's"
    end_s, digest, signature = value.split(".")
    for changed in (
        f"{int(end_s) + 1}.{digest}.{signature}",
        f"{end_s}.{b'other'.hex()}.{signature}",
        f"{end_s}.{digest}.",
        "",
        "..",
    ):
        assert read(cookies, changed) is None, changed
    now[0] += LIFETIME_S
    assert read(cookies, value) is None


def test_over_https_it_is_secure() -> None:
    assert b"; Secure" in SessionCookies(SECRET, is_https=True).begin(CHAT, b"digest")[1]
    assert b"; Secure" not in SessionCookies(SECRET).begin(CHAT, b"digest")[1]
