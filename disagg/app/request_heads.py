"""Limits of request heads on an ingress's own HTTP port, which HAProxy alone should reach.

HAProxy sends only complete heads. A client that connects to the port directly reaches uvicorn,
which waits for the end of a head without a time limit and stores all of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from disagg.app.haproxy_launcher import HEAD_S

MAX_HEAD_NBYTES = 128 << 10  # four times what `api/http/request.py` takes


class BoundedHeads(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed when a head does not end in `HEAD_S`, or is too long."""

    _timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _nbytes = 0  # of that head

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle  # the last request whose head is complete
        if cycle is not None and not cycle.response_complete:
            self._stop()
            return
        if self._timer is None:
            self._start()
        self._nbytes += len(data)
        if self._nbytes > MAX_HEAD_NBYTES:
            self.transport.close()

    def _start(self) -> None:
        self._nbytes = 0
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
