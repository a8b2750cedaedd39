"""Named blocks in host memory: bounded, in the right order, and never what a block held later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from disagg.store.host_tier import HostTier

NBYTES = 10


class Copies:
    """A copier whose copies end when told to."""

    def __init__(self) -> None:
        self.saves: list[Sequence[tuple[int, int]]] = []
        self.loads: list[Sequence[tuple[int, int]]] = []
        self.closed = False

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.saves.append(pairs)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.loads.append(pairs)

    def take_saved(self) -> int:
        ended, self.saves = len(self.saves), []
        return ended

    def take_loaded(self) -> list[float]:
        ended, self.loads = [0.002 for _ in self.loads], []
        return ended

    def read_slot(self, slot: int) -> bytes:
        return bytes([slot]) * NBYTES

    def close(self) -> None:
        self.closed = True


class Tier:
    def __init__(self, num_slots: int, num_blocks: int = 16) -> None:
        self.copies = Copies()
        self.generations = [0] * num_blocks
        self.displaced: list[tuple[bytes, bytes]] = []
        self.tier = HostTier(
            self.copies,
            num_slots,
            NBYTES,
            self.generations,
            self._displace,
        )

    def _displace(
        self, blocks: list[tuple[int, bytes]], read: Callable[[list[int]], list[bytes]]
    ) -> None:
        slots, names = zip(*blocks, strict=True)
        self.displaced += zip(names, read([*slots]), strict=True)

    def save(self, names: bytes) -> None:
        """One-letter names; where they lie in the cache does not matter here."""
        self.tier.save([(i, bytes([name])) for i, name in enumerate(names)])
        self.tier.poll()
        self.tier.check()


def names(text: bytes) -> list[bytes]:
    return [bytes([name]) for name in text]


def test_the_end_of_what_was_not_asked_for_goes_first() -> None:
    fixture = Tier(4)
    tier = fixture.tier
    fixture.save(b"abc")
    fixture.save(b"xyz")  # takes the free slot, and those of c and b
    assert [name for name, _ in fixture.displaced] == [b"c", b"b"]
    assert tier.match(names(b"abc")) == 1 and tier.match(names(b"xyz")) == 3
    tier.touch(names(b"a"))
    fixture.save(b"p")
    assert tier.match(names(b"xyz")) == 2 and b"a" in tier
    assert tier.counts().nbytes == 4 * NBYTES


def test_what_goes_is_read_before_its_slot_is_used_again() -> None:
    fixture = Tier(1)
    fixture.save(b"a")
    fixture.save(b"b")
    assert fixture.displaced == [(b"a", bytes(NBYTES))]


def test_a_block_that_was_evicted_meanwhile_does_not_count() -> None:
    fixture = Tier(4)
    fixture.tier.save([(0, b"a"), (1, b"b")])
    fixture.generations[1] += 1
    fixture.tier.poll()
    fixture.tier.check()
    assert fixture.tier.hashes() == (b"a",)
    counts = fixture.tier.counts()
    assert (counts.num_saved, counts.num_torn) == (1, 1)
    fixture.save(b"b")  # it may come again
    assert b"b" in fixture.tier


def test_a_name_is_copied_once() -> None:
    fixture = Tier(4)
    fixture.tier.save([(0, b"a")])
    fixture.tier.save([(0, b"a")])
    assert len(fixture.copies.saves) == 1
    fixture.tier.poll()
    fixture.tier.save([(3, b"a")])
    assert not fixture.copies.saves


def test_nothing_that_is_being_loaded_or_saved_gives_way() -> None:
    fixture = Tier(2)
    fixture.save(b"ab")
    load = fixture.tier.load(names(b"ab"), [7, 8])
    fixture.tier.save([(0, b"c")])
    assert fixture.tier.counts().num_dropped == 1 and not load.done
    fixture.tier.poll()
    assert load.done
    fixture.tier.save([(0, b"c"), (1, b"d"), (2, b"e")])
    assert fixture.tier.counts().num_dropped == 2
    fixture.tier.poll()
    fixture.tier.check()
    assert set(fixture.tier.hashes()) == {b"c", b"d"}


def test_loading_is_timed_and_predicted() -> None:
    fixture = Tier(4)
    fixture.save(b"abcd")
    before_s = fixture.tier.predicted_s(4)
    for _ in range(10):
        fixture.tier.load(names(b"abcd"), [7, 8, 9, 10])
        assert fixture.tier.num_under_way == 1
        fixture.tier.poll()
    counts = fixture.tier.counts()
    assert counts.num_loaded == 40 and counts.load_s == pytest.approx(0.02)
    predicted_s = fixture.tier.predicted_s(4)
    assert before_s < 0.001 < predicted_s == pytest.approx(0.002, rel=0.2)
    assert counts.latency_s + 4 * counts.block_s == pytest.approx(predicted_s)


def test_events_tell_what_became_of_names() -> None:
    fixture = Tier(2)
    fixture.save(b"ab")
    fixture.save(b"c")
    events = fixture.tier.take_events()
    assert [(event.kind, event.block_hashes, event.tier) for event in events] == [
        ("stored", (b"b", b"a"), "host"),
        ("removed", (b"b",), "host"),
        ("stored", (b"c",), "host"),
    ]
    assert fixture.tier.take_events() == ()


def test_it_closes_its_copier() -> None:
    fixture = Tier(2)
    fixture.tier.close()
    assert fixture.copies.closed


def test_what_may_be_wrong_is_forgotten() -> None:
    """It is not stored elsewhere either, and its slots are used again."""
    fixture = Tier(3)
    tier = fixture.tier
    fixture.save(b"abc")
    tier.take_events()
    load = tier.load(names(b"c"), [7])
    tier.forget(names(b"abcx"))
    assert [b"a" in tier, b"b" in tier, b"c" in tier] == [False, False, True]
    assert [(event.kind, event.block_hashes) for event in tier.take_events()] == [
        ("removed", (b"a", b"b"))
    ]
    fixture.save(b"de")
    assert tier.match(names(b"de")) == 2 and load.done
    assert not fixture.displaced
