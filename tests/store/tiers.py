"""A store that tests hold back, and words for what they do with a tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from disagg.blocks import BlockHash
from disagg.store.cold_tier import ColdTier, Fetch
from disagg.time_model import TransferTimeModel
from tests.store.fake_store import FakeStore
from tests.waiting import wait_until

NBYTES = 1000


def one_second_a_block() -> TransferTimeModel:
    """And one before the first."""
    return TransferTimeModel(latency_s=1.0, bytes_per_s=NBYTES)


class Gate:
    """A store whose calls wait until let through, and fail when told to."""

    num_damaged = 0

    def __init__(self) -> None:
        self.store = FakeStore(1 << 20)
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.calls: list[str] = []
        self.entered = threading.Semaphore(0)
        self.closed = threading.Event()

    def _pass(self, name: str) -> None:
        self.calls.append(name)
        self.entered.release()
        assert self.open.wait(120)
        if self.error is not None:
            raise self.error

    def get_many(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        self._pass("get")
        return self.store.get_many(keys)

    def put_many(self, items: Sequence[tuple[BlockHash, bytes]]) -> None:
        self._pass("put")
        self.store.put_many(items)

    def contains(self, keys: Sequence[BlockHash]) -> list[bool]:
        self._pass("contains")
        return self.store.contains(keys)

    def close(self) -> None:
        self.closed.set()


Opener = Callable[..., ColdTier]


def name(i: int) -> BlockHash:
    return i.to_bytes(16, "little")


def names(*numbers: int) -> list[BlockHash]:
    return [name(i) for i in numbers]


def block(i: int) -> bytes:
    return bytes([i % 256]) * NBYTES


def finish(tier: ColdTier, *fetches: Fetch) -> None:
    """Poll until these are done; each is reported exactly once."""
    reported: list[Fetch] = []

    def all_done() -> bool:
        reported.extend(tier.poll())
        return all(fetch.done for fetch in fetches)

    wait_until(all_done)
    for fetch in fetches:
        assert reported.count(fetch) == 1


def offer(tier: ColdTier, number: int) -> bool:
    """Offer the block of that number under its name."""
    return tier.offer([(number, name(number))], lambda numbers: [block(number)]) == 1


def settle(tier: ColdTier) -> None:
    """Wait until everything offered is stored, failed or dropped."""

    def nothing_queued() -> bool:
        tier.poll()
        return tier.queued_nbytes == 0

    wait_until(nothing_queued)


def keep(tier: ColdTier, *numbers: int) -> None:
    """Offer the blocks of these numbers, and wait for what becomes of them."""
    for number in numbers:
        offer(tier, number)
    settle(tier)


def fetched(tier: ColdTier, *numbers: int) -> Fetch:
    """A lookup of the blocks of these numbers, which has ended."""
    fetch = tier.lookup(names(*numbers))
    finish(tier, fetch)
    return fetch
