"""Evicted prefixes come back from the store if that is quicker; nobody waits for it in vain."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from disagg.errors import Unavailable
from disagg.rank_messages import RankFetch
from disagg.worker.ranked import RankedFetches
from disagg.worker.tiers import KVOffload, StoreLookup
from tests.engine.workload import new_sequence
from tests.store.fake_store import FakeStore
from tests.worker.evicting import (
    BLOCK_SIZE,
    PROMPT,
    SLOW_S,
    Rig,
    check_an_evicted_prefix_is_loaded_and_not_computed,
    is_answered,
)
from tests.worker.fake_ranks import FakeRank, tasks_of
from tests.worker.members import new_tier


class ImportRig(Rig):
    """An engine with a store behind it. The store answers while `fates.calm`.

    Args:
        others: other ranks.
    """

    def __init__(
        self, num_blocks: int = 16, token_s: float = SLOW_S, others: SequenceOf[FakeRank] = ()
    ) -> None:
        super().__init__(num_blocks)
        self.store = FakeStore(1 << 20)
        self.tier = new_tier(self.fates, self.store, self.kv.block_nbytes, lambda: self.now)
        fetches = RankedFetches(tasks_of(others)) if others else None
        self.import_from(StoreLookup(self.tier, self.kv.write_block, fetches), token_s)
        self.offload = KVOffload(self.engine, None, self.tier, self.kv.read_blocks)

    def run(self) -> None:
        while self.kv_import.advance(self.now) or self.engine.has_work:
            self.engine.step()
            self.check()

    def evict_all(self) -> None:
        super().evict_all()
        self.tier.poll()


def warm(rig: ImportRig) -> ImportRig:
    """Let the prompt's blocks wander into the store."""
    rig.admit()
    rig.run()
    rig.evict_all()
    assert rig.store.nbytes == 5 * rig.kv.block_nbytes, "four of the prompt, one of the answer"
    rig.forget_num_computed()
    return rig


def test_an_evicted_prefix_is_loaded_and_not_computed() -> None:
    check_an_evicted_prefix_is_loaded_and_not_computed(warm(ImportRig()))


def test_only_what_is_not_here_is_loaded() -> None:
    rig = warm(ImportRig())
    rig.kv_import.admit(
        new_sequence(PROMPT[:9], BLOCK_SIZE, 1), None, rig.now
    )  # brings two blocks back
    rig.run()
    num_hits = rig.tier.stats.num_hits
    sequence = rig.admit()
    rig.run()
    assert rig.tier.stats.num_hits - num_hits == 2 and sequence.num_cached_tokens == 16
    assert is_answered(sequence)


def test_the_store_is_left_alone_where_computing_is_quicker() -> None:
    rig = warm(ImportRig(token_s=1e-9))
    rig.admit()
    assert rig.engine.has_work and not rig.kv_import.num_arriving
    rig.run()
    counts = rig.tier.counts()
    assert counts.num_stored and not counts.num_hits + counts.num_misses


def test_a_silent_store_costs_no_more_than_computing() -> None:
    rig = warm(ImportRig())
    rig.fates.calm = False
    sequence = rig.admit()
    rig.now = 16 * SLOW_S - 0.01
    assert rig.kv_import.advance(rig.now)
    rig.now = 16 * SLOW_S
    assert not rig.kv_import.advance(rig.now) and rig.engine.has_work
    rig.run()
    assert is_answered(sequence)
    rig.fates.calm = True  # the answer that comes now is nobody's
    assert not rig.kv_import.advance(rig.now)
    assert rig.engine.pool.num_free == rig.engine.pool.num_blocks


def test_nobody_waits_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = warm(ImportRig())

    def away(keys: object) -> int:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "contains_prefix", away)
        patch.setattr(rig.offload, "_read_blocks", away)  # blocks that nobody takes are not read
        rig.admit()
        rig.run()
        for _ in range(3):
            rig.evict_all()
            sequence = rig.admit()
            assert rig.engine.has_work and not rig.kv_import.num_arriving
            rig.run()
            assert is_answered(sequence)
            assert sequence.num_cached_tokens == 0
    rig.evict_all()
    rig.admit()  # finds out that it is back
    rig.run()
    rig.evict_all()
    sequence = rig.admit()
    assert rig.kv_import.num_arriving == 1
    rig.run()
    assert sequence.num_cached_tokens == 16


