from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.errors import TransferFailed
from disagg.kvtransfer.holds import Holds, issue_ticket
from tests.kvtransfer.memory import Memory


def test_a_release_gives_back_once() -> None:
    holds = Holds()
    holds.hold("t", [3, 4], now=0.0, ttl_s=10.0)
    assert holds.release("t")
    assert not holds.release("t")
    assert holds.collect(0.0) == [(3, 4)]
    assert holds.collect(100.0) == []
    assert (holds.num_released, holds.num_unknown, holds.num_expired) == (1, 1, 0)


def test_expiry_needs_no_message() -> None:
    holds = Holds()
    holds.hold("late", [1], now=0.0, ttl_s=9.0)
    holds.hold("soon", [2], now=0.0, ttl_s=3.0)
    assert holds.collect(2.9) == []
    assert holds.collect(3.0) == [(2,)]
    assert holds.collect(9.0) == [(1,)]
    assert holds.num_expired == 2 and holds.num_holds == 0


def test_a_reader_that_comes_too_late_changes_nothing() -> None:
    holds = Holds()
    holds.hold("t", [1], now=0.0, ttl_s=1.0)
    assert holds.collect(1.0) == [(1,)]
    assert not holds.release("t")
    assert holds.collect(2.0) == []


def test_memory_pressure_breaks_the_oldest_first() -> None:
    holds = Holds()
    holds.hold("a", [1], now=0.0, ttl_s=50.0)
    holds.hold("b", [2], now=1.0, ttl_s=5.0)
    assert holds.break_oldest() == (1,)
    assert holds.break_oldest() == (2,)
    assert holds.break_oldest() is None
    assert holds.num_broken == 2 and holds.collect(99.0) == []


def test_one_too_many_breaks_the_oldest() -> None:
    holds = Holds(max_holds=2)
    for number in range(3):
        holds.hold(f"t{number}", [number], now=0.0, ttl_s=1.0)
    assert holds.num_holds == 2
    assert holds.collect(0.0) == [(0,)]


def test_a_ticket_is_held_once() -> None:
    holds = Holds()
    holds.hold("t", [1], now=0.0, ttl_s=1.0)
    with pytest.raises(TransferFailed, match="held already"):
        holds.hold("t", [2], now=0.0, ttl_s=1.0)
    assert holds.collect(1.0) == [(1,)]


class HoldsMachine(RuleBasedStateMachine):
    """Whatever happens, in whatever order: every held block comes back exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds(max_holds=5)
        self.now = 0.0
        self.given: Counter[int] = Counter()
        self.back: Counter[int] = Counter()
        self.num_tickets = 0

    @rule(num_blocks=st.integers(1, 3), ttl_s=st.floats(0.1, 8.0))
    def hold(self, num_blocks: int, ttl_s: float) -> None:
        blocks = [self.num_tickets * 4 + i for i in range(num_blocks)]
        self.holds.hold(f"t{self.num_tickets}", blocks, self.now, ttl_s)
        self.given.update(blocks)
        self.num_tickets += 1

    @precondition(lambda self: self.num_tickets > 0)
    @rule(which=st.integers(0, 1 << 16))
    def release(self, which: int) -> None:
        self.holds.release(f"t{which % self.num_tickets}")

    @rule(seconds=st.floats(0.0, 3.0))
    def collect(self, seconds: float) -> None:
        self.now += seconds
        for blocks in self.holds.collect(self.now):
            self.back.update(blocks)

    @rule()
    def press(self) -> None:
        self.back.update(self.holds.break_oldest() or ())

    @invariant()
    def nothing_is_lost_or_given_twice(self) -> None:
        assert self.holds.num_holds <= 5
        assert self.back <= self.given and max(self.back.values(), default=1) == 1
        assert self.given.total() - self.back.total() == self.holds.num_blocks

    def teardown(self) -> None:
        self.back.update(block for blocks in self.holds.collect(1e9) for block in blocks)
        assert self.back == self.given and self.holds.num_blocks == 0


TestHoldsMachine = HoldsMachine.TestCase


def test_a_ticket_names_the_process_and_the_content() -> None:
    memory = Memory("w", epoch=9)
    memory.reuse(5)
    ticket = memory.ticket("t", [5, 2])
    assert (ticket.source_id, ticket.epoch, ticket.layout) == ("w", 9, memory.slab.layout)
    assert ticket.generations == (memory.stamps.generations[2] + 1, memory.stamps.generations[2])


@given(st.lists(st.integers(-(2**33), 2**33), max_size=4))
def test_only_blocks_of_the_slab_get_a_ticket(block_ids: list[int]) -> None:
    memory = Memory("w", num_blocks=4)
    good = block_ids and set(block_ids) <= set(range(4)) and len(set(block_ids)) == len(block_ids)
    if good:
        assert memory.ticket("t", block_ids).block_ids == tuple(block_ids)
        return
    with pytest.raises(TransferFailed):
        issue_ticket(
            memory.peer(),
            memory.stamps.generations,
            ticket_id="t",
            num_tokens=1,
            block_ids=block_ids,
        )
