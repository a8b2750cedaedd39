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
from typing import NamedTuple, Protocol

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


class Remaining(NamedTuple):
    """The rest of a limit per minute, and the seconds until it is full again."""

    limit: int
    remaining: int
    reset_s: float


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


class _Peer(NamedTuple):
    """The last entry of another ingress, and when it last changed."""

    entry: Entry
    changed_s: float


class _TenantBuckets:
    """The limits and the usage of one tenant."""

    def __init__(self, config: TenantConfig, now: float) -> None:
        per_minute = {"requests": config.requests_per_minute, "tokens": config.tokens_per_minute}
        self.buckets = {kind: Bucket(most, now) for kind, most in per_minute.items() if most}
        self.max_num_requests = config.max_num_requests
        self.used = Used()
        self.num_running_elsewhere = 0

    def spend(self, now: float, num_requests: int = 0, num_tokens: int = 0) -> None:
        self.used.num_requests += num_requests
        self.used.num_tokens += num_tokens
        for kind, amount in (("requests", num_requests), ("tokens", num_tokens)):
            if kind in self.buckets:
                self.buckets[kind].take(amount, now)

    def spend_elsewhere(self, past: Used, used: Used, now: float) -> None:
        """Take what another ingress has admitted, but at most all of a bucket, so that a wrong
        figure blocks for a minute only."""
        more = {
            "requests": used.num_requests - past.num_requests,
            "tokens": used.num_tokens - past.num_tokens,
        }
        for kind, bucket in self.buckets.items():
            bucket.take(min(more[kind], bucket.per_minute), now)


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
        num_running = tenant.used.num_running
        if now - self._exchanged_s <= SILENT_S:
            num_running += tenant.num_running_elsewhere
        if most is not None and num_running >= most:
            raise RateLimited(
                f"Your limit of {most} requests at a time is used up; try again when one of them"
                " has ended.",
                retry_after_s=RETRY_S,
            )
        for kind, least in (("requests", 1.0), ("tokens", 1e-9)):
            bucket = tenant.buckets.get(kind)
            if bucket is not None and bucket.level(now) < least:
                raise _used_up(kind, bucket, 1.0, now)
        tenant.used.num_running += 1
        tenant.spend(now, num_requests=1)

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
        bucket = tenant.buckets.get("tokens")
        if bucket is not None and bucket.wait_s(num_tokens, now) > 0.0:
            tenant.spend(now, num_requests=-1)
            raise _used_up("tokens", bucket, num_tokens, now)
        tenant.spend(now, num_tokens=num_tokens)

    def end(self, name: str, num_output_tokens: int) -> None:
        """Count the end of a request, and subtract its output tokens.

        The bucket may go below zero.
        """
        tenant = self._tenant(name)
        if tenant is not None:
            tenant.used.num_running -= 1
            tenant.spend(self._clock(), num_tokens=num_output_tokens)

    def remaining(self, name: str) -> dict[str, Remaining]:
        """The rest of each limit per minute: "requests", "tokens"."""
        tenant, now = self._tenant(name), self._clock()
        return {
            kind: Remaining(
                bucket.per_minute,
                max(0, math.floor(bucket.level(now) + 1e-9)),
                bucket.wait_s(bucket.per_minute, now),
            )
            for kind, bucket in (tenant.buckets if tenant is not None else {}).items()
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
            try:
                entry = _decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                gone.append(ingress_id)
                continue
            known = (self._peers or {}).get(ingress_id)
            is_silent = known is not None and known.entry.beat == entry.beat
            changed_s = known.changed_s if known is not None and is_silent else now
            peers[ingress_id] = _Peer(entry, changed_s)
            if now - changed_s > GONE_S:
                gone.append(ingress_id)
            before = known.entry.used if known is not None else {}
            for name, used in entry.used.items() if self._peers is not None else ():
                if (tenant := self._tenant(name)) is not None:
                    tenant.spend_elsewhere(before.get(name) or Used(), used, now)
        self._peers = peers
        alive = [peer.entry for peer in peers.values() if now - peer.changed_s <= SILENT_S]
        for limited in self._tenants.values():
            limited.num_running_elsewhere = 0
        for name, used in (pair for entry in alive for pair in entry.used.items()):
            if (tenant := self._tenant(name)) is not None:
                tenant.num_running_elsewhere += used.num_running
        return gone

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


def _used_up(unit: str, bucket: Bucket, amount: float, now: float) -> RateLimited:
    wait_s = bucket.wait_s(amount, now)
    return RateLimited(
        f"Your limit of {bucket.per_minute} {unit} per minute is used up; try again in"
        f" {math.ceil(wait_s)} s.",
        retry_after_s=wait_s,
    )
