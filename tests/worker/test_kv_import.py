"""Who arrives: with KV in place where that works, to be computed here where it does not.

KV that comes ahead of its request is found by it, or was never there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.blocks import BlockHash
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.errors import ContextLengthExceeded, GrammarError, TransferFailed
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.messages import Prefetch, PullCounts
from disagg.worker.kv_import import PULL_FACTOR, PULL_PATIENCE_S, KVImport
from tests.engine.fake_runner import FakeKV, expected_tokens
from tests.engine.workload import FOREVER_S, new_engine, new_sequence

BLOCK_SIZE = 4
PROMPT = tuple(range(4, 18))  # three full blocks and a half


class FakeTransport:
    """Notes what it is asked for; the test says how pulls end."""

    def __init__(self) -> None:
        self.pulls: dict[int, tuple[KVTicket, int, list[int]]] = {}
        self.releasing: set[int] = set()  # pulls whose end is told to the source
        self.released: list[str] = []
        self.refuses = False

    @property
    def peer(self) -> Peer:
        raise AssertionError("nobody asks for it here")

    def add_peer(self, peer: Peer) -> bool:
        return True

    def forget_peer(self, worker_id: str) -> None: ...

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        if self.refuses:
            raise TransferFailed("unknown peer")
        pull_id = len(self.pulls)
        if releases:
            self.releasing.add(pull_id)
        self.pulls[pull_id] = (ticket, first_block, into)
        return pull_id

    def release(self, ticket: KVTicket) -> None:
        self.released.append(ticket.ticket_id)

    def poll(self) -> list[PullDone | TicketReleased]:
        return []

    def close(self) -> None: ...


class ImportRig:
    """The import of an engine with fake KV, and a source that has computed everything."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.engine, self.kv = new_engine(num_blocks, BLOCK_SIZE)
        self.source = FakeKV(64, BLOCK_SIZE)
        self.transport = FakeTransport()
        self.predicted_s = 0.0
        self.kv_import = KVImport(
            self.engine, self.transport, lambda source_id, num_blocks: self.predicted_s
        )
        self.now = 0.0
        self._num_tickets = 0

    def arrive(
        self,
        prompt: tuple[int, ...] = PROMPT,
        *,
        deadline_unix_s: float = FOREVER_S,
        priority: int = 0,
    ) -> Sequence:
        """A sequence with its first token and a ticket for its prompt."""
        first = tuple(expected_tokens(prompt, 1))
        sequence = new_sequence(
            prompt,
            BLOCK_SIZE,
            5,
            output=first,
            stop_ids=frozenset(),
            deadline_unix_s=deadline_unix_s,
            priority=priority,
        )
        self.kv_import.admit(sequence, self.ticket(sequence, len(prompt)), self.now)
        return sequence

    def arrived(self, *prompt: tuple[int, ...], **changes: Any) -> Sequence:
        """One that has arrived, and whose pull is under way if it can be."""
        sequence = self.arrive(*prompt, **changes)
        self.advance()
        return sequence

    def pulled(self, *prompt: tuple[int, ...]) -> Sequence:
        """The first one, with its KV in place."""
        sequence = self.arrived(*prompt)
        self.end_pull(0)
        return sequence

    def ticket(self, sequence: Sequence, num_tokens: int) -> KVTicket:
        """Fill blocks of the source with the sequence's KV."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        block_ids = tuple(range(3, 3 + num_blocks))
        twin = new_sequence(tuple(sequence.tokens[:num_tokens]), BLOCK_SIZE)
        twin.block_ids = list(block_ids)
        self.source.compute(twin, 0, num_tokens)
        self._num_tickets += 1
        name = f"ticket-{self._num_tickets}"
        return KVTicket(name, "source", 1, "fake:4", num_tokens, block_ids, (0,) * num_blocks)

    def fill(self, pull_id: int) -> None:
        """Copy what it pulls."""
        ticket, first_block, into = self.transport.pulls[pull_id]
        for source, here in zip(ticket.block_ids[first_block:], into, strict=True):
            self.kv.write_block(here, self.source.read_block(source))

    def end_pull(self, pull_id: int, error: str | None = None) -> None:
        if error is None:
            self.fill(pull_id)
        num_blocks = len(self.transport.pulls[pull_id][2])
        done = PullDone(pull_id, error, num_blocks, 32 * num_blocks, 0.01)
        self.kv_import.pull_ended(done, self.now)
        self.check()

    def advance(self) -> bool:
        soon = self.kv_import.advance(self.now)
        self.check()
        return soon

    def run(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while self.engine.has_work:
            self.engine.expire(self.now)
            events += self.engine.step()
            self.check()
        return events

    def check(self) -> None:
        self.engine.check(self.kv_import.holders())

    @property
    def is_empty(self) -> bool:
        return self.engine.pool.num_free == self.engine.pool.num_blocks


def assert_answers(rig: ImportRig, sequence: Sequence) -> None:
    rig.run()
    assert sequence.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    assert rig.is_empty and not rig.kv_import.num_arriving


def num_computed(rig: ImportRig) -> int:
    runner = rig.engine.runner
    count: int = runner.num_computed  # type: ignore[attr-defined]
    return count


def test_what_was_pulled_is_not_computed() -> None:
    rig = ImportRig()
    sequence = rig.arrive()
    assert rig.advance(), "a pull is under way"
    rig.end_pull(0)
    assert_answers(rig, sequence)
    assert num_computed(rig) == 4
    assert sequence.num_cached_tokens == 14, "the prompt was not computed here"


def test_tokens_of_a_moved_request_do_not_count_as_cached_prompt() -> None:
    rig = ImportRig()
    output = tuple(expected_tokens(PROMPT, 4))
    sequence = new_sequence(PROMPT, BLOCK_SIZE, 5, output=output, stop_ids=frozenset())
    rig.kv_import.admit(sequence, rig.ticket(sequence, len(PROMPT) + 3), rig.now)
    rig.advance()
    rig.end_pull(0)
    assert sequence.num_computed == len(PROMPT) + 3 and sequence.num_cached_prompt_tokens == len(
        PROMPT
    )


def test_blocks_that_are_here_are_not_pulled() -> None:
    rig = ImportRig()
    rig.pulled()
    rig.run()
    sequence = rig.arrived()
    ticket, first_block, into = rig.transport.pulls[1]
    assert first_block == 3 and len(into) == 1 == len(ticket.block_ids) - 3
    rig.end_pull(1)
    assert_answers(rig, sequence)


def test_nothing_is_pulled_when_all_is_here() -> None:
    rig = ImportRig()
    prompt = PROMPT[:12]
    rig.pulled(prompt)
    rig.run()
    sequence = rig.arrived(prompt)
    rig.run()
    assert len(rig.transport.pulls) == 1 and rig.transport.released == ["ticket-2"]
    assert sequence.tokens[12:] == expected_tokens(prompt, 5) and rig.is_empty


def test_who_waits_for_blocks_gets_them_by_priority_and_then_by_arrival() -> None:
    rig = ImportRig(num_blocks=5)
    rig.arrived()
    waiting = [rig.arrive(priority=priority) for priority in (1, 0, -1, 0)]
    rig.advance()
    assert len(rig.transport.pulls) == 1, "one block is left, and each of them wants four"
    rig.kv_import.cancel(rig.arrive(priority=-5).request_id)
    assert rig.kv_import.take_waiting() == [waiting[i] for i in (2, 1, 3, 0)]


@pytest.mark.parametrize("moment", ["refused", "failed", "impatient"])
def test_a_pull_that_goes_wrong_means_to_compute_here(moment: str) -> None:
    rig = ImportRig()
    rig.transport.refuses = moment == "refused"
    sequence = rig.arrived()
    if moment == "failed":
        rig.end_pull(0, "the source used the blocks again")
    elif moment == "impatient":
        rig.now = PULL_PATIENCE_S
        rig.advance()
        assert not rig.kv_import.num_arriving and rig.engine.has_work
        rig.run()
        assert not rig.is_empty, "the transport may still write"
        rig.end_pull(0)
    assert_answers(rig, sequence)
    assert num_computed(rig) >= len(PROMPT)
    assert rig.transport.released == (["ticket-1"] if moment == "refused" else [])


def test_pulls_are_counted_by_lane_and_outcome() -> None:
    rig = ImportRig(num_blocks=64)
    first_ids = iter(range(4, 200, 16))  # of prompts that share no block

    def pull(
        error: str | None, lane: str = "", *, is_torn: bool = False, waits: bool = True
    ) -> None:
        sequence = rig.arrive(tuple(range(first := next(first_ids), first + 8)))
        rig.advance()
        if not waits:
            assert rig.kv_import.cancel(sequence.request_id)
        done = PullDone(len(rig.transport.pulls) - 1, error, 2, 64, 0.5, lane, is_torn)
        rig.kv_import.pull_ended(done, rig.now)

    assert not rig.kv_import.pull_counts
    pull(None, "cma")
    before = rig.kv_import.pull_counts
    pull(None, "cma")
    assert before == (PullCounts("cma", num_ok=1, nbytes=64, seconds=0.5),), "it is in a status"
    pull(None, "cma", waits=False)
    pull("the stamps changed", is_torn=True)
    pull("the peer is gone")
    pull("the peer is gone", waits=False)
    rig.transport.refuses = True
    rig.arrived()
    assert rig.kv_import.pull_counts == (
        PullCounts("cma", num_ok=2, num_given_up=1, nbytes=128, seconds=1.0),
        PullCounts("", num_torn=1, num_failed=2, num_given_up=1),
    )


def test_a_pull_that_should_take_long_may() -> None:
    rig = ImportRig()
    rig.predicted_s = 5.0
    sequence = rig.arrived()
    for rig.now in (PULL_PATIENCE_S, PULL_PATIENCE_S + PULL_FACTOR * 5.0 - 0.1):
        rig.advance()
        assert rig.kv_import.num_arriving and not rig.engine.has_work
    rig.end_pull(0)
    assert_answers(rig, sequence)
    assert num_computed(rig) < len(PROMPT)


@pytest.mark.parametrize(
    ("num_tokens", "num_evicted"),
    [(0, 0), (-3, 0), (13, 0), (15, 0), (16, 0), (1 << 40, 0), (12, 1), (12, 4), (8, -4)],
)
def test_a_ticket_that_cannot_be_is_not_pulled(num_tokens: int, num_evicted: int) -> None:
    """9 to 12 would do for its three blocks, and 15 is more than the sequence has KV for."""
    rig = ImportRig()
    sequence = new_sequence(
        PROMPT, BLOCK_SIZE, 5, output=tuple(expected_tokens(PROMPT, 1)), stop_ids=frozenset()
    )
    ticket = rig.ticket(sequence, 12)
    ticket = replace(ticket, num_tokens=num_tokens, num_evicted=num_evicted)
    rig.kv_import.admit(sequence, ticket, rig.now)
    rig.advance()
    assert not rig.transport.pulls and rig.transport.released == [ticket.ticket_id]
    assert_answers(rig, sequence)


def test_what_never_fits_is_refused_and_blocks_nobody() -> None:
    rig = ImportRig(num_blocks=8)
    huge = new_sequence(tuple(range(4, 104)), BLOCK_SIZE, 5, output=(9,), stop_ids=frozenset())
    with pytest.raises(Exception, match="need"):
        rig.kv_import.admit(huge, rig.ticket(huge, 100), rig.now)
    sequence = rig.pulled()
    assert_answers(rig, sequence)


def test_a_join_that_is_refused_is_the_only_event() -> None:
    rig = ImportRig(num_blocks=64)
    rig.engine.scheduler.max_model_len = 10
    sequence = rig.pulled()
    (event,) = rig.run()
    assert event.sequence is sequence and isinstance(event.error, ContextLengthExceeded)
    assert rig.is_empty


def test_it_is_not_stuck_while_a_pull_will_free_blocks() -> None:
    rig = ImportRig(num_blocks=6)
    rig.arrive()
    rig.arrive(tuple(range(30, 44)))
    rig.advance()
    assert len(rig.transport.pulls) == 1 and rig.kv_import.num_arriving == 2
    assert not rig.kv_import.is_stuck
    for pull_id in (0, 1):
        rig.end_pull(pull_id)
        rig.run()
        rig.advance()
    assert rig.is_empty


def test_it_is_stuck_when_somebody_else_holds_the_blocks() -> None:
    rig = ImportRig(num_blocks=6)
    held = rig.engine.pool.allocate(5)
    assert held is not None
    rig.arrive()
    assert rig.kv_import.advance(0.0) and rig.kv_import.is_stuck
    rig.engine.pool.release(held)
    rig.advance()
    assert not rig.kv_import.is_stuck and len(rig.transport.pulls) == 1


def test_the_late_end_in_time_wherever_they_are_in_the_line() -> None:
    rig = ImportRig(num_blocks=6)
    rig.arrive()
    rig.arrive(tuple(range(30, 44)))
    late = rig.arrive(tuple(range(50, 64)), deadline_unix_s=2.0)
    rig.advance()
    rig.now = 2.0
    rig.advance()
    rig.engine.expire(rig.now)
    (event,) = rig.engine.step()
    assert event.sequence is late and event.error is not None
    assert event.error.code == "deadline_exceeded"
    assert rig.kv_import.num_arriving == 2 and rig.transport.released == ["ticket-3"]


def test_a_deadline_passes_in_the_middle_of_a_pull() -> None:
    rig = ImportRig()
    sequence = rig.arrived(deadline_unix_s=2.0)
    rig.now = 2.0
    rig.advance()
    (event,) = rig.run()
    assert event.sequence is sequence and event.error is not None
    rig.end_pull(0)
    assert rig.is_empty and not rig.engine.has_work


def test_two_with_the_same_prompt_pull_it_once() -> None:
    """Such as two answers to one prompt. The second pulls the block that is not full."""
    rig = ImportRig(num_blocks=24)
    both = [rig.arrive(), rig.arrive()]
    assert rig.advance() and len(rig.transport.pulls) == 1 and rig.kv_import.num_arriving == 2
    rig.end_pull(0)
    rig.advance()
    _, first_block, into = rig.transport.pulls[1]
    assert (first_block, len(into)) == (3, 1)
    rig.end_pull(1)
    for sequence in both:
        assert_answers(rig, sequence)
    assert num_computed(rig) == 8


def test_nobody_waits_for_a_pull_of_another_prompt_or_one_that_takes_too_long() -> None:
    rig = ImportRig(num_blocks=24)
    rig.arrived()
    rig.arrived(tuple(range(30, 44)))
    assert len(rig.transport.pulls) == 2
    second = rig.arrive()
    rig.now = PULL_PATIENCE_S
    rig.advance()
    assert len(rig.transport.pulls) == 3
    rig.end_pull(2)
    rig.run()
    assert second.tokens[len(PROMPT) :] == expected_tokens(PROMPT, 5)
    rig.end_pull(0)
    rig.end_pull(1)
    rig.run()
    assert rig.is_empty


def test_a_request_that_finds_no_blocks_holds_back_later_ones_that_need_fewer() -> None:
    rig = ImportRig(num_blocks=8)
    held = rig.engine.pool.allocate(5)
    assert held is not None
    first, second = rig.arrive(), rig.arrive(tuple(range(30, 35)))
    assert rig.kv_import.advance(0.0) and rig.kv_import.is_stuck and not rig.transport.pulls
    rig.engine.pool.release(held)
    rig.advance()
    assert [len(into) for _, _, into in rig.transport.pulls.values()] == [4, 2]
    for pull_id in (0, 1):
        rig.end_pull(pull_id)
    rig.run()
    assert len(first.tokens) == len(PROMPT) + 5 and len(second.tokens) == 10


@pytest.mark.parametrize("end", ["ready", "refused", "cancelled", "drained"])
def test_a_request_waits_for_its_grammar_before_its_kv_is_pulled(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = ImportRig()
    is_ready = False

    def ask(sequence: Sequence) -> bool:
        if end == "refused" and is_ready:
            raise GrammarError("too many states")
        return is_ready

    monkeypatch.setattr(rig.engine, "is_ready", ask)
    sequence = rig.arrive()
    assert rig.advance() and rig.kv_import.num_arriving == 1 and not rig.transport.pulls
    assert not rig.kv_import.is_stuck, "room is not what it waits for"
    if end == "cancelled":
        assert rig.kv_import.cancel(sequence.request_id)
    elif end == "drained":
        assert rig.kv_import.take_waiting() == [sequence]
    is_ready = True
    rig.advance()
    if end == "ready":
        rig.end_pull(0)
        assert_answers(rig, sequence)
    else:
        assert not rig.transport.pulls and not rig.kv_import.num_arriving
        assert [event.error is not None for event in rig.run()] == [True] * (end == "refused")
    assert rig.transport.released == ["ticket-1"] * (end == "cancelled"), "else it is of use"


def test_what_nobody_waits_for_any_more_is_found_by_the_next() -> None:
    rig = ImportRig()
    sequence = rig.arrived()
    rig.kv_import.cancel(sequence.request_id)
    rig.end_pull(0)
    assert len(rig.engine.pool.match(sequence.block_hashes)) == 3


def test_a_cancelled_one_in_line_lets_the_source_go() -> None:
    rig = ImportRig(num_blocks=6)
    rig.arrive()
    second = rig.arrive(tuple(range(30, 44)))
    rig.advance()
    assert rig.kv_import.cancel(second.request_id)
    assert rig.transport.released == ["ticket-2"] and rig.kv_import.num_arriving == 1
    assert not rig.kv_import.cancel("nobody")


def test_without_prefix_caching_everything_is_pulled() -> None:
    rig = ImportRig()
    rig.engine.pool.enable_prefix_caching = False
    for pull_id in (0, 1):
        sequence = rig.arrive()
        rig.advance()
        assert rig.transport.pulls[pull_id][1] == 0
        rig.end_pull(pull_id)
        assert_answers(rig, sequence)


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

    @property
    def is_pulling(self) -> bool:
        return any(True for _ in self.kv_import.holders())


def test_what_came_early_is_not_pulled_again() -> None:
    rig = EarlyRig()
    rig.tell(2)
    rig.end_early_pull(0)
    sequence = rig.arrived()
    _, first_block, into = rig.transport.pulls[1]
    assert (first_block, len(into)) == (2, 2)  # the third block, and the half
    assert rig.transport.releasing == {1}  # nothing was held for the early ticket
    rig.end_pull(1)
    assert_answers(rig, sequence)


def test_a_request_is_told_of_the_bytes_that_came_early_for_it() -> None:
    rig = EarlyRig()
    rig.tell(1)
    rig.end_early_pull(0)
    rig.tell(3)
    rig.end_early_pull(1)
    for expected_nbytes in (2 * 32, 0):  # who comes later finds all blocks but the last here
        sequence = rig.arrive()
        rig.advance()
        pull_id = len(rig.transport.pulls) - 1
        rig.fill(pull_id)
        pulled, whose = rig.kv_import.pull_ended(PullDone(pull_id, None, 1, 32, 0.01), rig.now)
        assert whose is sequence and pulled.early_nbytes == expected_nbytes


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


def test_an_early_source_that_is_unknown_costs_nothing() -> None:
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


@pytest.mark.parametrize("wrong", [{"num_tokens": 7}, {"num_evicted": 4}])
def test_a_ticket_without_full_blocks_of_all_tokens_is_ignored(wrong: dict[str, Any]) -> None:
    rig = EarlyRig()
    sequence = new_sequence(PROMPT, BLOCK_SIZE)
    ticket = replace(rig.ticket(sequence, 8), **wrong)
    rig.kv_import.prefetch(Prefetch(ticket, tuple(sequence.block_hashes)), rig.now)
    assert not rig.transport.pulls and rig.is_empty


def test_without_prefix_caching_nothing_is_pulled() -> None:
    rig = EarlyRig()
    rig.engine.pool.enable_prefix_caching = False
    rig.tell(2)
    assert not rig.transport.pulls and rig.is_empty
