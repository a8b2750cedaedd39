"""What both ends of a link share: a TCP connection that carries frames and never waits to write.

An `asyncio.Protocol` rather than streams: one callback per read whatever the number of frames, no
task and no future per frame. Writing never blocks the writer. A peer that does not read makes
the write buffer grow until it passes its cap, and then loses the link.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from typing import cast

import msgspec

from disagg.links.frames import MAX_FRAME_NBYTES, MAX_HANDSHAKE_NBYTES, BadFrame, FrameReader, frame
from disagg.messages import ToIngress, ToWorker, encode

MAX_BUFFER_NBYTES = 64 << 20
UNACKNOWLEDGED_MS = 10_000  # a host that vanished without a word is noticed after this time


class Connection(asyncio.Protocol, ABC):
    """One end of a link. Until `trust` only small frames are accepted."""

    def __init__(self, max_buffer_nbytes: int = MAX_BUFFER_NBYTES) -> None:
        self.max_buffer_nbytes = max_buffer_nbytes
        self.reason = ""  # why the link ended, once it has
        self.is_open = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader(MAX_HANDSHAKE_NBYTES)

    @abstractmethod
    def received(self, payload: bytes) -> None:
        """One whole frame. May raise `BadFrame` or `msgspec.DecodeError` to end the link."""

    @abstractmethod
    def opened(self) -> None: ...

    @abstractmethod
    def closed(self) -> None:
        """Called once, after `opened`; `reason` says why."""

    def send(self, message: ToWorker | ToIngress) -> None:
        """Send a message without waiting. Does nothing once the link has ended.

        Raises:
            BadFrame: the message is too long for a frame; the link is not harmed.
        """
        if not self.is_open or self._transport is None:
            return
        self._transport.write(frame(encode(message)))
        if self.num_buffered_bytes > self.max_buffer_nbytes:
            self.end(
                f"the other side reads too slowly: more than {self.max_buffer_nbytes} bytes wait"
            )

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def trust(self) -> None:
        """The handshake is over."""
        self._frames.max_nbytes = MAX_FRAME_NBYTES

    def end(self, reason: str, *, flush: bool = False) -> None:
        """Close, at once or after all buffered bytes were sent."""
        if not self.is_open or self._transport is None:
            return
        self.is_open = False
        self.reason = reason
        if flush:
            self._transport.close()
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Close and discard buffered bytes, even after `end(flush=True)`."""
        if self._transport is not None and not self.ended.done():
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connected: socket.socket = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; heartbeats keep bytes on their way
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        self.is_open = True
        self.opened()

    def data_received(self, chunk: bytes) -> None:
        try:
            for payload in self._frames.feed(chunk):
                if not self.is_open:
                    return
                self.received(payload)
        except (BadFrame, msgspec.DecodeError) as error:
            self.end(f"a frame that cannot be understood arrived: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self.reason = self.reason or (str(error) if error else "the other side hung up")
        try:
            self.closed()
        finally:
            self.ended.set_result(None)
