"""Evicted prefixes come back from host memory or the store if that is quicker, and nobody waits for
either in vain."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import NamedTuple, Self

import pytest

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.errors import ContextLengthExceeded, DeadlineExceeded, InvalidLogits, Unavailable
from disagg.kv_groups import STATE, Window
from disagg.rank_messages import RankFetch
from disagg.store.cold_tier import Block, ColdTier
from disagg.store.host_tier import HostTier
from disagg.worker.kv_import import KVImport, KVTier
from disagg.worker.ranked import RankedFetches
from disagg.worker.tiers import KVOffload, StoreLookup
from tests.engine.device.test_sampler import new_sequence as sampled_sequence
from tests.engine.device.test_sampler import params
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_engine, new_sequence, prompt
from tests.store.fake_store import FakeStore
from tests.store.test_host_tier import Tier, names
from tests.worker.fake_ranks import FakeRank, tasks_of
from tests.worker.fates import Fates, SteppedCopier
from tests.worker.members import new_tier
from tests.worker.test_kv_import import FakeTransport

BLOCK_SIZE = 4
PROMPT = tuple(range(4, 22))  # four full blocks and a half
SLOW_S = 5.0  # to compute one token


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


class Counts(NamedTuple):
    """Blocks in the tier, that were loaded, that were looked up, and that are being copied."""

    num_kept: int
    num_loaded: int
    num_asked: int
    num_under_way: int


class Rig:
    """An engine with a tier behind it, which works while `fates.calm`.

    passed: what was submitted to the engine.
    """

    offload: KVOffload

    windows: tuple[Window, ...] = (None,)

    def __init__(self, num_blocks: int, token_s: float) -> None:
        self.engine, self.kv = new_engine(num_blocks, BLOCK_SIZE, windows=self.windows)
        self.fates = Fates(b"\x01")  # when not calm, no copy ends and no store answers
        self.fates.calm = True
        self.now = 0.0
        self.kv_import = KVImport(
            self.engine,
            FakeTransport(),
            lambda source_id, num_blocks: 0.0,
            [self.build()],
            lambda: lambda num_new, num_before: token_s * num_new,
        )
        self.passed: list[Sequence] = []
        self._submit = self.engine.submit
        self.engine.submit = self.submit  # type: ignore[method-assign]

    def build(self) -> KVTier:
        raise NotImplementedError

    def counts(self) -> Counts:
        raise NotImplementedError

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
        while self.kv_import.num_arriving or self.engine.has_work or self.counts().num_under_way:
            self.step()

    def check(self) -> None:
        self.engine.check(self.kv_import.holders())

    def evict_all(self) -> None:
        """Give every block to somebody else, who writes over it and leaves."""
        blocks = self.engine.reserve(self.engine.pool.num_blocks)
        assert blocks is not None
        for block_id in blocks:
            self.kv.write_block(block_id, b"\xdd" * self.kv.block_nbytes)
        self.engine.pool.release(blocks)

    def warm(self) -> Self:
        """Let the prompt be computed, wander into the tier, and be evicted. Returns the rig."""
        self.admit()
        self.run()
        self.evict_all()
        assert self.counts().num_kept == 5, "four of the prompt, one of the answer"
        self.engine.runner.num_computed = 0  # type: ignore[attr-defined]
        return self

    @property
    def num_computed(self) -> int:
        count: int = self.engine.runner.num_computed  # type: ignore[attr-defined]
        return count

    @property
    def is_free(self) -> bool:
        """All blocks of the cache are."""
        return self.engine.pool.num_free == self.engine.pool.num_blocks


class HostRig(Rig):
    """With host memory behind it."""

    def __init__(self, num_blocks: int = 16, token_s: float = SLOW_S, num_slots: int = 16) -> None:
        self._num_slots = num_slots
        super().__init__(num_blocks, token_s)

    def build(self) -> KVTier:
        copier = SteppedCopier(self.fates, self.kv, self._num_slots)
        generations = self.engine.pool.generations
        self.tier = HostTier(copier, self._num_slots, self.kv.block_nbytes, generations)
        self.next_tier = NextTier()
        self.offload = KVOffload(self.engine, self.tier, self.next_tier, self.kv.read_blocks)
        return self.tier

    def warm(self) -> Self:
        super().warm()
        assert not self.next_tier.offered, "all of it is in host memory"
        return self

    def check(self) -> None:
        self.tier.check()
        super().check()

    def counts(self) -> Counts:
        num_loaded = self.tier.counts().num_loaded
        num_kept = len(self.tier.hashes())
        return Counts(num_kept, num_loaded, num_loaded, self.tier.num_under_way)


class StoreRig(Rig):
    """With a store behind it.

    Args:
        others: other ranks.
    """

    def __init__(
        self, num_blocks: int = 16, token_s: float = SLOW_S, others: SequenceOf[FakeRank] = ()
    ) -> None:
        self._others = others
        super().__init__(num_blocks, token_s)

    def build(self) -> KVTier:
        self.store = FakeStore(1 << 20)
        self.tier = new_tier(self.fates, self.store, self.kv.block_nbytes, lambda: self.now)
        self.offload = KVOffload(self.engine, None, self.tier, self.kv.read_blocks)
        fetches = RankedFetches(tasks_of(self._others)) if self._others else None
        return StoreLookup(self.tier, self.kv.write_block, fetches)

    def evict_all(self) -> None:
        super().evict_all()
        self.tier.poll()

    def counts(self) -> Counts:
        stats, num_kept = self.tier.stats, self.store.nbytes // self.kv.block_nbytes
        return Counts(num_kept, stats.num_hits, stats.num_hits + stats.num_misses, 0)


class StateRig(StoreRig):
    windows = (None, STATE, STATE)


def answer(sequence: Sequence, prompt: tuple[int, ...] = PROMPT) -> bool:
    """Whether it has the right answer."""
    return sequence.tokens[len(prompt) :] == expected_tokens(prompt, 5)


@pytest.fixture(params=[HostRig, StoreRig])
def new_rig(request: pytest.FixtureRequest) -> Callable[..., Rig]:
    made: Callable[..., Rig] = request.param
    return made


def test_an_evicted_prefix_is_loaded_and_not_computed(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig().warm()
    sequence = rig.admit()
    assert rig.kv_import.num_arriving == 1 and not rig.engine.has_work
    rig.run()
    assert answer(sequence) and sequence.num_cached_tokens == 16
    assert rig.num_computed == len(PROMPT) - 16 + 4
    assert rig.is_free


def test_only_what_is_not_here_is_loaded(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig().warm()
    rig.admit(PROMPT[:9], max_tokens=1)  # brings two blocks back
    rig.run()
    assert rig.counts().num_loaded == 2
    sequence = rig.admit()
    rig.run()
    assert rig.counts().num_loaded == 4
    assert answer(sequence) and sequence.num_cached_tokens == 16


def test_a_tier_is_left_alone_where_computing_is_quicker(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig(token_s=1e-9).warm()
    rig.admit()
    assert rig.engine.has_work and not rig.kv_import.num_arriving
    rig.run()
    assert not rig.counts().num_asked


def test_a_silent_tier_costs_no_more_than_computing(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig().warm()
    rig.fates.calm = False
    sequence = rig.admit()
    rig.kv_import.advance(rig.now)
    rig.now = 16 * SLOW_S - 0.01
    assert rig.kv_import.advance(rig.now) and not rig.engine.has_work
    rig.now = 16 * SLOW_S
    rig.kv_import.advance(rig.now)
    assert rig.engine.has_work and not rig.kv_import.num_arriving
    while rig.engine.has_work:
        rig.step()
    assert answer(sequence) and sequence.num_cached_tokens == 0
    assert rig.is_free == isinstance(rig, StoreRig), "the copier may still write to blocks"
    rig.fates.calm = True  # what comes now is nobody's
    rig.run()
    assert not rig.kv_import.advance(rig.now) and rig.is_free


def test_a_refusal_is_raised_at_once_or_reported_later(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig(token_s=1e-9)
    rig.engine.scheduler.max_model_len = 10
    with pytest.raises(ContextLengthExceeded):
        rig.admit()
    rig = new_rig().warm()
    rig.engine.scheduler.max_model_len = 10
    rig.admit()
    assert rig.kv_import.num_arriving == 1
    while rig.kv_import.num_arriving:
        rig.kv_import.advance(rig.now)
    (event,) = rig.engine.step()
    assert isinstance(event.error, ContextLengthExceeded) and rig.is_free


def test_others_step_while_blocks_are_on_their_way() -> None:
    rig = HostRig(num_blocks=24).warm()
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
    assert answer(sequence) and sequence.num_cached_tokens == 16


def test_two_that_want_the_same_load_it_once() -> None:
    rig = HostRig(num_blocks=24).warm()
    both = [rig.admit(), rig.admit()]
    rig.run()
    for sequence in both:
        assert answer(sequence)
        assert sequence.num_cached_tokens == 16
    assert rig.tier.counts().num_loaded == 4


def test_blocks_that_somebody_waits_for_are_evicted_last() -> None:
    rig = HostRig(num_slots=6).warm()
    rig.tier.save([(0, b"newer than the prompt's")])
    rig.tier.poll()
    sequence = rig.admit()
    rig.tier.save([(1, b"the newest"), (2, b"of all")])
    rig.tier.poll()
    assert rig.tier.match(sequence.block_hashes) == 4


def test_a_cancelled_load_gives_its_blocks_back_when_it_ends() -> None:
    rig = HostRig().warm()
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
    rig = HostRig(num_blocks=8).warm()
    other = rig.admit(tuple(range(50, 70)), max_tokens=6)
    rig.step()
    sequence = rig.admit()
    rig.step()
    assert rig.kv_import.num_arriving == 1 and len(rig.passed) == 2
    rig.run()
    assert other.tokens[20:] == expected_tokens(tuple(range(50, 70)), 6)
    assert answer(sequence) and sequence.num_cached_tokens == 16


@pytest.mark.parametrize("change", ["gone from host memory", "no room, and nobody runs"])
def test_what_changed_meanwhile_means_the_next_door(change: str) -> None:
    rig = HostRig(num_slots=5).warm()
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
    assert answer(sequence)


def test_what_could_not_be_copied_in_time_is_for_the_next_tier() -> None:
    rig = HostRig()
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
    rig = HostRig().warm()
    rig.fates.calm = False
    both = {rig.admit(), rig.admit()}
    rig.kv_import.advance(rig.now)
    assert rig.tier.num_under_way == 1 and rig.kv_import.num_arriving == 2
    assert set(rig.kv_import.take_waiting()) == both
    assert not rig.kv_import.num_arriving and not rig.kv_import.take_waiting()
    rig.fates.calm = True
    rig.run()
    assert len(rig.passed) == 1, "it was let in here all the same"
    assert rig.is_free


def test_nobody_waits_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = StoreRig().warm()

    def away(keys: object) -> int:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "contains", away)
        patch.setattr(rig.offload, "_read_blocks", away)  # blocks that nobody takes are not read
        rig.admit()
        rig.run()
        for _ in range(3):
            rig.evict_all()
            sequence = rig.admit()
            assert rig.engine.has_work and not rig.kv_import.num_arriving
            rig.run()
            assert answer(sequence)
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
    rig = StoreRig().warm()
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
    rig = StoreRig().warm()
    rig.admit(PROMPT[:5], max_tokens=1)
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
    assert answer(sequence)


def test_blocks_are_there_when_all_ranks_have_loaded_their_parts() -> None:
    ranks = [FakeRank(), FakeRank()]
    rig = StoreRig(others=ranks).warm()
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
    assert answer(sequence)


def test_a_prompt_is_computed_if_a_rank_lacks_its_part_which_is_stored_again() -> None:
    rank = FakeRank()
    rig = StoreRig(others=[rank]).warm()
    sequence = rig.admit()
    assert rig.kv_import.advance(rig.now)
    (fetch,) = rank.told
    assert isinstance(fetch, RankFetch)
    rank.end(fetch.number, "the store has only 3 of 4 blocks left")
    rig.run()
    assert sequence.num_cached_tokens == 0
    assert answer(sequence)
    num_stored = rig.tier.stats.num_stored
    rig.evict_all()
    assert rig.tier.stats.num_stored == num_stored + 4


def test_a_rank_whose_store_is_silent_costs_no_more_than_computing() -> None:
    rank = FakeRank()
    rig = StoreRig(others=[rank]).warm()
    began_s, sequence = rig.now, rig.admit()
    assert rig.kv_import.advance(rig.now)
    rig.now = began_s + 8 * SLOW_S  # half of it: the first rank may have taken the other half
    assert rig.kv_import.advance(rig.now) and rig.engine.has_work
    while rig.engine.has_work:
        rig.engine.step()
    assert answer(sequence)
    assert not rig.is_free, "it may still write to these"
    (fetch,) = rank.told
    assert isinstance(fetch, RankFetch)
    rank.end(fetch.number)
    assert not rig.kv_import.advance(rig.now)
    assert rig.is_free
    rig.engine.check()


def test_blocks_of_a_request_with_invalid_logits_are_forgotten() -> None:
    """They may be the reason, and the next request with this prefix would load them."""
    fixture = Tier(8)
    fixture.save(b"abcxy")
    engine = SimpleNamespace(pool=BlockPool(1, 4, [0]))
    offload = KVOffload(engine, fixture.tier, None, lambda block_ids: [])  # type: ignore[arg-type]

    def with_blocks(text: bytes) -> Sequence:
        sequence = sampled_sequence(params())
        sequence.block_hashes = names(text)
        return sequence

    broken = TokenEvent(with_blocks(b"abc"), error=InvalidLogits("NaN"))
    offload.save((), [broken, TokenEvent(with_blocks(b"xy"), error=DeadlineExceeded("late"))])
    assert fixture.tier.match(names(b"abc")) == 0 and fixture.tier.match(names(b"xy")) == 2


@pytest.mark.parametrize("num_shared", [43, 30, 13])
def test_of_recurrent_states_the_last_one_in_the_store_counts(num_shared: int) -> None:
    """Rows of KV behind it are of no use, and are not loaded."""
    rig = StateRig(60)
    rig.engine.scheduler.step_budget.most = 16
    first = rig.admit(prompt(40), max_tokens=5)  # states after 16, 32, 36, 40 and 44
    rig.run()
    rig.evict_all()
    rig.engine.runner.num_computed = 0  # type: ignore[attr-defined]
    tokens = (*first.tokens[:num_shared], 97, 96)
    sequence = rig.admit(tokens)
    rig.run()
    num_found = max(each for each in (0, 16, 32, 36, 40, 44) if each <= num_shared)
    assert sequence.num_cached_tokens == num_found
    assert rig.counts().num_loaded == num_found // 4 + 2 * (num_found > 0)
    assert sequence.tokens[len(tokens) :] == expected_tokens(tokens, 5, windows=rig.windows)


def test_a_recurrent_state_is_saved_also_if_its_row_was_cached_before() -> None:
    engine, _ = new_engine(60, 4, windows=(None, STATE, STATE))
    fixture = Tier(60, 60)
    offload = KVOffload(engine, fixture.tier, None, lambda block_ids: [])
    for length in (14, 9):  # the first has its last whole row after 12 tokens, and no state at 8
        sequence = new_sequence(prompt(length), 4, 1, stop_ids=frozenset())
        engine.submit(sequence)
        while engine.has_work:
            engine.step()
            offload.save(engine.pool.take_events(), ())
        fixture.tier.poll()
        states = engine.pool.groups.state_names(sequence.block_hashes[1])
        assert [each in fixture.tier for each in states] == [length == 9] * 2
