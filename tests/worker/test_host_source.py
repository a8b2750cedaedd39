"""Evicted prefixes come back from host memory if that is quicker. Then the next source is asked."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest

from disagg.engine.sched.sequence import Sequence
from disagg.store.cold_tier import Block, ColdTier
from disagg.store.host_tier import HostTier
from disagg.worker.tiers import KVOffload
from tests.engine.fake_runner import expected_tokens
from tests.worker.evicting import (
    PROMPT,
    SLOW_S,
    Rig,
    check_an_evicted_prefix_is_loaded_and_not_computed,
    is_answered,
)
from tests.worker.fates import SteppedCopier


class NextTier(ColdTier):
    """Takes nothing, and notes what it was offered."""

    def __init__(self) -> None:
        self.offered: list[bytes] = []

    def offer(
        self,
        blocks: SequenceOf[tuple[int, bytes]],
        read: Callable[[list[int]], SequenceOf[Block]],
        *,
        in_host: bool = False,
    ) -> int:
        self.offered += [name for _, name in blocks]
        return 0


class ImportRig(Rig):
    """An engine with host memory behind it. Copies end while `fates.calm`."""

    def __init__(self, num_blocks: int = 16, token_s: float = SLOW_S, num_slots: int = 16) -> None:
        super().__init__(num_blocks)
        copier = SteppedCopier(self.fates, self.kv, num_slots)
        generations = self.engine.pool.generations
        self.tier = HostTier(copier, num_slots, self.kv.block_nbytes, generations)
        self.passed: list[Sequence] = []
        self.import_from(self.tier, token_s)
        self.next_tier = NextTier()
        self.offload = KVOffload(self.engine, self.tier, self.next_tier, self.kv.read_blocks)
        self._submit = self.engine.submit
        self.engine.submit = self.submit  # type: ignore[method-assign]

    def submit(self, sequence: Sequence) -> None:
        self.passed.append(sequence)
        self._submit(sequence)

    def step(self) -> None:
        self.kv_import.advance(self.now)
        self.engine.step()
        self.offload.save(self.engine.pool.take_events(), ())
        self.check()

    def run(self) -> None:
        while self.kv_import.num_arriving or self.engine.has_work or self.tier.num_under_way:
            self.step()

    def check(self) -> None:
        self.tier.check()
        super().check()


def warm(rig: ImportRig) -> ImportRig:
    """Let the prompt be computed, copied to the host, and evicted."""
    rig.admit()
    rig.run()
    rig.evict_all()
    assert len(rig.tier.hashes()) == 5, "four of the prompt, one of the answer"
    assert not rig.next_tier.offered, "all of it is in host memory"
    rig.forget_num_computed()
    return rig


def test_an_evicted_prefix_is_loaded_and_not_computed() -> None:
    check_an_evicted_prefix_is_loaded_and_not_computed(warm(ImportRig()))


def test_others_step_while_blocks_are_on_their_way() -> None:
    rig = warm(ImportRig(num_blocks=24))
    other = rig.admit(tuple(range(50, 60)), max_tokens=20)
    rig.step()
    rig.fates.calm = False
    sequence = rig.admit()
    for _ in range(5):
        rig.step()
    assert len(other.tokens) > 14 and len(sequence.tokens) == len(PROMPT)
    assert rig.kv_import.num_arriving == 1 and rig.num_computed < 20
    rig.fates.calm = True
    rig.run()
    assert is_answered(sequence)
    assert sequence.num_cached_tokens == 16


def test_only_what_is_not_here_is_loaded() -> None:
    rig = warm(ImportRig())
    rig.admit(PROMPT[:9], max_tokens=1)  # brings two blocks back
    rig.run()
    assert rig.tier.counts().num_loaded == 2
    sequence = rig.admit()
    rig.run()
    assert rig.tier.counts().num_loaded == 4 and sequence.num_cached_tokens == 16
    assert is_answered(sequence)


def test_two_that_want_the_same_load_it_once() -> None:
    rig = warm(ImportRig(num_blocks=24))
    both = [rig.admit(), rig.admit()]
    rig.run()
    for sequence in both:
        assert is_answered(sequence)
        assert sequence.num_cached_tokens == 16
    assert rig.tier.counts().num_loaded == 4


def test_blocks_that_somebody_waits_for_are_evicted_last() -> None:
    rig = warm(ImportRig(num_slots=6))
    rig.tier.save([(0, b"newer than the prompt's")])
    rig.tier.poll()
    sequence = rig.admit()
    rig.tier.save([(1, b"the newest"), (2, b"of all")])
    rig.tier.poll()
    assert rig.tier.match(sequence.block_hashes) == 4


def test_host_memory_is_left_alone_where_computing_is_quicker() -> None:
    rig = warm(ImportRig(token_s=1e-9))
    rig.admit()
    assert rig.engine.has_work and not rig.kv_import.num_arriving
    rig.run()
    assert not rig.tier.counts().num_loaded


def test_a_copy_that_does_not_end_costs_no_more_than_computing() -> None:
    rig = warm(ImportRig())
    rig.fates.calm = False
    sequence = rig.admit()
    rig.kv_import.advance(rig.now)
    rig.now = 16 * SLOW_S - 0.01
    rig.kv_import.advance(rig.now)
    assert not rig.engine.has_work
    rig.now = 16 * SLOW_S
    rig.kv_import.advance(rig.now)
    assert rig.engine.has_work and not rig.kv_import.num_arriving
    while rig.engine.has_work:
        rig.step()
    assert is_answered(sequence)
    assert sequence.num_cached_tokens == 0
    assert rig.engine.pool.num_free < rig.engine.pool.num_blocks, "the copier may write them"
    rig.fates.calm = True
    rig.run()
    assert rig.engine.pool.num_free == rig.engine.pool.num_blocks


def test_a_cancelled_load_gives_its_blocks_back_when_it_ends() -> None:
    rig = warm(ImportRig())
    rig.fates.calm = False
    sequence = rig.admit()
    assert rig.kv_import.cancel(sequence.request_id)
    sequence = rig.admit()
    rig.kv_import.advance(rig.now)
    assert rig.kv_import.cancel(sequence.request_id) and not rig.kv_import.cancel(
        sequence.request_id
    )
    assert rig.engine.pool.num_free == 12 and not rig.kv_import.num_arriving
    rig.fates.calm = True
    rig.run()
    assert not rig.engine.has_work and rig.engine.pool.num_free == 16
    assert len(rig.engine.pool.match(sequence.block_hashes)) == 4, "good for the next one"


def test_who_finds_no_room_waits_for_who_runs() -> None:
    rig = warm(ImportRig(num_blocks=8))
    other = rig.admit(tuple(range(50, 70)), max_tokens=6)
    rig.step()
    sequence = rig.admit()
    rig.step()
    assert rig.kv_import.num_arriving == 1 and len(rig.passed) == 2
    rig.run()
    assert other.tokens[20:] == expected_tokens(tuple(range(50, 70)), 6)
    assert is_answered(sequence)
    assert sequence.num_cached_tokens == 16


@pytest.mark.parametrize("change", ["gone from host memory", "no room, and nobody runs"])
def test_what_changed_meanwhile_means_the_next_door(change: str) -> None:
    rig = warm(ImportRig(num_slots=5))
    sequence = rig.admit()
    if change == "gone from host memory":
        rig.tier.save([(i, bytes([i])) for i in range(5)])
        taken: list[int] = []
    else:
        taken = rig.engine.pool.allocate(14) or []
    rig.kv_import.advance(rig.now)
    assert rig.passed[-1] is sequence and not rig.kv_import.num_arriving
    rig.engine.pool.release(taken)
    rig.run()
    assert is_answered(sequence)


def test_what_could_not_be_copied_in_time_is_for_the_next_tier() -> None:
    rig = ImportRig()
    rig.fates.calm = False
    rig.admit()
    while rig.engine.has_work:
        rig.step()
    rig.evict_all()
    assert len(rig.next_tier.offered) == 5
    rig.fates.calm = True
    rig.run()
    assert rig.tier.counts().num_torn == 5 and not rig.tier.hashes()


def test_a_drain_takes_all_that_wait() -> None:
    """One whose blocks are on their way, and one that waits for the same blocks."""
    rig = warm(ImportRig())
    rig.fates.calm = False
    both = {rig.admit(), rig.admit()}
    rig.kv_import.advance(rig.now)
    assert rig.tier.num_under_way == 1 and rig.kv_import.num_arriving == 2
    assert set(rig.kv_import.take_waiting()) == both
    assert not rig.kv_import.num_arriving and not rig.kv_import.take_waiting()
    rig.fates.calm = True
    rig.run()
    assert len(rig.passed) == 1, "it was let in here all the same"
    assert rig.engine.pool.num_free == rig.engine.pool.num_blocks
