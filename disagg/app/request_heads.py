"""Limits request heads on the HTTP port of an ingress, which only HAProxy should use.

HAProxy sends complete heads only. But a client that connects to the port directly reaches uvicorn,
which waits for the end of a head without a time limit and stores all of it.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from disagg.app.haproxy_launcher import HEAD_S

MAX_HEAD_NBYTES = 128 << 10  # four times the limit in `api/http/request.py`


class BoundedHeads(HttpToolsProtocol):
    """Closes a connection if a head does not end within `HEAD_S` or is too long.

    It does so also while an answer runs, because the head of the next request may arrive then.
    """

    _timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _is_in_head = True  # whether the next bytes belong to a head; otherwise to a body
    _nbytes = 0  # bytes of the head, without those that arrived together with the end of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start()  # the limit applies to clients that send nothing, too

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._nbytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._nbytes > MAX_HEAD_NBYTES:
            self.transport.close()

    def on_message_begin(self) -> None:  # called for the first byte of a head
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
