"""Rate limits of tenants over all ingresses: requests in flight, requests and tokens per minute.

Each ingress decides at once with the information that it has; no request waits for another process.
A few times per second, in the background, it writes its tenants' totals since its start to a shared
board, and subtracts from its own buckets what the other ingresses have written. So the buckets of
all ingresses differ only by the requests since the last exchange. If too much was admitted in
between, a bucket goes below zero, and nothing is admitted before it has filled again. While the
board is unreachable, each ingress applies the limits to its own requests.

The board holds totals instead of increments, so an exchange that is lost or repeated does no harm.
Everything except `keep_in_step` is pure.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from disagg.config import TenantConfig
from disagg.errors import RateLimited, Unavailable

log = logging.getLogger(__name__)

SYNC_S = 0.25  # between two exchanges with the board
SILENT_S = 3.0  # if an ingress writes nothing for this long, its requests in flight do not count
GONE_S = 60.0  # if it writes nothing for this long, its entry is deleted
RETRY_S = 1.0  # `Retry-After` if it is unknown when a request will end


class LimitBoard(Protocol):
    """A store that all ingresses share: each writes its own entry and reads all entries."""

    def exchange(
        self, ingress_id: str, entry: bytes, gone: Collection[str] = ()
    ) -> Mapping[str, bytes]:
        """Write `entry`, delete the entries of `gone` ingresses, and read all entries.

        Raises:
            Unavailable: the board is unreachable; it is raised within the board's time limit.
        """
        ...

    def close(self) -> None: ...


class Bucket:
    """A token bucket that holds the amount of one minute and fills steadily. May be below zero."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now

    def level(self, now: float) -> float:
        since_s = max(0.0, now - self._at_s)
        self._level = min(self.per_minute, self._level + since_s * self.per_minute / 60.0)
        self._at_s = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = min(self.per_minute, self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the bucket has `amount` or is full."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing * 60.0 / self.per_minute)


class Remaining(msgspec.Struct, frozen=True):
    """The rest of a limit per minute, and the seconds until it is full again."""

    limit: int
    remaining: int
    reset_s: float

    @classmethod
    def from_bucket(cls, bucket: Bucket, now: float) -> Remaining:
        left = max(0, math.floor(bucket.level(now) + 1e-9))
        return cls(bucket.per_minute, left, bucket.wait_s(bucket.per_minute, now))


class Used(msgspec.Struct, array_like=True):
    """A tenant's usage of one ingress: requests in flight, and totals since the ingress started."""

    num_running: int = 0
    num_requests: int = 0
    num_tokens: int = 0


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The entry of an ingress. `beat` changes each time, to show that the ingress is alive."""

    beat: int
    used: dict[str, Used]


_decoder = msgspec.msgpack.Decoder(Entry)


class _Peer:
    """The last entry of another ingress, and when it last changed."""

    def __init__(self, entry: Entry, changed_s: float) -> None:
        self.entry = entry
        self.changed_s = changed_s


class _TenantBuckets:
    """The limits and the usage of one tenant."""

    def __init__(self, config: TenantConfig, now: float) -> None:
        self.max_num_requests = config.max_num_requests
        self.requests = _bucket(config.requests_per_minute, now)
        self.tokens = _bucket(config.tokens_per_minute, now)
        self.used = Used()
        self.num_running_elsewhere = 0


class Limits:
    """The limits of all tenants in one ingress. No method waits.

    Args:
        tenant: returns a tenant's settings by name.
        clock: returns monotonic seconds.

    Attributes:
        is_shared: False while the board is unreachable, so that only this ingress's requests count.
    """

    def __init__(
        self, tenant: Callable[[str], TenantConfig], *, clock: Callable[[], float]
    ) -> None:
        self.is_shared = True
        self._config = tenant
        self._clock = clock
        self._tenants: dict[str, _TenantBuckets] = {}  # tenants with limits
        self._peers: dict[str, _Peer] | None = None  # None before the first exchange
        self._exchanged_s = -math.inf
        self._beat = 0

    def begin(self, name: str) -> None:
        """Count a request as in flight until `end`.

        Raises:
            RateLimited: a limit is used up; nothing was counted.
        """
        tenant = self._tenant(name)
        if tenant is None:
            return
        now = self._clock()
        most = tenant.max_num_requests
        if most is not None and tenant.used.num_running + self._elsewhere(tenant, now) >= most:
            raise RateLimited(
                f"Your limit of {most} requests at a time is used up; try again when one of them"
                " has ended.",
                retry_after_s=RETRY_S,
            )
        if tenant.requests is not None and tenant.requests.level(now) < 1.0:
            raise _used_up("requests", tenant.requests, 1.0, now)
        if tenant.tokens is not None and tenant.tokens.level(now) <= 0.0:
            raise _used_up("tokens", tenant.tokens, 1.0, now)
        tenant.used.num_running += 1
        self._spend(tenant, 1, 0, now)

    def take_tokens(self, name: str, num_tokens: int) -> None:
        """Subtract a prompt's tokens.

        A prompt that is larger than the limit of a minute is admitted when the bucket is full.

        Raises:
            RateLimited: too few tokens are left; the request does not count for the limit of
                requests per minute.
        """
        tenant = self._tenant(name)
        if tenant is None:
            return
        now = self._clock()
        if tenant.tokens is not None and tenant.tokens.wait_s(num_tokens, now) > 0.0:
            self._spend(tenant, -1, 0, now)
            raise _used_up("tokens", tenant.tokens, num_tokens, now)
        self._spend(tenant, 0, num_tokens, now)

    def end(self, name: str, num_output_tokens: int) -> None:
        """Count the end of a request, and subtract its output tokens.

        The bucket may go below zero.
        """
        tenant = self._tenant(name)
        if tenant is not None:
            tenant.used.num_running -= 1
            self._spend(tenant, 0, num_output_tokens, self._clock())

    def remaining(self, name: str) -> dict[str, Remaining]:
        """The rest of each limit per minute: "requests", "tokens"."""
        tenant = self._tenant(name)
        if tenant is None:
            return {}
        now = self._clock()
        buckets = {"requests": tenant.requests, "tokens": tenant.tokens}
        return {
            kind: Remaining.from_bucket(bucket, now)
            for kind, bucket in buckets.items()
            if bucket is not None
        }

    def entry(self) -> bytes:
        """The entry to write to the board now."""
        self._beat += 1
        used = {name: tenant.used for name, tenant in self._tenants.items()}
        return msgspec.msgpack.encode(Entry(self._beat, used))

    def apply(self, entries: Mapping[str, bytes]) -> list[str]:
        """Apply the entries of the other ingresses. Returns the ids of those that are gone.

        Their usage before this ingress started is ignored; it matters for a minute only.
        """
        now = self._exchanged_s = self._clock()
        peers: dict[str, _Peer] = {}
        gone: list[str] = []
        for ingress_id, raw in entries.items():
            known = None if self._peers is None else self._peers.get(ingress_id)
            try:
                entry = _decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                gone.append(ingress_id)
                continue
            before = known.entry.used if known is not None else {}
            if self._peers is not None:
                self._spend_theirs(before, entry.used, now)
            is_new = known is None or entry.beat != known.entry.beat
            peers[ingress_id] = _Peer(entry, now if is_new or known is None else known.changed_s)
            if now - peers[ingress_id].changed_s > GONE_S:
                gone.append(ingress_id)
        self._peers = peers
        self._count_elsewhere(now)
        return gone

    def _spend_theirs(
        self, before: Mapping[str, Used], after: Mapping[str, Used], now: float
    ) -> None:
        for name, used in after.items():
            tenant = self._tenant(name)
            if tenant is None:
                continue
            past = before.get(name) or Used()
            _take_at_most_all(tenant.requests, used.num_requests - past.num_requests, now)
            _take_at_most_all(tenant.tokens, used.num_tokens - past.num_tokens, now)

    def _count_elsewhere(self, now: float) -> None:
        for tenant in self._tenants.values():
            tenant.num_running_elsewhere = 0
        for peer in (self._peers or {}).values():
            if now - peer.changed_s > SILENT_S:
                continue
            for name, used in peer.entry.used.items():
                limited = self._tenant(name)
                if limited is not None:
                    limited.num_running_elsewhere += used.num_running

    def _elsewhere(self, tenant: _TenantBuckets, now: float) -> int:
        return tenant.num_running_elsewhere if now - self._exchanged_s <= SILENT_S else 0

    def _spend(
        self, tenant: _TenantBuckets, num_requests: int, num_tokens: int, now: float
    ) -> None:
        tenant.used.num_requests += num_requests
        tenant.used.num_tokens += num_tokens
        if tenant.requests is not None:
            tenant.requests.take(num_requests, now)
        if tenant.tokens is not None:
            tenant.tokens.take(num_tokens, now)

    def _tenant(self, name: str) -> _TenantBuckets | None:
        tenant = self._tenants.get(name)
        if tenant is None:
            config = self._config(name)
            if not config.is_limited:
                return None
            tenant = self._tenants[name] = _TenantBuckets(config, self._clock())
        return tenant


async def keep_in_step(limits: Limits, board: LimitBoard, ingress_id: str) -> None:
    """Exchange entries until cancelled, and then close the board. Retries an unreachable board.

    It uses a separate thread, because long prompts in the event loop's threads would delay it.
    """
    loop, gone = asyncio.get_running_loop(), list[str]()
    thread = ThreadPoolExecutor(1, thread_name_prefix="limits")
    call: asyncio.Future[Mapping[str, bytes]] | None = None
    try:
        while True:
            call = loop.run_in_executor(thread, board.exchange, ingress_id, limits.entry(), gone)
            try:
                entries = await asyncio.shield(call)
            except Unavailable as error:
                if limits.is_shared:
                    log.warning(
                        "Tenants' limits are not shared between ingresses: %s. Until the store is"
                        " back, each ingress grants the full limits.",
                        error.message.rstrip("."),
                    )
                limits.is_shared = False
            else:
                if not limits.is_shared:
                    log.warning("Tenants' limits are shared between ingresses again.")
                limits.is_shared = True
                others = {each: raw for each, raw in entries.items() if each != ingress_id}
                gone = limits.apply(others)
            await asyncio.sleep(SYNC_S)
    finally:
        if call is not None:  # a running call cannot be cancelled
            await asyncio.gather(call, return_exceptions=True)
        thread.shutdown(wait=False)
        board.close()


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)


def _take_at_most_all(bucket: Bucket | None, amount: int, now: float) -> None:
    """Take from a bucket, but at most its size, so that a wrong figure blocks for a minute only."""
    if bucket is not None:
        bucket.take(min(amount, bucket.per_minute), now)


def _used_up(unit: str, bucket: Bucket, amount: float, now: float) -> RateLimited:
    wait_s = bucket.wait_s(amount, now)
    return RateLimited(
        f"Your limit of {bucket.per_minute} {unit} per minute is used up; try again in"
        f" {math.ceil(wait_s)} s.",
        retry_after_s=wait_s,
    )