@pytest.mark.parametrize("how", ["cancelled", "drained"])
def test_who_goes_leaves_no_block_to_be_fetched(how: str) -> None:
    rig = warm(ImportRig())
    rig.fates.calm = False
    sequence = rig.admit()
    if how == "cancelled":
        assert rig.kv_import.cancel(sequence.request_id)
        assert not rig.kv_import.cancel(sequence.request_id)
    else:
        assert rig.kv_import.take_waiting() == [sequence]
    rig.fates.calm = True
    assert not rig.kv_import.advance(rig.now) and not rig.engine.has_work
    assert not rig.tier.stats.num_hits


@pytest.mark.parametrize("change", ["prefix gone", "no room"])
def test_what_changed_meanwhile_means_to_compute(change: str) -> None:
    rig = warm(ImportRig())
    rig.kv_import.admit(new_sequence(PROMPT[:5], BLOCK_SIZE, 1), None, rig.now)
    rig.run()  # the first block is here again
    sequence = rig.admit()
    if change == "prefix gone":
        rig.evict_all()
        taken: list[int] = []
    else:
        taken = rig.engine.pool.allocate(14) or []
    assert not rig.kv_import.advance(rig.now), "it does not go on waiting"
    rig.engine.pool.release(taken)
    rig.run()
    assert is_answered(sequence)


def test_tokens_of_a_moved_request_do_not_count_as_cached_prompt() -> None:
    rig = warm(ImportRig())
    moved = new_sequence(PROMPT[:6], BLOCK_SIZE, 30, output=PROMPT[6:17], stop_ids=frozenset())
    rig.kv_import.admit(moved, None, rig.now)
    rig.run()
    assert moved.num_cached_tokens == 6


def test_blocks_of_another_name_never_come() -> None:
    rig = warm(ImportRig())
    other = (99, *PROMPT[1:])
    sequence = rig.admit(other)
    assert rig.kv_import.num_arriving == 1
    rig.run()
    assert rig.tier.stats.num_misses == 8 and rig.tier.stats.num_hits == 0
    assert is_answered(sequence, other)


def test_blocks_are_there_when_all_ranks_have_loaded_their_parts() -> None:
    ranks = [FakeRank(), FakeRank()]
    rig = warm(ImportRig(others=ranks))
    sequence = rig.admit()
    assert rig.kv_import.advance(rig.now)
    (fetch,) = ranks[0].told
    assert isinstance(fetch, RankFetch)
    assert fetch.names == sequence.block_hashes[:4] and len(fetch.into) == 4
    assert ranks[1].told == ranks[0].told
    rig.engine.check(rig.kv_import.holders())
    ranks[1].end(fetch.number)
    assert rig.kv_import.advance(rig.now) and not rig.engine.has_work
    ranks[0].end(fetch.number)
    rig.run()
    assert sequence.num_cached_tokens == 16
    assert is_answered(sequence)


def test_a_prompt_is_computed_if_a_rank_lacks_its_part_which_is_stored_again() -> None:
    rank = FakeRank()
    rig = warm(ImportRig(others=[rank]))
    sequence = rig.admit()
    assert rig.kv_import.advance(rig.now)
    (fetch,) = rank.told
    assert isinstance(fetch, RankFetch)
    rank.end(fetch.number, "the store has only 3 of 4 blocks left")
    rig.run()
    assert sequence.num_cached_tokens == 0
    assert is_answered(sequence)
    num_stored = rig.tier.stats.num_stored
    rig.evict_all()
    assert rig.tier.stats.num_stored == num_stored + 4


def test_a_rank_whose_store_is_silent_costs_no_more_than_computing() -> None:
    rank = FakeRank()
    rig = warm(ImportRig(others=[rank]))
    began_s, sequence = rig.now, rig.admit()
    assert rig.kv_import.advance(rig.now)
    rig.now = began_s + 8 * SLOW_S  # half of it: the first rank may have taken the other half
    assert rig.kv_import.advance(rig.now) and rig.engine.has_work
    while rig.engine.has_work:
        rig.engine.step()
    assert is_answered(sequence)
    assert rig.engine.pool.num_free < rig.engine.pool.num_blocks, "it may still write to these"
    (fetch,) = rank.told
    assert isinstance(fetch, RankFetch)
    rank.end(fetch.number)
    assert not rig.kv_import.advance(rig.now)
    assert rig.engine.pool.num_free == rig.engine.pool.num_blocks
    rig.engine.check()
