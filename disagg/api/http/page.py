"""The page for people at `/ui`: static files, and sessions for those who have a key.

The files are `disagg/ui/`. They name no other host, and the content security policy lets a browser
load nothing from one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from disagg.api.apis import HttpRoute, Method
from disagg.api.http.keys import KeyCheck
from disagg.api.http.reply import JSON, Reply
from disagg.api.http.request import HttpRequest
from disagg.api.refusals import UnknownUrl
from disagg.errors import Unauthorized

DIRECTORY = Path(__file__).parents[2] / "ui"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none';"
        b" frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # after an upgrade its files belong together
]
ROOT = "/ui"
SESSION = f"{ROOT}/session"
ReadBody: TypeAlias = Callable[[HttpRequest], Awaitable[bytes]]


class Planner(Protocol):
    """Plans that the page asks for."""

    def choices(self) -> bytes: ...

    def answer(self, body: bytes) -> bytes: ...


class WebUi:
    """Answers for the page's files, sessions and plans."""

    def __init__(self, keys: KeyCheck, planner: Planner | None, read: ReadBody) -> None:
        self._keys = keys
        self._planner = planner
        self._read = read
        self._planning = asyncio.Lock()  # one at a time: streams need this process's time
        self._files = {
            each.name: each.read_bytes()
            for each in sorted(DIRECTORY.iterdir())
            if each.suffix in _TYPES
        }
        paths = [ROOT, *(f"{ROOT}/{name}" for name in self._files if name != "index.html")]
        session: dict[Method, None] = {"GET": None, "POST": None, "DELETE": None}
        plan: dict[Method, None] = {"GET": None, "POST": None}
        self.routes = [
            *(HttpRoute(path, self.show, {"GET": None}, "everybody", False) for path in paths),
            HttpRoute(SESSION, self.session, session, "everybody", False),
            HttpRoute(f"{ROOT}/plan", self.plan, plan, is_shown=False),
        ]

    async def show(self, request: HttpRequest) -> Reply:
        """A file. Addresses in the page are relative, so it works behind any prefix."""
        if request.path == ROOT and not request.has_last_slash:
            return Reply(b"", 307, [(b"location", b"ui/")])
        name = request.path.removeprefix(ROOT).strip("/") or "index.html"
        content_type = (b"content-type", f"{_TYPES[Path(name).suffix]}; charset=utf-8".encode())
        return Reply(self._files[name], headers=[content_type, *_HEADERS])

    async def session(self, request: HttpRequest) -> Reply:
        """GET: what the cookies allow. POST with a key: begin a session. DELETE: end it."""
        headers = [JSON, (b"cache-control", b"no-store")]
        if request.method == "POST":
            return Reply(b"{}", headers=[*headers, *self._keys.begin_session(request)])
        if request.method == "DELETE":
            return Reply(b"{}", headers=[*headers, *self._keys.end_session()])
        allowed = {
            "needs_key": self._keys.is_required,
            "may_chat": _passes(self._keys, request),
            "is_operator": _passes(self._keys.of_operator, request),
            "tenant": request.tenant,
        }
        return Reply(msgspec.json.encode(allowed), headers=headers)

    async def plan(self, request: HttpRequest) -> Reply:
        """GET: what there is to choose. POST: a plan, computed in a thread."""
        if self._planner is None:
            raise UnknownUrl("This server has no planner.")
        if request.method == "GET":
            return Reply(self._planner.choices())
        body = await self._read(request)
        async with self._planning:
            return Reply(await asyncio.to_thread(self._planner.answer, body))


def _passes(check: Callable[[HttpRequest], None], request: HttpRequest) -> bool:
    try:
        check(request)
    except Unauthorized:
        return False
    return True


def wants_html(request: HttpRequest) -> bool:
    """Whether a browser asks for something to look at."""
    return b"text/html" in request.headers.get(b"accept", b"")
