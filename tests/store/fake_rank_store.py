"""Another rank's store, whose puts and fetches end when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.blocks import BlockHash


class FakeRankStore:
    """Implements `RankStore`.

    puts, fetches: what it was told.
    waited: called by `wait`.
    num_asked: how often `take_put` was called.
    """

    def __init__(self) -> None:
        self.puts: list[tuple[list[tuple[int, BlockHash]], bool]] = []
        self.fetches: list[tuple[int, list[BlockHash], list[int]]] = []
        self.put_errors: list[str | None] = []
        self.fetched: list[tuple[int, str | None]] = []
        self.num_damaged = self.num_asked = 0
        self.is_gone = False
        self.waited: Callable[[], object] = lambda: None

    def put(self, blocks: Sequence[tuple[int, BlockHash]], in_host: bool) -> None:
        self.puts.append(([*blocks], in_host))

    def take_put(self) -> list[str | None]:
        self.num_asked += 1
        errors, self.put_errors = self.put_errors, []
        return errors

    def fetch(self, number: int, names: Sequence[BlockHash], into: Sequence[int]) -> None:
        self.fetches.append((number, [*names], [*into]))

    def take_fetched(self) -> list[tuple[int, str | None]]:
        fetched, self.fetched = self.fetched, []
        return fetched

    def wait(self, timeout_s: float) -> bool:
        self.waited()
        return not self.is_gone
