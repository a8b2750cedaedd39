"""Evicted prefixes come back from the store if that is quicker; nobody waits for it in vain."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from disagg.decode_worker.kv_import import KVImport
from disagg.decode_worker.store_source import StoreLookup
from disagg.engine.sched.sequence import Sequence
from disagg.errors import Unavailable
from disagg.store.ranked_store import RankedFetches, RankStore
from disagg.worker.offload import KVOffload
from tests.decode_worker.evicting import BLOCK_SIZE, PROMPT, SLOW_S, Rig
from tests.decode_worker.test_kv_import import FakeTransport
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_sequence
from tests.store.fake_rank_store import FakeRankStore
from tests.store.fake_store import FakeStore
from tests.worker.members import new_tier


class Door(Rig):
    """An engine with a store behind it. The store answers while `fates.calm`.

    Args:
        others: the stores of other ranks.
    """

    def __init__(
        self, num_blocks: int = 16, token_s: float = SLOW_S, others: SequenceOf[RankStore] = ()
    ) -> None:
        super().__init__(num_blocks)
        self.store = FakeStore(1 << 20)
        self.tier = new_tier(self.fates, self.store, self.kv.block_nbytes, lambda: self.now)
        fetches = RankedFetches(others) if others else None
        self.kv_import = KVImport(
            self.engine,
            FakeTransport(),
            lambda source_id, num_blocks: 0.0,
            [StoreLookup(self.tier, self.kv.write_block, fetches)],
            lambda: lambda num_new, num_before: token_s * num_new,
        )
        self.offload = KVOffload(self.engine, None, self.tier, self.kv.read_blocks)

    def admit(self, prompt: tuple[int, ...] = PROMPT) -> Sequence:
        sequence = new_sequence(prompt, BLOCK_SIZE, 5, stop_ids=frozenset())
        self.kv_import.admit(sequence, None, self.now)
        self.engine.check()
        return sequence

    def run(self) -> None:
        while self.kv_import.advance(self.now) or self.engine.has_work:
            self.engine.step()
            self.engine.check()

    def evict_all(self) -> None:
        super().evict_all()
        self.tier.poll()


def warm(door: Door) -> None:
    """Let the prompt's blocks wander into the store."""
    door.admit()
    door.run()
    door.evict_all()
    assert door.store.nbytes == 5 * door.kv.block_nbytes, "four of the prompt, one of the answer"
    door.forget_num_computed()


def test_an_evicted_prefix_is_loaded_and_not_computed() -> None:
    door = Door()
    warm(door)
    sequence = door.admit()
    assert door.kv_import.num_arriving == 1 and not door.engine.has_work
    door.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert sequence.num_cached_tokens == 16
    assert door.num_computed == len(PROMPT) - 16 + 4
    assert door.engine.pool.num_free == door.engine.pool.num_blocks


def test_only_what_is_not_here_is_loaded() -> None:
    door = Door()
    warm(door)
    door.kv_import.admit(
        new_sequence(PROMPT[:9], BLOCK_SIZE, 1), None, door.now
    )  # brings two blocks back
    door.run()
    num_hits = door.tier.stats.num_hits
    sequence = door.admit()
    door.run()
    assert door.tier.stats.num_hits - num_hits == 2 and sequence.num_cached_tokens == 16
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)


def test_the_store_is_left_alone_where_computing_is_quicker() -> None:
    door = Door(token_s=1e-9)
    warm(door)
    door.admit()
    assert door.engine.has_work and not door.kv_import.num_arriving
    door.run()
    counts = door.tier.counts()
    assert counts.num_stored and not counts.num_hits + counts.num_misses


def test_a_silent_store_costs_no_more_than_computing() -> None:
    door = Door()
    warm(door)
    door.fates.calm = False
    sequence = door.admit()
    door.now = 16 * SLOW_S - 0.01
    assert door.kv_import.advance(door.now)
    door.now = 16 * SLOW_S
    assert not door.kv_import.advance(door.now) and door.engine.has_work
    door.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    door.fates.calm = True  # the answer that comes now is nobody's
    assert not door.kv_import.advance(door.now)
    assert door.engine.pool.num_free == door.engine.pool.num_blocks


