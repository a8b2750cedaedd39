"""What both ends of a link share: a TCP connection that carries frames and never waits to write.

An `asyncio.Protocol` rather than streams: one callback per read whatever the number of frames, no
task and no future per frame. Writing never blocks the writer. A peer that does not read makes
the write buffer grow until it passes its cap, and then loses the link.

A frame is a 4-byte little-endian length and that many bytes of msgpack (`messages.py`). The
handshake is mutual HMAC-SHA256 (RFC 2104) over fresh nonces of both sides. A proof covers the role
of the prover, so that one side's proof cannot be sent back as the other's. It also covers the
ingress's id, or the worker's whole record. Links authenticate but do not encrypt: use a private
network.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import struct
from abc import ABC, abstractmethod
from typing import Literal, cast

import msgspec

from disagg.errors import DisaggError
from disagg.messages import WIRE_VERSION, ToIngress, ToWorker, encode

HEADER = struct.Struct("<I")
MAX_FRAME_NBYTES = 64 << 20
MAX_HANDSHAKE_NBYTES = 1 << 20  # bound on the memory for an unauthenticated connection
NONCE_NBYTES = 32


class BadFrame(DisaggError):
    """The other side sent bytes that no side of this version sends. The link ends."""

    code = "bad_frame"


def frame(payload: bytes) -> bytes:
    """Raises `BadFrame` when the other side would refuse the size."""
    if len(payload) > MAX_FRAME_NBYTES:
        raise BadFrame(
            f"A message of {len(payload)} bytes does not fit into a link frame of"
            f" {MAX_FRAME_NBYTES} bytes."
        )
    return HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames. Keeps at most one unfinished frame."""

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self._rest = bytearray()
        self._num_needed = HEADER.size  # bytes in `_rest` before there is anything to do

    def feed(self, chunk: bytes) -> list[bytes]:
        """The frames that `chunk` completes.

        Raises:
            BadFrame: a frame is announced that is longer than `max_nbytes`.
        """
        if self._rest:
            self._rest += chunk
            if len(self._rest) < self._num_needed:
                return []
            chunk = bytes(self._rest)
        frames = []
        start, end = 0, len(chunk)
        self._num_needed = HEADER.size
        while end - start >= HEADER.size:
            (nbytes,) = HEADER.unpack_from(chunk, start)
            if nbytes > self.max_nbytes:
                raise BadFrame(
                    f"A frame of {nbytes} bytes was announced; at most {self.max_nbytes} are"
                    " allowed here. Is something else than a disagg process on this port?"
                )
            stop = start + HEADER.size + nbytes
            if stop > end:
                self._num_needed = HEADER.size + nbytes
                break
            frames.append(chunk[start + HEADER.size : stop])
            start = stop
        self._rest = bytearray(chunk[start:])
        return frames


def prove(
    key: bytes, role: Literal["ingress", "worker"], nonces: tuple[bytes, bytes], who: bytes
) -> bytes:
    """The proof of one side of a link that it knows the key.

    Args:
        nonces: the worker's and the ingress's.
        who: the ingress's id, or the worker's encoded record.
    """
    return proof_of(key, b"disagg-link", str(WIRE_VERSION).encode(), role.encode(), *nonces, who)


def proof_of(key: bytes, *parts: bytes) -> bytes:
    """A proof that the sender knows the key. Other parts have another proof."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(HEADER.pack(len(part)) + part)
    return mac.digest()


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
        self._has_room = asyncio.Event()
        self._has_room.set()

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

    async def room(self) -> None:
        """Wait until at most a quarter of the buffer is in use, or the link has ended.

        For messages of many bytes: several at once are no sign of a slow reader.
        """
        while not self._has_room.is_set():
            await self._has_room.wait()

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
        self._transport.set_write_buffer_limits(high=self.max_buffer_nbytes // 4)
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

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._has_room.set()
        self.reason = self.reason or (str(error) if error else "the other side hung up")
        try:
            self.closed()
        finally:
            self.ended.set_result(None)
