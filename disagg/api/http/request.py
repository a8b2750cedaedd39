"""Reads one HTTP request: its headers, its body with size limits, and its client's disconnect.

Nothing that a client sends in a header is used as an address or a cache key.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from disagg import semconv, telemetry
from disagg.api.apis import HttpRoute
from disagg.api.http.request_spans import RequestSpans
from disagg.api.refusals import RequestTimeout, UnsupportedMediaType, invalid_value
from disagg.errors import InvalidRequest, Overloaded, RequestError, RequestTooLarge

BODY_TIMEOUT_S = 30.0
MAX_NUM_HEADERS = 100
MAX_HEADERS_NBYTES = 32 << 10
MAX_TEXT_LEN = 128  # of texts that clients choose, in spans
# In the scope of requests that this process sends itself: on whose behalf, and their time limit.
TENANT, TIMEOUT_S = "disagg.tenant", "disagg.timeout_s"

_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
_HOST = re.compile(rb"([\w.\-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_JSON_TYPE = re.compile(rb"application/(json|[\w.-]+\+json)\s*(;.*)?", re.IGNORECASE)


class HeadersTooLarge(RequestError):
    http_status = 431
    code = "headers_too_large"


class Bodies:
    """Limits the total size of the bodies of all running requests.

    A body counts from its arrival to the end of its request, because objects made from it live as
    long. So do its images, which may also be fetched.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.nbytes = 0
        self._max_nbytes = max_nbytes

    def check(self, nbytes: int) -> None:
        """Raises `Overloaded` if `nbytes` more do not fit."""
        if self.nbytes + nbytes > self._max_nbytes:
            raise Overloaded(
                "The bodies of running requests already use the limit of"
                f" {self._max_nbytes} bytes (http.max_requests_nbytes); try again shortly."
            )

    def take(self, nbytes: int) -> None:
        """Reserve `nbytes`. Raises `Overloaded` if they do not fit."""
        self.check(nbytes)
        self.nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self.nbytes -= nbytes


