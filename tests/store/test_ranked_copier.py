"""A copy of a worker with several ranks has ended when it has on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.store.ranked_copier import RankedCopier


class FakeCopier:
    """Ends what the test says, and remembers what it was told.

    num_saved, loaded_s: what has ended and was not reported.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, list[tuple[int, int]]]] = []
        self.num_saved = 0
        self.loaded_s: list[float] = []
        self.is_closed = False

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.calls.append(("save", [*pairs]))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.calls.append(("load", [*pairs]))

    def take_saved(self) -> int:
        num_saved, self.num_saved = self.num_saved, 0
        return num_saved

    def take_loaded(self) -> list[float]:
        loaded_s, self.loaded_s = self.loaded_s, []
        return loaded_s

    def read_slot(self, slot: int) -> bytes:
        return f"{self.name} {slot}".encode()

    def close(self) -> None:
        self.is_closed = True


def test_every_rank_copies_the_same_blocks() -> None:
    ranks = [FakeCopier("0"), FakeCopier("1"), FakeCopier("2")]
    copier = RankedCopier(ranks[0], ranks[1:])
    copier.save([(1, 2), (3, 4)])
    copier.load([(2, 5)])
    assert all(rank.calls == [("save", [(1, 2), (3, 4)]), ("load", [(2, 5)])] for rank in ranks)


def test_saves_end_with_the_last_rank() -> None:
    ranks = [FakeCopier("0"), FakeCopier("1"), FakeCopier("2")]
    copier = RankedCopier(ranks[0], ranks[1:])
    ranks[0].num_saved, ranks[1].num_saved = 2, 1
    assert copier.take_saved() == 0
    ranks[2].num_saved = 2
    assert copier.take_saved() == 1
    ranks[1].num_saved = 1
    assert copier.take_saved() == 1
    assert copier.take_saved() == 0


def test_loads_end_with_the_last_rank_and_take_as_long_as_the_slowest() -> None:
    ranks = [FakeCopier("0"), FakeCopier("1")]
    copier = RankedCopier(ranks[0], ranks[1:])
    ranks[1].loaded_s = [0.25, 0.5]
    assert copier.take_loaded() == []
    ranks[0].loaded_s = [0.5]
    assert copier.take_loaded() == [0.5]
    ranks[0].loaded_s = [0.125]
    assert copier.take_loaded() == [0.5]
    assert copier.take_loaded() == []
    copier.close()
    assert ranks[0].is_closed
