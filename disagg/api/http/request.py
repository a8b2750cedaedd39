"""Reads one HTTP request: headers, key, the body within bounds, and the client's disconnect.

Headers are labels only. Nothing a client sends in one is used as an address or a cache key.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from disagg.api.refusals import RequestTimeout, UnsupportedMediaType
from disagg.errors import InvalidRequest, Overloaded, RequestError, RequestTooLarge
from disagg.telemetry import parse_traceparent

BODY_TIMEOUT_S = 30.0
MAX_NUM_HEADERS = 100
MAX_HEADERS_NBYTES = 32 << 10

_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
_HOST = re.compile(rb"[\w.\-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_JSON_TYPE = re.compile(rb"application/(json|[\w.-]+\+json)\s*(;.*)?", re.IGNORECASE)


class HeadersTooLarge(RequestError):
    http_status = 431
    code = "headers_too_large"


class Bodies:
    """The bodies of all requests in flight, bounded in bytes.

    A body counts from its arrival to the end of its request: what was made of it lives as long.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.nbytes = 0
        self._max_nbytes = max_nbytes

    def check(self, nbytes: int) -> None:
        """Raises `Overloaded` when so many more do not fit."""
        if self.nbytes + nbytes > self._max_nbytes:
            raise Overloaded(
                f"The bodies of requests in flight already fill their {self._max_nbytes} bytes;"
                " try again shortly."
            )

    def take(self, nbytes: int) -> None:
        """Raises `Overloaded` when they do not fit; nothing was taken then."""
        self.check(nbytes)
        self.nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self.nbytes -= nbytes


class HttpRequest:
    """
    Attributes:
        own_id: names this request inside, whatever the client sent.
        request_id: the client's `x-request-id` when it is harmless, else ours; a label.
        route: the pattern that matched, for metrics; `rest` is what its end matched.
        tenant: whose request it is; filled in by the key check.
        errors: how errors of its API are written.
        reply_headers: what to say whatever the answer is.
        num_output_tokens: of its answer so far; None: it was not counted for its tenant.
        num_body_bytes: that were taken of the bodies' room, for whoever ends the request.
    """

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        new_id: Callable[[], str],
        names_reply: bool = True,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._read = asyncio.Event()
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.route = ""
        self.rest = ""
        self.tenant = ""
        self.num_output_tokens: Callable[[], int] | None = None
        self.num_body_bytes = 0
        self.own_id = new_id()
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else self.own_id
        self.reply_headers: list[tuple[bytes, bytes]] = []
        if names_reply:
            self.reply_headers.append((b"x-request-id", self.request_id.encode()))
        trace = self.headers.get(b"traceparent", b"").decode("latin-1")
        self.traceparent = trace if parse_traceparent(trace) is not None else ""

    @property
    def body_is_read(self) -> bool:
        """Whether no byte of the body is outstanding, so that the connection can be used again."""
        return self._read.is_set() or not (
            b"transfer-encoding" in self.headers
            or self.headers.get(b"content-length", b"0") != b"0"
        )

    def check_head(self) -> None:
        """Raises `RequestError` for too many headers or a `Host` that is none."""
        headers = self._scope["headers"]
        nbytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_NUM_HEADERS or nbytes > MAX_HEADERS_NBYTES:
            raise HeadersTooLarge(
                f"At most {MAX_NUM_HEADERS} headers of {MAX_HEADERS_NBYTES} bytes are taken."
            )
        host = self.headers.get(b"host")
        modern = self._scope.get("http_version", "1.1") == "1.1"
        if (host is None and modern) or (host is not None and not _HOST.fullmatch(host)):
            raise InvalidRequest("The Host header is missing or malformed.", code="invalid_host")

    def check_json(self) -> None:
        """Raises `UnsupportedMediaType` unless the body is declared to be plain JSON."""
        if not _JSON_TYPE.fullmatch(self.headers.get(b"content-type", b"")):
            raise UnsupportedMediaType("Send the body with Content-Type: application/json.")
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise UnsupportedMediaType("Send the body without Content-Encoding.")

    async def read_body(self, max_nbytes: int, bodies: Bodies, timeout_s: float) -> bytes:
        """The whole body.

        Raises:
            RequestTooLarge: as soon as that is clear; the rest is not read.
            Overloaded: there is no room among `bodies`; again the rest is not read.
            RequestTimeout: it did not arrive in `BODY_TIMEOUT_S`, or in `timeout_s` if less.
        """
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit():
            if int(announced[:20]) > max_nbytes:
                raise _too_large(max_nbytes)
            bodies.check(int(announced))
        timeout_s = min(BODY_TIMEOUT_S, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read_bounded(max_nbytes, bodies)
        except TimeoutError:
            raise RequestTimeout(f"The body did not arrive in {timeout_s:g} seconds.") from None

    async def _read_bounded(self, max_nbytes: int, bodies: Bodies) -> bytes:
        parts: list[bytes] = []
        nbytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RequestTimeout("The client hung up before its request was complete.")
            part = message.get("body", b"")
            nbytes += len(part)
            if nbytes > max_nbytes:
                raise _too_large(max_nbytes)
            bodies.take(len(part))
            self.num_body_bytes = nbytes
            parts.append(part)
            if not message.get("more_body", False):
                self._read.set()
                return b"".join(parts)

    async def disconnected(self) -> None:
        """Return when the client hung up, which can only be seen once its body has been read."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _too_large(max_nbytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than {max_nbytes} bytes.")