def test_nobody_waits_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door()
    warm(door)

    def away(keys: object) -> int:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(door.store, "contains_prefix", away)
        patch.setattr(door.offload, "_read_blocks", away)  # blocks that nobody takes are not read
        door.admit()
        door.run()
        for _ in range(3):
            door.evict_all()
            sequence = door.admit()
            assert door.engine.has_work and not door.kv_import.num_arriving
            door.run()
            assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
            assert sequence.num_cached_tokens == 0
    door.evict_all()
    door.admit()  # finds out that it is back
    door.run()
    door.evict_all()
    sequence = door.admit()
    assert door.kv_import.num_arriving == 1
    door.run()
    assert sequence.num_cached_tokens == 16


@pytest.mark.parametrize("how", ["cancelled", "drained"])
def test_who_goes_leaves_no_block_to_be_fetched(how: str) -> None:
    door = Door()
    warm(door)
    door.fates.calm = False
    sequence = door.admit()
    if how == "cancelled":
        assert door.kv_import.cancel(sequence.request_id)
        assert not door.kv_import.cancel(sequence.request_id)
    else:
        assert door.kv_import.take_waiting() == [sequence]
    door.fates.calm = True
    assert not door.kv_import.advance(door.now) and not door.engine.has_work
    assert not door.tier.stats.num_hits


@pytest.mark.parametrize("change", ["prefix gone", "no room"])
def test_what_changed_meanwhile_means_to_compute(change: str) -> None:
    door = Door()
    warm(door)
    door.kv_import.admit(new_sequence(PROMPT[:5], BLOCK_SIZE, 1), None, door.now)
    door.run()  # the first block is here again
    sequence = door.admit()
    if change == "prefix gone":
        door.evict_all()
        taken: list[int] = []
    else:
        taken = door.engine.pool.allocate(14) or []
    assert not door.kv_import.advance(door.now), "it does not go on waiting"
    door.engine.pool.release(taken)
    door.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)


def test_tokens_of_a_moved_request_do_not_count_as_cached_prompt() -> None:
    door = Door()
    warm(door)
    moved = new_sequence(PROMPT[:6], BLOCK_SIZE, 30, output=PROMPT[6:17], stop_ids=frozenset())
    door.kv_import.admit(moved, None, door.now)
    door.run()
    assert moved.num_cached_tokens == 6


def test_blocks_of_another_name_never_come() -> None:
    door = Door()
    warm(door)
    other = (99, *PROMPT[1:])
    sequence = door.admit(other)
    assert door.kv_import.num_arriving == 1
    door.run()
    assert door.tier.stats.num_misses == 8 and door.tier.stats.num_hits == 0
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(other, 5)


def test_blocks_are_there_when_all_ranks_have_loaded_their_parts() -> None:
    ranks = [FakeRankStore(), FakeRankStore()]
    door = Door(others=ranks)
    warm(door)
    sequence = door.admit()
    assert door.kv_import.advance(door.now)
    (number, names, into), *_ = ranks[0].fetches
    assert names == sequence.block_hashes[:4] and len(into) == 4
    assert ranks[1].fetches == ranks[0].fetches
    door.engine.check(door.kv_import.holders())
    ranks[1].fetched = [(number, None)]
    assert door.kv_import.advance(door.now) and not door.engine.has_work
    ranks[0].fetched = [(number, None)]
    door.run()
    assert sequence.num_cached_tokens == 16
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)


def test_a_prompt_is_computed_if_a_rank_lacks_its_part_which_is_stored_again() -> None:
    rank = FakeRankStore()
    door = Door(others=[rank])
    warm(door)
    sequence = door.admit()
    assert door.kv_import.advance(door.now)
    ((number, _, _),) = rank.fetches
    rank.fetched = [(number, "the store has only 3 of 4 blocks any more")]
    door.run()
    assert sequence.num_cached_tokens == 0
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    num_stored = door.tier.stats.num_stored
    door.evict_all()
    assert door.tier.stats.num_stored == num_stored + 4


def test_a_rank_whose_store_is_silent_costs_no_more_than_computing() -> None:
    rank = FakeRankStore()
    door = Door(others=[rank])
    warm(door)
    began_s, sequence = door.now, door.admit()
    assert door.kv_import.advance(door.now)
    door.now = began_s + 8 * SLOW_S  # half of it: the first rank may have taken the other half
    assert door.kv_import.advance(door.now) and door.engine.has_work
    while door.engine.has_work:
        door.engine.step()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert door.engine.pool.num_free < door.engine.pool.num_blocks, "it may still write to these"
    ((number, _, _),) = rank.fetches
    rank.fetched = [(number, None)]
    assert not door.kv_import.advance(door.now)
    assert door.engine.pool.num_free == door.engine.pool.num_blocks
    door.engine.check()
