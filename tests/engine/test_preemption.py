"""Sequences that outgrow the cache many times over all end, and no two steps stand still."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from disagg.engine.engine import Engine
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from tests.engine.fake_runner import FakeKV, expected_tokens
from tests.engine.workload import new_engine, new_sequence
from tests.grids import examples

BLOCK_SIZE = 4
NO_STOP: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Growing:
    """A sequence that grows while it runs; one that `arrives` brings the KV of its prompt."""

    num_prompt: int
    num_output: int
    arrives: bool = False
    priority: int = 0

    def sequence(self, number: int) -> Sequence:
        prompt = tuple(4 + (7 * number + i) % 90 for i in range(self.num_prompt))
        output = tuple(expected_tokens(prompt, 1)) if self.arrives else ()
        return new_sequence(
            prompt,
            BLOCK_SIZE,
            self.num_output,
            output=output,
            stop_ids=NO_STOP,
            priority=self.priority,
        )

    @property
    def num_blocks(self) -> int:
        return -(-(self.num_prompt + self.num_output) // BLOCK_SIZE)


def play(num_blocks: int, growing: list[Growing], max_num_seqs: int) -> tuple[Engine, int]:
    """Run all to their ends. Returns the engine and the number of tokens that were computed."""
    engine, kv = new_engine(num_blocks, BLOCK_SIZE, max_num_seqs=max_num_seqs)
    sequences = [each.sequence(number) for number, each in enumerate(growing)]
    arriving = []
    for sequence, each in zip(sequences, growing, strict=True):
        engine.scheduler.number(sequence)
        if each.arrives:
            arriving.append((sequence, each.num_prompt))
        else:
            engine.submit(sequence)
    arriving.sort(key=lambda each: each[0].arrival)
    num_left, num_idle = len(sequences), 0
    while num_left:
        while arriving and _arrive(engine, kv, *arriving[0]):
            del arriving[0]
        num_left -= sum(event.is_last for event in engine.step())
        engine.check()
        num_idle = 0 if engine.last_plan.sequences else num_idle + 1
        assert num_idle < 2, "two steps without work: nobody can go on"
    for sequence, each in zip(sequences, growing, strict=True):
        prompt = tuple(sequence.tokens[: each.num_prompt])
        assert sequence.tokens[each.num_prompt :] == expected_tokens(prompt, each.num_output)
    assert engine.pool.num_free == engine.pool.num_blocks
    return engine, engine.runner.num_computed  # type: ignore[attr-defined]


def _arrive(engine: Engine, kv: FakeKV, sequence: Sequence, num_computed: int) -> bool:
    block_ids = engine.reserve(-(-num_computed // BLOCK_SIZE), sequence.arrival)
    if block_ids is None:
        return False
    sequence.block_ids, sequence.num_computed = block_ids, num_computed
    kv.compute(sequence, 0, num_computed)
    engine.join(sequence)
    return True


def test_twenty_sequences_that_need_thirty_times_the_cache() -> None:
    """A frozen node's picture: all begin while there is room, and all go on growing."""
    growing = [Growing(num_prompt=3, num_output=45) for _ in range(20)]
    assert sum(each.num_blocks for each in growing) == 20 * 12
    engine, num_computed = play(12, growing, max_num_seqs=8)
    assert engine.scheduler.num_preempted > 0
    num_tokens = sum(each.num_prompt + each.num_output - 1 for each in growing)
    assert num_computed < 2 * num_tokens, "most of the time went into computing again"


def test_one_sequence_as_large_as_the_cache_is_not_kept_out() -> None:
    large, small = Growing(40, 8), Growing(3, 20)
    engine, _ = play(12, [small, small, large, small, small, small], max_num_seqs=4)
    assert engine.scheduler.num_preempted > 0


@pytest.fixture
def victims(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Everybody who was preempted; none before somebody who is less urgent, or as urgent and later.

    The order does not change while sequences are here, so whoever is first in it always goes on.
    """
    seen: list[Sequence] = []
    preempt = Scheduler._preempt_latest

    def checked(self: Scheduler) -> Sequence:
        owners = [each for each in self.sequences() if each.block_ids]
        victim = preempt(self)
        assert victim is max(owners, key=lambda each: each.arrival)
        seen.append(victim)
        return victim

    monkeypatch.setattr(Scheduler, "_preempt_latest", checked)
    return seen


@examples(33, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_blocks=st.integers(3, 10),
    growing=st.lists(
        st.builds(
            Growing, st.integers(1, 12), st.integers(2, 30), st.booleans(), st.integers(-1, 1)
        ),
        min_size=2,
        max_size=12,
    ),
    max_num_seqs=st.integers(1, 6),
)
def test_any_mixture_ends(
    victims: list[Sequence], num_blocks: int, growing: list[Growing], max_num_seqs: int
) -> None:
    fitting = [each for each in growing if each.num_blocks <= num_blocks]
    if fitting:
        play(num_blocks, fitting, max_num_seqs)


def test_the_least_urgent_gives_way_even_if_it_came_first(victims: list[Sequence]) -> None:
    engine, _ = new_engine(8, BLOCK_SIZE)
    less, more = Growing(8, 16, priority=1).sequence(0), Growing(8, 16).sequence(1)
    engine.submit(less)
    engine.step()
    engine.submit(more)
    ends = [event.sequence for _ in range(60) for event in engine.step() if event.is_last]
    assert ends == [more, less]
    assert victims and {*victims} == {less}
