"""The pool: what is findable, what is handed out, and that generations tell."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.engine.sched.block_pool import BlockPool
from disagg.messages import KVEvent
from tests.grids import examples


def new_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, 4, array("Q", [7] * num_blocks))


def held(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def names(num_names: int) -> list[bytes]:
    return [bytes([i]) * 16 for i in range(num_names)]


def test_published_blocks_are_found_as_a_leading_run() -> None:
    pool = new_pool(8)
    a, b, c, d = names(4)
    block_ids = held(pool, 3)
    for block_id, name in zip(block_ids, (a, b, d), strict=True):
        pool.publish(block_id, name)
    assert pool.match([a, b, c, d]) == block_ids[:2]
    assert pool.match([c, a]) == []
    assert set(pool.hashes()) == {a, b, d}


def test_idle_blocks_come_back_with_their_content_and_free_ones_do_not() -> None:
    pool = new_pool(4)
    named, unnamed = held(pool, 2)
    pool.publish(named, names(1)[0])
    before = pool.generations[named]
    pool.release([named, unnamed])
    assert pool.num_free == 4
    pool.acquire([named])
    assert pool.generations[named] == before, "nothing was written, so tickets stay good"
    with pytest.raises(ValueError, match="free"):
        pool.acquire([unnamed])
    pool.check([[named]])


def test_generations_grow_before_a_block_is_handed_out_again() -> None:
    pool = new_pool(2)
    first = held(pool, 2)
    stamps = list(pool.generations)
    pool.release(first)
    assert list(pool.generations) == stamps, "released content is intact until the next use"
    for block_id in held(pool, 2):
        assert pool.generations[block_id] == stamps[block_id] + 1


def test_the_end_of_the_least_recently_used_prefix_goes_first() -> None:
    pool = new_pool(5)
    old, new = held(pool, 3), held(pool, 2)
    for block_id, name in zip(old + new, names(5), strict=True):
        pool.publish(block_id, name)
    pool.release(old)
    pool.release(new)
    assert held(pool, 2) == sorted(old[1:])
    assert pool.match(names(5)) == old[:1]
    assert pool.take_evicted() == [(old[2], names(5)[2]), (old[1], names(5)[1])]
    assert pool.take_evicted() == []


def test_using_a_prefix_again_makes_it_recent() -> None:
    pool = new_pool(2)
    first, second = held(pool, 1), held(pool, 1)
    pool.publish(first[0], names(2)[0])
    pool.publish(second[0], names(2)[1])
    pool.release(first)
    pool.release(second)
    pool.acquire(first)
    pool.release(first)
    assert held(pool, 1) == second


def test_events_tell_the_order_in_which_names_came_and_went() -> None:
    pool = new_pool(2)
    a, b, c = names(3)
    block_ids = held(pool, 2)
    pool.publish(block_ids[0], a)
    pool.publish(block_ids[1], b)
    pool.release(block_ids)
    pool.publish(held(pool, 1)[0], c)
    assert pool.take_events() == (
        KVEvent("stored", (a, b)),
        KVEvent("removed", (b,)),
        KVEvent("stored", (c,)),
    )
    assert pool.take_events() == ()


def test_the_first_block_keeps_a_name_that_is_published_twice() -> None:
    pool = new_pool(3)
    first, second = held(pool, 2)
    pool.publish(first, names(1)[0])
    pool.publish(second, names(1)[0])
    assert pool.match(names(1)) == [first]
    pool.release([first, second])
    assert pool.match(names(1)) == [first]
    pool.check([])


def test_blocks_for_as_many_owners_are_given_up_by_age_alone() -> None:
    """Not with their neighbours: nobody wants these side by side."""
    for apart in (True, False):
        pool, hashes = BlockPool(32, 16, array("Q", bytes(8 * 32))), names(32)
        first = held(pool, 32)
        for block_id, name in zip(first, hashes, strict=True):
            pool.publish(block_id, name)
        pool.release(first[::2])
        pool.release(first[1::2])
        assert len(pool.allocate(16, apart=apart) or []) == 16
        assert (set(pool.hashes()) == set(hashes[1::2])) == apart


def test_too_few_blocks_change_nothing() -> None:
    pool = new_pool(3)
    block_ids = held(pool, 2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check([block_ids])


def test_misuse_is_refused() -> None:
    pool = new_pool(2)
    block_id = held(pool, 1)[0]
    pool.publish(block_id, names(1)[0])
    with pytest.raises(ValueError, match="second name"):
        pool.publish(block_id, names(2)[1])
    pool.release([block_id])
    with pytest.raises(ValueError, match="without a holder"):
        pool.release([block_id])
    with pytest.raises(ValueError, match="without a holder"):
        pool.publish(block_id, names(2)[1])
    with pytest.raises(ValueError, match="generations"):
        BlockPool(3, 4, array("Q", [0]))


def test_check_names_the_difference() -> None:
    pool = new_pool(2)
    block_ids = held(pool, 1)
    with pytest.raises(AssertionError, match="has the count 1, but 0 holders"):
        pool.check([])
    with pytest.raises(AssertionError, match="has the count 1, but 2 holders"):
        pool.check([block_ids, block_ids])


class PoolMachine(RuleBasedStateMachine):
    """Any order of legal calls, next to a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool(7)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what was published, until the block is rewritten
        self.num_names = 0

    @rule(num_blocks=st.integers(0, 8), apart=st.booleans())
    def allocate(self, num_blocks: int, apart: bool) -> None:
        stamps, num_free = list(self.pool.generations), self.pool.num_free
        block_ids = self.pool.allocate(num_blocks, apart=apart)
        assert (block_ids is None) == (num_blocks > num_free)
        for block_id in block_ids or ():
            assert self.pool.generations[block_id] > stamps[block_id]
            assert not any(block_id in holder for holder in self.holders)
            self.content.pop(block_id, None)
        if block_ids:
            self.holders.append(block_ids)

    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(choice % len(self.holders)))

    @rule(choice=st.integers(0, 99))
    def publish(self, choice: int) -> None:
        if not self.holders:
            return
        block_id = self.holders[choice % len(self.holders)][0]
        if block_id not in self.content:
            self.num_names += 1
            self.content[block_id] = self.num_names.to_bytes(16, "big")
            self.pool.publish(block_id, self.content[block_id])

    @rule(choice=st.integers(0, 99))
    def acquire(self, choice: int) -> None:
        names = list(self.pool.hashes())
        if names:
            found = self.pool.match([names[choice % len(names)]])
            self.pool.acquire(found)
            self.holders.append(found)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check(self.holders)
        for name in self.pool.hashes():
            block_id = self.pool.match([name])[0]
            assert self.content[block_id] == name, "found under a name that it lost"


TestPool = PoolMachine.TestCase
TestPool.settings = examples(20, stateful_step_count=30)