class HttpRequest:
    """
    Attributes:
        own_id: internal id of the request; clients cannot choose it.
        request_id: the client's `x-request-id` if it is valid, else `own_id`; only a label.
        has_last_slash: whether the path ended with one; `path` does not.
        route: where its path leads; `in_path` is the text in place of the name in braces.
        tenant: the tenant of the request, set by the key check.
        is_own: whether this process sends it, for `tenant`, without a key.
        timeout_s: time limit of such a request in place of the server's; 0: the server's.
        reply_headers: headers of the reply, also if it is an error.
        num_output_tokens: returns the length of its answer so far; None if the request does not
            count for its tenant.
        num_body_bytes: bytes that the request has taken from `Bodies`, to be given back at its end.
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
        self._http_version: str = scope.get("http_version", "1.1")
        self.method: str = scope["method"]
        self.path = _plain(scope["path"].removeprefix(scope.get("root_path", "")))
        self.has_last_slash: bool = scope["path"].endswith("/")
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.extensions: dict[str, Any] = scope.get("extensions") or {}  # servers may say None
        self.route: HttpRoute
        self.in_path = ""
        self.is_own = TENANT in scope
        self.tenant: str = scope.get(TENANT, "")
        self.timeout_s: float = scope.get(TIMEOUT_S, 0.0)
        self.spans = RequestSpans()
        self.num_output_tokens: Callable[[], int] | None = None
        self.num_body_bytes = 0
        self.own_id = new_id()
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else self.own_id
        self.reply_headers: list[tuple[bytes, bytes]] = []
        if names_reply:
            self.reply_headers.append((b"x-request-id", self.request_id.encode()))
        trace = self.headers.get(b"traceparent", b"").decode("latin-1")
        self.traceparent = trace if telemetry.parse_traceparent(trace) is not None else ""

    @property
    def is_open(self) -> bool:
        """Whether everybody may send it."""
        return self.route.who == "everybody"

    def open_span(self) -> None:
        """Start the server's span, whose traceparent becomes that of the request."""
        method = self.method if self.method in semconv.HTTP_METHODS else semconv.OTHER
        route = self.route.path

        def attributes() -> dict[str, telemetry.Value]:
            host = _HOST.fullmatch(self.headers.get(b"host", b""))
            name, port = (b"", None) if host is None else host.groups()
            agent = self.headers.get(b"user-agent", b"").decode("latin-1")[:MAX_TEXT_LEN]
            texts = {
                semconv.HTTP_REQUEST_METHOD: method,
                semconv.URL_PATH: self.path[:MAX_TEXT_LEN],
                semconv.URL_SCHEME: self._scope.get("scheme", "http"),
                semconv.NETWORK_PROTOCOL_VERSION: self._http_version,
                semconv.HTTP_ROUTE: route,
                semconv.SERVER_ADDRESS: name.decode(),
                semconv.USER_AGENT_ORIGINAL: agent,
            }
            found: dict[str, telemetry.Value] = {key: text for key, text in texts.items() if text}
            return found if port is None else found | {semconv.SERVER_PORT: int(port)}

        self.traceparent = self.spans.open(method, route, self.traceparent, attributes)

    def in_query(self, name: str) -> str | None:
        """A value of the URL's query; None if it is missing."""
        query = self._scope.get("query_string", b"").decode("latin-1")
        found = parse_qs(query, max_num_fields=16).get(name)
        return found[-1] if found else None

    def seconds_in_query(self, name: str) -> float | None:
        """A number of the URL's query; None if it is missing. Raises `InvalidRequest`."""
        found = self.in_query(name)
        if found is None:
            return None
        try:
            return float(found)
        except ValueError:
            raise invalid_value(
                name, f"{found[:32]!r} in the URL is not a number of seconds."
            ) from None

    @property
    def body_is_read(self) -> bool:
        """Whether the body is completely read, so that the connection can be reused."""
        return self._read.is_set() or not (
            b"transfer-encoding" in self.headers
            or self.headers.get(b"content-length", b"0") != b"0"
        )

    def check_head(self) -> None:
        """Raises `RequestError` for too many headers or an invalid `Host`."""
        headers = self._scope["headers"]
        nbytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_NUM_HEADERS or nbytes > MAX_HEADERS_NBYTES:
            raise HeadersTooLarge(
                f"The request may have at most {MAX_NUM_HEADERS} headers with"
                f" {MAX_HEADERS_NBYTES} bytes in total."
            )
        host = self.headers.get(b"host")
        modern = self._http_version == "1.1"
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
            RequestTooLarge: the body is too large; the rest of it is not read.
            Overloaded: `bodies` has no room for it; the rest of it is not read.
            RequestTimeout: it did not arrive within `BODY_TIMEOUT_S`, or `timeout_s` if shorter.
        """
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit():
            if int(announced[:20]) > max_nbytes:
                raise _too_large(max_nbytes)
            bodies.check(int(announced))
        timeout_s = min(BODY_TIMEOUT_S, timeout_s)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(timeout_s):
                async for part in self.parts(max_nbytes):
                    self.take(bodies, len(part))
                    parts.append(part)
        except TimeoutError:
            raise RequestTimeout(f"The body did not arrive within {timeout_s:g} seconds.") from None
        return b"".join(parts)

    def take(self, bodies: Bodies, nbytes: int) -> None:
        """Take bytes until the end of the request. Raises `Overloaded` if they do not fit."""
        bodies.take(nbytes)
        self.num_body_bytes += nbytes

    async def parts(self, max_nbytes: int) -> AsyncGenerator[bytes, None]:
        """The body as it arrives.

        Raises:
            RequestTooLarge: the body is too large; the rest of it is not read.
            RequestTimeout: the next part did not arrive within `BODY_TIMEOUT_S`.
        """
        nbytes, more = 0, True
        while more:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                raise RequestTimeout(
                    f"The next part of the body did not arrive within {BODY_TIMEOUT_S:g} seconds."
                ) from None
            if message["type"] == "http.disconnect":
                raise RequestTimeout("The client disconnected before its request was complete.")
            part: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            nbytes += len(part)
            if nbytes > max_nbytes:
                raise _too_large(max_nbytes)
            if not more:
                self._read.set()
            yield part

    async def wait_disconnect(self) -> None:
        """Return when the client disconnects, which is noticed only after its body is read."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _plain(path: str) -> str:
    """`path` without slashes that clients add where they join it to an address.

    It is served as it is meant: a client that is redirected may not send its body again.
    """
    return f"/{path.strip('/')}" if path.startswith("/") else path


def _too_large(max_nbytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than {max_nbytes} bytes.")
