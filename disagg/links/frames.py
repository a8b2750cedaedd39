"""The wire format of a link: frames, and the handshake that proves the cluster's key.

A frame is a 4-byte little-endian length and that many bytes of msgpack (`messages.py`). The
handshake is mutual HMAC-SHA256 (RFC 2104) over fresh nonces of both sides. A proof covers the role
of the prover, so that one side's proof cannot be sent back as the other's. It also covers the
ingress's id, or the worker's whole record.

Links authenticate but do not encrypt: use a private network.
This file knows no sockets and no streams.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from disagg.errors import DisaggError
from disagg.messages import WIRE_VERSION, WorkerRecord, encode

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


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_NBYTES)


def ingress_proof(key: bytes, worker_nonce: bytes, ingress_nonce: bytes, ingress_id: str) -> bytes:
    """The correct value of `Hello.proof`."""
    return _link_proof(key, b"ingress", worker_nonce, ingress_nonce, ingress_id.encode())


def worker_proof(
    key: bytes, worker_nonce: bytes, ingress_nonce: bytes, record: WorkerRecord
) -> bytes:
    """The correct value of `Welcome.proof`."""
    return _link_proof(key, b"worker", worker_nonce, ingress_nonce, encode(record))


def proofs_equal(left: bytes, right: bytes) -> bool:
    """Whether two proofs are equal. It takes the same time wherever they differ."""
    return hmac.compare_digest(left, right)


def _link_proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return proof_of(key, b"disagg-link", str(WIRE_VERSION).encode(), role, *parts)


def proof_of(key: bytes, *parts: bytes) -> bytes:
    """A proof that the sender knows the key. Other parts have another proof."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(HEADER.pack(len(part)) + part)
    return mac.digest()
