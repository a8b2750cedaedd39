"""Limits of request heads on an ingress's own HTTP port, which HAProxy alone should reach.

HAProxy sends only complete heads. A client that connects to the port directly reaches uvicorn,
which waits for the end of a head without a time limit and stores all of it.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from disagg.app.haproxy_launcher import HEAD_S

MAX_HEAD_NBYTES = 128 << 10  # four times what `api/http/request.py` takes


class BoundedHeads(HttpToolsProtocol):
    """A connection that is closed when a head does not end in `HEAD_S`, or is too long.

    Also while an answer runs: the head of another request may arrive behind it.
    """

    _timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _is_in_head = True  # what arrives next; else a body
    _nbytes = 0  # of the head, without what arrived together with the end of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start()  # a client that sends nothing has no more time

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._nbytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._nbytes > MAX_HEAD_NBYTES:
            self.transport.close()

    def on_message_begin(self) -> None:  # by its first byte; a line end behind a body is none
        if self._timer is None:
            self._start()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop()
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head, self._nbytes = True, 0
        super().on_message_complete()

    def _start(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
