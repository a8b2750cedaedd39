"""Redis: the blocks of the cold KV tier, and the board of tenants' limits.

Only this module imports the Redis client.

A block is stored in equal pieces, one per KV head of the model, so that workers with different
numbers of ranks can share blocks: each rank puts and gets its own pieces. Their keys are
`disagg:kv:<namespace>:<piece>:<block hash>`. The namespace is a digest of the KV layout and the
cluster's key, so clusters and models can share a server. A value is a digest and the piece. The
digest uses the cluster's key and covers the block's hash and the piece's number too, so a
truncated, damaged, misplaced or forged value is not accepted. The server limits the memory
(`maxmemory` with `maxmemory-policy allkeys-lru`, or `volatile-lru` if the server also has data that
must not be evicted); a time to live limits the age.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

from disagg.blocks import BlockHash
from disagg.errors import StartupError, Unavailable

_SEAL_NBYTES = 16
TIMEOUT_S = 0.5  # for connecting, and for each response
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0  # between two attempts to reach a server
BOARD_TTL_MS = 3_600_000  # how long the board is kept after the last ingress has stopped


class _Server:
    """A Redis server that may be unreachable. It is connected at the first call.

    After a failure no call goes through for a pause that doubles each time; then the next one is a
    trial.

    Raises:
        StartupError: the URL is invalid.
    """

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = self._retry_at_s = 0.0
        self._why = ""
        try:
            self.client = redis.Redis.from_url(
                url,
                protocol=2,
                socket_read_size=1 << 20,  # large reads take the interpreter lock less often
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # `guarded` decides when to try again
            )
        except ValueError as error:
            raise StartupError(f"The Redis URL is invalid: {error}", param="redis_url") from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A context for calls to the server. Raises `Unavailable` if it is unreachable."""
        left_s = self._retry_at_s - self._clock()
        if self._pause_s and left_s > 0:
            raise Unavailable(
                f"Redis is unreachable ({self._why}); the next attempt is in {left_s:.1f} s."
            )
        try:
            yield
        except (redis.RedisError, OSError) as error:
            self._why = f"{type(error).__name__}: {error}"
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._retry_at_s = self._clock() + self._pause_s
            # Reconnect, because the name may resolve to another server by now.
            self.client.connection_pool.disconnect()
            raise Unavailable(f"Redis did not answer ({self._why}).") from error
        self._pause_s = 0.0


class RedisStore:
    """A `ColdStore` in a Redis server. It connects at the first call.

    While the server is unreachable, calls raise `Unavailable` without using the network, except for
    one trial after each of growing pauses. A call that uses the network takes at most a few times
    `timeout_s`.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        layout: fingerprint of everything that must match for blocks to be interchangeable,
            including the number of pieces.
        pieces: the pieces that this store puts and gets, out of `num_pieces` of a whole block.
        secret: the cluster's key; without it keys cannot be read and blocks cannot be forged.
        ttl_s: how long a block stays after it was put, used or not.
        timeout_s: time limit for connecting, and for each response.

    Raises:
        StartupError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        layout: str,
        *,
        pieces: range = range(1),
        num_pieces: int = 1,
        secret: bytes = b"",
        ttl_s: float = 24 * 3600.0,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = hashlib.blake2b(secret, digest_size=32).digest()
        namespace = hashlib.blake2b(layout.encode(), digest_size=8, key=self._secret).hexdigest()
        names = [f"disagg:kv:{namespace}:{piece}:".encode() for piece in range(num_pieces)]
        self._all, self._own = names, names[pieces.start : pieces.stop]
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self.num_damaged = 0
        self._server = _Server(url, timeout_s, clock)
        self._client = self._server.client

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        if not keys:
            return []
        names = [prefix + key for key in keys for prefix in self._own]
        with self._server.guarded():
            values = self._client.mget(names)
            pieces = [self._unseal(name, value) for name, value in zip(names, values, strict=True)]
            found = zip(names, values, pieces, strict=True)
            damaged = [name for name, value, piece in found if value is not None and piece is None]
            if damaged:  # delete them, so that intact ones can be stored
                self.num_damaged += len(damaged)
                self._client.unlink(*damaged)
        num = len(self._own)
        return [_joined(pieces[at : at + num]) for at in range(0, len(pieces), num)]

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        if not items:
            return
        with self._server.guarded(), self._client.pipeline(transaction=False) as pipeline:
            for key, block in items:
                nbytes, view = len(block) // len(self._own), memoryview(block)
                for number, prefix in enumerate(self._own):
                    piece = view[number * nbytes : (number + 1) * nbytes]
                    sealed = b"".join((self._digest(prefix + key, piece), piece))
                    pipeline.set(prefix + key, sealed, px=self._ttl_ms)
            _execute(pipeline)

    def contains(self, keys: Sequence[BlockHash]) -> list[bool]:
        if not keys:
            return []
        with self._server.guarded(), self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(*(prefix + key for prefix in self._all))
            present = _execute(pipeline)
        return [found == len(self._all) for found in present]

    def close(self) -> None:
        self._client.close()

    def _digest(self, name: bytes, piece: memoryview) -> bytes:
        digest = hmac.new(self._secret, name, "sha256")  # twice as fast as blake2b on recent CPUs
        digest.update(piece)
        return digest.digest()[:_SEAL_NBYTES]

    def _unseal(self, name: bytes, value: bytes | str | None) -> memoryview | None:
        if not isinstance(value, bytes):
            return None
        piece = memoryview(value)[_SEAL_NBYTES:]
        is_intact = hmac.compare_digest(value[:_SEAL_NBYTES], self._digest(name, piece))
        return piece if is_intact else None


def _joined(pieces: Sequence[memoryview | None]) -> bytes | None:
    """A rank's part of a block; None if a piece is missing."""
    found = [piece for piece in pieces if piece is not None]
    return b"".join(found) if len(found) == len(pieces) else None


class RedisBoard:
    """A `limits.LimitBoard` in a Redis server: one hash with a field for each ingress.

    Args:
        url: see `RedisStore`.
        secret: the cluster's key, which separates clusters that share a server.

    Raises:
        StartupError: the URL is invalid.
    """

    def __init__(self, url: str, *, secret: bytes = b"") -> None:
        key = hashlib.blake2b(secret, digest_size=32).digest()
        self._key = b"disagg:limits:" + hashlib.blake2b(digest_size=8, key=key).hexdigest().encode()
        self._server = _Server(url, TIMEOUT_S, time.monotonic)

    def exchange(
        self, ingress_id: str, entry: bytes, gone: Collection[str] = ()
    ) -> Mapping[str, bytes]:
        with self._server.guarded(), self._server.client.pipeline(transaction=False) as pipeline:
            if gone:
                pipeline.hdel(self._key, *gone)
            pipeline.hset(self._key, ingress_id, entry)
            pipeline.pexpire(self._key, BOARD_TTL_MS)
            pipeline.hgetall(self._key)
            entries = _execute(pipeline)[-1]
        return {name.decode(errors="replace"): raw for name, raw in entries.items()}

    def close(self) -> None:
        self._server.client.close()


def _execute(pipeline: Pipeline) -> list[Any]:
    """Run a pipeline without its own errors, which would quote the blocks that were sent."""
    answers = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
