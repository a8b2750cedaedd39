"""Evicted prefixes come back from host memory if that is quicker, and then the next door opens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest

from disagg.decode_worker.kv_import import KVImport
from disagg.decode_worker.store_source import HostLookup
from disagg.engine.sched.sequence import Sequence
from disagg.store.cold_tier import ColdTier
from disagg.store.host_tier import HostTier
from disagg.store.store_thread import Block
from disagg.worker.offload import KVOffload
from tests.decode_worker.evicting import BLOCK_SIZE, PROMPT, SLOW_S, Rig
from tests.decode_worker.test_kv_import import FakeTransport
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_sequence
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


class Door(Rig):
    """An engine with host memory behind it. Copies end while `fates.calm`."""

    def __init__(self, num_blocks: int = 16, token_s: float = SLOW_S, num_slots: int = 16) -> None:
        super().__init__(num_blocks)
        copier = SteppedCopier(self.fates, self.kv, num_slots)
        generations = self.engine.pool.generations
        self.tier = HostTier(copier, num_slots, self.kv.block_nbytes, generations)
        self.passed: list[Sequence] = []
        self.kv_import = KVImport(
            self.engine,
            FakeTransport(),
            lambda source_id, num_blocks: 0.0,
            [HostLookup(self.tier)],
            lambda: lambda num_new, num_before: token_s * num_new,
        )
        self.next_tier = NextTier()
        self.offload = KVOffload(self.engine, self.tier, self.next_tier, self.kv.read_blocks)
        self._submit = self.engine.submit
        self.engine.submit = self.submit  # type: ignore[method-assign]

    def submit(self, sequence: Sequence) -> None:
        self.passed.append(sequence)
        self._submit(sequence)

    def admit(self, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 5) -> Sequence:
        sequence = new_sequence(prompt, BLOCK_SIZE, max_tokens, stop_ids=frozenset())
        self.kv_import.admit(sequence, None, self.now)
        self.check()
        return sequence

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
        self.engine.check(self.kv_import.holders())


def warm(door: Door) -> None:
    """Let the prompt be computed, copied to the host, and evicted."""
    door.admit()
    door.run()
    door.evict_all()
    assert len(door.tier.hashes()) == 5, "four of the prompt, one of the answer"
    assert not door.next_tier.offered, "all of it is in host memory"
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


def test_others_step_while_blocks_are_on_their_way() -> None:
    door = Door(num_blocks=24)
    warm(door)
    other = door.admit(tuple(range(50, 60)), max_tokens=20)
    door.step()
    door.fates.calm = False
    sequence = door.admit()
    for _ in range(5):
        door.step()
    assert len(other.tokens) > 14 and len(sequence.tokens) == len(PROMPT)
    assert door.kv_import.num_arriving == 1 and door.num_computed < 20
    door.fates.calm = True
    door.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert sequence.num_cached_tokens == 16


def test_only_what_is_not_here_is_loaded() -> None:
    door = Door()
    warm(door)
    door.admit(PROMPT[:9], max_tokens=1)  # brings two blocks back
    door.run()
    assert door.tier.counts().num_loaded == 2
    sequence = door.admit()
    door.run()
    assert door.tier.counts().num_loaded == 4 and sequence.num_cached_tokens == 16
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)


def test_two_that_want_the_same_load_it_once() -> None:
    door = Door(num_blocks=24)
    warm(door)
    both = [door.admit(), door.admit()]
    door.run()
    for sequence in both:
        assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
        assert sequence.num_cached_tokens == 16
    assert door.tier.counts().num_loaded == 4


def test_blocks_that_somebody_waits_for_are_evicted_last() -> None:
    door = Door(num_slots=6)
    warm(door)
    door.tier.save([(0, b"newer than the prompt's")])
    door.tier.poll()
    sequence = door.admit()
    door.tier.save([(1, b"the newest"), (2, b"of all")])
    door.tier.poll()
    assert door.tier.match(sequence.block_hashes) == 4


def test_host_memory_is_left_alone_where_computing_is_quicker() -> None:
    door = Door(token_s=1e-9)
    warm(door)
    door.admit()
    assert door.engine.has_work and not door.kv_import.num_arriving
    door.run()
    assert not door.tier.counts().num_loaded


def test_a_copy_that_does_not_end_costs_no_more_than_computing() -> None:
    door = Door()
    warm(door)
    door.fates.calm = False
    sequence = door.admit()
    door.kv_import.advance(door.now)
    door.now = 16 * SLOW_S - 0.01
    door.kv_import.advance(door.now)
    assert not door.engine.has_work
    door.now = 16 * SLOW_S
    door.kv_import.advance(door.now)
    assert door.engine.has_work and not door.kv_import.num_arriving
    while door.engine.has_work:
        door.step()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert sequence.num_cached_tokens == 0
    assert door.engine.pool.num_free < door.engine.pool.num_blocks, "the copier may write them"
    door.fates.calm = True
    door.run()
    assert door.engine.pool.num_free == door.engine.pool.num_blocks


def test_a_cancelled_load_gives_its_blocks_back_when_it_ends() -> None:
    door = Door()
    warm(door)
    door.fates.calm = False
    sequence = door.admit()
    assert door.kv_import.cancel(sequence.request_id)
    sequence = door.admit()
    door.kv_import.advance(door.now)
    assert door.kv_import.cancel(sequence.request_id) and not door.kv_import.cancel(
        sequence.request_id
    )
    assert door.engine.pool.num_free == 12 and not door.kv_import.num_arriving
    door.fates.calm = True
    door.run()
    assert not door.engine.has_work and door.engine.pool.num_free == 16
    assert len(door.engine.pool.match(sequence.block_hashes)) == 4, "good for the next one"


def test_who_finds_no_room_waits_for_who_runs() -> None:
    door = Door(num_blocks=8)
    warm(door)
    other = door.admit(tuple(range(50, 70)), max_tokens=6)
    door.step()
    sequence = door.admit()
    door.step()
    assert door.kv_import.num_arriving == 1 and len(door.passed) == 2
    door.run()
    assert other.tokens[20:] == expected_tokens(tuple(range(50, 70)), 6)
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert sequence.num_cached_tokens == 16


@pytest.mark.parametrize("change", ["gone from host memory", "no room, and nobody runs"])
def test_what_changed_meanwhile_means_the_next_door(change: str) -> None:
    door = Door(num_slots=5)
    warm(door)
    sequence = door.admit()
    if change == "gone from host memory":
        door.tier.save([(i, bytes([i])) for i in range(5)])
        taken: list[int] = []
    else:
        taken = door.engine.pool.allocate(14) or []
    door.kv_import.advance(door.now)
    assert door.passed[-1] is sequence and not door.kv_import.num_arriving
    door.engine.pool.release(taken)
    door.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)


def test_what_could_not_be_copied_in_time_is_for_the_next_tier() -> None:
    door = Door()
    door.fates.calm = False
    door.admit()
    while door.engine.has_work:
        door.step()
    door.evict_all()
    assert len(door.next_tier.offered) == 5
    door.fates.calm = True
    door.run()
    assert door.tier.counts().num_torn == 5 and not door.tier.hashes()


def test_a_drain_takes_all_that_wait() -> None:
    """One whose blocks are on their way, and one that waits for the same blocks."""
    door = Door()
    warm(door)
    door.fates.calm = False
    both = {door.admit(), door.admit()}
    door.kv_import.advance(door.now)
    assert door.tier.num_under_way == 1 and door.kv_import.num_arriving == 2
    assert set(door.kv_import.take_waiting()) == both
    assert not door.kv_import.num_arriving and not door.kv_import.take_waiting()
    door.fates.calm = True
    door.run()
    assert len(door.passed) == 1, "it was let in here all the same"
    assert door.engine.pool.num_free == door.engine.pool.num_blocks
