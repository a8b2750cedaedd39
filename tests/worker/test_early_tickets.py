"""KV that comes ahead of its request is found by it, or was never there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.blocks import BlockHash
from disagg.engine.sched.sequence import Sequence
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone
from disagg.messages import Prefetch
from disagg.worker.kv_import import PULL_PATIENCE_S
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_sequence
from tests.worker.test_kv_import import BLOCK_SIZE, PROMPT, ImportRig


class EarlyRig(ImportRig):
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


def assert_answers(rig: EarlyRig, sequence: Sequence) -> None:
    rig.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert rig.is_empty


def test_what_came_early_is_not_pulled_again() -> None:
    rig = EarlyRig()
    rig.tell(2)
    rig.end_early_pull(0)
    sequence = rig.arrive()
    rig.advance()
    _, first_block, into = rig.transport.pulls[1]
    assert (first_block, len(into)) == (2, 2)  # the third block, and the half
    assert rig.transport.releasing == {1}  # nothing was held for the early ticket
    rig.end_pull(1)
    assert_answers(rig, sequence)


def test_each_ticket_brings_what_is_new() -> None:
    rig = EarlyRig()
    rig.tell(1)
    rig.end_early_pull(0)
    rig.tell(3)
    _, first_block, into = rig.transport.pulls[1]
    assert (first_block, len(into)) == (1, 2)
    rig.end_early_pull(1)
    rig.tell(3)  # all of it is here
    assert len(rig.transport.pulls) == 2 and rig.is_empty


def test_one_pull_of_a_prompt_at_a_time() -> None:
    rig = EarlyRig()
    rig.tell(1)
    rig.tell(2)
    assert len(rig.transport.pulls) == 1  # the next ticket names these blocks, too


def test_a_request_knows_that_its_blocks_are_coming() -> None:
    rig = EarlyRig()
    same, other = new_sequence(PROMPT, BLOCK_SIZE), new_sequence(PROMPT[1:], BLOCK_SIZE)
    assert not rig.is_coming(same)
    rig.tell(2)
    assert rig.is_pulling
    assert rig.is_coming(same) and not rig.is_coming(other)
    assert not rig.is_coming(new_sequence(PROMPT[: BLOCK_SIZE + 1], BLOCK_SIZE))
    rig.now += PULL_PATIENCE_S
    assert not rig.is_coming(same)  # a source that hangs delays nobody for ever
    rig.end_early_pull(0)
    assert not rig.is_pulling


def test_a_prediction_lengthens_patience() -> None:
    rig = EarlyRig()
    rig.predicted_s = 100.0
    rig.tell(2)
    rig.now += PULL_PATIENCE_S
    assert rig.is_coming(new_sequence(PROMPT, BLOCK_SIZE))


def test_a_pull_that_failed_leaves_nothing() -> None:
    rig = EarlyRig()
    rig.tell(2)
    rig.end_early_pull(0, error="torn")
    assert rig.is_empty and not rig.engine.pool.take_events()
    sequence = rig.arrive()
    rig.advance()
    _, first_block, into = rig.transport.pulls[1]
    assert (first_block, len(into)) == (0, 4)
    rig.end_pull(1)
    assert_answers(rig, sequence)


def test_a_source_that_is_unknown_costs_nothing() -> None:
    rig = EarlyRig()
    rig.transport.refuses = True
    rig.tell(2)
    assert rig.is_empty and not rig.is_pulling


def test_without_room_nothing_is_pulled() -> None:
    rig = EarlyRig(num_blocks=6)
    sequence = new_sequence((9,) * 17, BLOCK_SIZE, 2)
    rig.engine.submit(sequence)
    rig.engine.step()  # five blocks are held
    rig.tell(2)
    assert not rig.transport.pulls
    rig.run()
    assert rig.is_empty


@pytest.mark.parametrize("num_names", [0, 1])
def test_a_ticket_without_names_is_ignored(num_names: int) -> None:
    rig = EarlyRig()
    rig.tell(2, tuple(new_sequence(PROMPT, BLOCK_SIZE).block_hashes[:num_names]))
    assert not rig.transport.pulls and rig.is_empty


def test_a_ticket_whose_last_block_is_not_full_is_ignored() -> None:
    rig = EarlyRig()
    sequence = new_sequence(PROMPT, BLOCK_SIZE)
    ticket = replace(rig.ticket(sequence, 8), num_tokens=7)
    rig.kv_import.prefetch(Prefetch(ticket, tuple(sequence.block_hashes)), rig.now)
    assert not rig.transport.pulls and rig.is_empty


def test_without_prefix_caching_nothing_is_pulled() -> None:
    rig = EarlyRig()
    rig.engine.pool.enable_prefix_caching = False
    rig.tell(2)
    assert not rig.transport.pulls and rig.is_empty


def test_others_pulls_are_not_its_own() -> None:
    rig = EarlyRig()
    rig.tell(2)
    other = tuple(range(30, 44))
    sequence = rig.arrive(other)
    rig.advance()
    rig.end_pull(1)
    assert rig.is_pulling and len(rig.engine.pool.match(sequence.block_hashes)) == 3
    assert not rig.engine.pool.match(new_sequence(PROMPT, BLOCK_SIZE).block_hashes)
    rig.end_early_pull(0)
    assert not rig.is_pulling
    rig.run()
    assert sequence.tokens[len(other) :] == expected_tokens(other, 5)
