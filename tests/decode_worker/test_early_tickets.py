"""KV that comes ahead of its request is found by it, or was never there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.blocks import BlockHash
from disagg.decode_worker.kv_source import PULL_PATIENCE_S
from disagg.engine.sched.sequence import Sequence
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone
from disagg.messages import Prefetch
from tests.decode_worker.test_kv_import import BLOCK_SIZE, PROMPT, Door
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_sequence


class EarlyDoor(Door):
    """Of a worker that is told of blocks before their request comes."""

    def tell(self, num_blocks: int, names: tuple[BlockHash, ...] | None = None) -> KVTicket:
        """So many blocks of `PROMPT` are ready."""
        sequence = new_sequence(PROMPT, BLOCK_SIZE)
        ticket = self.ticket(sequence, num_blocks * BLOCK_SIZE)
        if names is None:
            names = tuple(sequence.block_hashes)
        self.kv_import.prefetch(Prefetch(ticket, names), self.now)
        self.check()
        return ticket

    def end_early_pull(self, pull_id: int, error: str | None = None) -> None:
        self.fill(pull_id)
        pulled, _ = self.kv_import.pull_ended(PullDone(pull_id, error, 1, 32, 0.01), self.now)
        assert pulled.is_early and pulled.ticket is self.transport.pulls[pull_id][0]
        self.check()

    def fill(self, pull_id: int) -> None:
        ticket, first_block, into = self.transport.pulls[pull_id]
        for source, here in zip(ticket.block_ids[first_block:], into, strict=True):
            self.kv.write_block(here, self.source.read_block(source))

    def is_coming(self, sequence: Sequence) -> bool:
        ticket = self.ticket(sequence, len(sequence.tokens) - 1)
        source = self.kv_import._source_of(ticket, sequence, "")
        assert source is not None
        return self.kv_import._is_coming(source, self.now)

    @property
    def is_pulling(self) -> bool:
        return any(True for _ in self.kv_import.holders())


def assert_answers(door: EarlyDoor, sequence: Sequence) -> None:
    door.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert door.is_empty


def test_what_came_early_is_not_pulled_again() -> None:
    door = EarlyDoor()
    door.tell(2)
    door.end_early_pull(0)
    sequence = door.arrive()
    door.advance()
    _, first_block, into = door.transport.pulls[1]
    assert (first_block, len(into)) == (2, 2)  # the third block, and the half
    door.end_pull(1)
    assert_answers(door, sequence)


def test_each_ticket_brings_what_is_new() -> None:
    door = EarlyDoor()
    door.tell(1)
    door.end_early_pull(0)
    door.tell(3)
    _, first_block, into = door.transport.pulls[1]
    assert (first_block, len(into)) == (1, 2)
    door.end_early_pull(1)
    door.tell(3)  # all of it is here
    assert len(door.transport.pulls) == 2 and door.is_empty


def test_one_pull_of_a_prompt_at_a_time() -> None:
    door = EarlyDoor()
    door.tell(1)
    door.tell(2)
    assert len(door.transport.pulls) == 1  # the next ticket names these blocks, too


def test_a_request_knows_that_its_blocks_are_coming() -> None:
    door = EarlyDoor()
    same, other = new_sequence(PROMPT, BLOCK_SIZE), new_sequence(PROMPT[1:], BLOCK_SIZE)
    assert not door.is_coming(same)
    door.tell(2)
    assert door.is_pulling
    assert door.is_coming(same) and not door.is_coming(other)
    assert not door.is_coming(new_sequence(PROMPT[: BLOCK_SIZE + 1], BLOCK_SIZE))
    door.now += PULL_PATIENCE_S
    assert not door.is_coming(same)  # a source that hangs delays nobody for ever
    door.end_early_pull(0)
    assert not door.is_pulling


def test_a_prediction_lengthens_patience() -> None:
    door = EarlyDoor()
    door.predicted_s = 100.0
    door.tell(2)
    door.now += PULL_PATIENCE_S
    assert door.is_coming(new_sequence(PROMPT, BLOCK_SIZE))


def test_a_pull_that_failed_leaves_nothing() -> None:
    door = EarlyDoor()
    door.tell(2)
    door.end_early_pull(0, error="torn")
    assert door.is_empty and not door.engine.pool.take_events()
    sequence = door.arrive()
    door.advance()
    _, first_block, into = door.transport.pulls[1]
    assert (first_block, len(into)) == (0, 4)
    door.end_pull(1)
    assert_answers(door, sequence)


def test_a_source_that_is_unknown_costs_nothing() -> None:
    door = EarlyDoor()
    door.transport.refuses = True
    door.tell(2)
    assert door.is_empty and not door.is_pulling


def test_without_room_nothing_is_pulled() -> None:
    door = EarlyDoor(num_blocks=6)
    sequence = new_sequence((9,) * 17, BLOCK_SIZE, 2)
    door.engine.submit(sequence)
    door.engine.step()  # five blocks are held
    door.tell(2)
    assert not door.transport.pulls
    door.run()
    assert door.is_empty


@pytest.mark.parametrize("num_names", [0, 1])
def test_a_ticket_without_names_is_ignored(num_names: int) -> None:
    door = EarlyDoor()
    door.tell(2, tuple(new_sequence(PROMPT, BLOCK_SIZE).block_hashes[:num_names]))
    assert not door.transport.pulls and door.is_empty


def test_a_ticket_whose_last_block_is_not_full_is_ignored() -> None:
    door = EarlyDoor()
    sequence = new_sequence(PROMPT, BLOCK_SIZE)
    ticket = replace(door.ticket(sequence, 8), num_tokens=7)
    door.kv_import.prefetch(Prefetch(ticket, tuple(sequence.block_hashes)), door.now)
    assert not door.transport.pulls and door.is_empty


def test_without_prefix_caching_nothing_is_pulled() -> None:
    door = EarlyDoor()
    door.engine.scheduler.enable_prefix_caching = False
    door.tell(2)
    assert not door.transport.pulls and door.is_empty


def test_others_pulls_are_not_its_own() -> None:
    door = EarlyDoor()
    door.tell(2)
    other = tuple(range(30, 44))
    sequence = door.arrive(other)
    door.advance()
    door.end_pull(1)
    assert door.is_pulling and len(door.engine.pool.match(sequence.block_hashes)) == 3
    assert not door.engine.pool.match(new_sequence(PROMPT, BLOCK_SIZE).block_hashes)
    door.end_early_pull(0)
    assert not door.is_pulling
    door.run()
    assert sequence.tokens[len(other) :] == expected_tokens(other, 5)
