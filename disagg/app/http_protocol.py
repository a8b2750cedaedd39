"""What uvicorn does not have: limits of request heads, and a short way for events of a stream.

Only HAProxy should use the HTTP port of an ingress, and it sends complete heads only. But a client
that connects to the port directly reaches uvicorn, which waits for the end of a head without a time
limit and stores all of it.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from disagg.app.haproxy_launcher import HEAD_S
from disagg.token_fast_path import WRITE_NOW

MAX_HEAD_NBYTES = 128 << 10  # four times the limit in `api/http/request.py`


class IngressProtocol(HttpToolsProtocol):
    """Closes a connection if a head does not end within `HEAD_S` or is too long.

    It does so also while an answer runs, because the head of the next request may arrive then.
    Requests have the ASGI extension `WRITE_NOW`.
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
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # its task begins later
            write = partial(_write_now, weakref.ref(self.cycle))  # which has the scope
            self.cycle.scope["extensions"] = {WRITE_NOW: {"loop": self.loop, "write": write}}

    def on_message_complete(self) -> None:
        self._is_in_head, self._nbytes = True, 0
        super().on_message_complete()

    def _start(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _write_now(of: weakref.ref[RequestResponseCycle], body: bytes) -> bool:
    """What `send` does with a part of a streamed body, if the client reads fast enough."""
    cycle = of()
    if cycle is None or cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
        return False
    if not (cycle.chunked_encoding and body):  # not begun, or nothing, which would end the reply
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
