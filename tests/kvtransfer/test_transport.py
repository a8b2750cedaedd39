"""The contract of `transport.Transport`, held against every transport."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import TransferFailed
from disagg.kvtransfer.transport import PullDone, TicketReleased, Transport
from tests.grids import examples
from tests.kvtransfer.memory import Memory
from tests.kvtransfer.sides import Sides, finish, next_events

ticket_numbers = itertools.count()


@dataclasses.dataclass
class Pair:
    """A source and a reader that knows it."""

    sides: Sides
    source: Memory
    reader: Memory
    serving: Transport
    reading: Transport


def open_pair(sides: Sides, block_nbytes: int = 256) -> Pair:
    source = Memory("source", epoch=3, block_nbytes=block_nbytes)
    reader = Memory("reader", epoch=5, block_nbytes=block_nbytes)
    pair = Pair(sides, source, reader, sides.open(source), sides.open(reader))
    pair.reading.add_peer(pair.serving.peer)
    return pair


@pytest.fixture(scope="module", params=["local", "nixl"])
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """For tests that leave the pair as they found it."""
    sides = Sides(request.param)
    yield open_pair(sides)
    sides.close_all()


@pytest.fixture(params=["local", "nixl"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    sides = Sides(request.param)
    yield sides
    sides.close_all()


def new_id() -> str:
    return f"ticket-{next(ticket_numbers)}"


def test_blocks_arrive_and_the_source_hears_of_it(shared: Pair) -> None:
    ticket = shared.source.ticket(new_id(), [4, 5, 9])
    pull_id = shared.reading.pull(ticket, 0, [1, 2, 0])
    done = finish(shared.reading)
    assert done.error is None
    assert (done.pull_id, done.num_blocks, done.nbytes) == (pull_id, 3, 3 * 256)
    assert done.seconds >= 0.0
    assert shared.reader.holds_copy(shared.source, ticket, [1, 2, 0])
    assert next_events(shared.serving) == [TicketReleased(ticket.ticket_id)]


def test_blocks_used_again_are_not_accepted(shared: Pair) -> None:
    ticket = shared.source.ticket(new_id(), [3, 4])
    shared.source.reuse(4)
    shared.reading.pull(ticket, 0, [0, 1])
    error = finish(shared.reading).error
    assert error is not None and "used the blocks again" in error
    assert next_events(shared.serving) == [TicketReleased(ticket.ticket_id)]
    fresh = shared.source.ticket(new_id(), [3, 4])  # nothing of the failure stays behind
    shared.reading.pull(fresh, 0, [0, 1])
    assert finish(shared.reading).error is None
    next_events(shared.serving)


def test_a_ticket_is_used_once(shared: Pair) -> None:
    ticket = shared.source.ticket(new_id(), [3])
    shared.reading.pull(ticket, 0, [0])
    with pytest.raises(TransferFailed, match="used already"):
        shared.reading.pull(ticket, 0, [1])
    assert finish(shared.reading).error is None
    with pytest.raises(TransferFailed, match="used already"):
        shared.reading.pull(ticket, 0, [0])
    next_events(shared.serving)


def test_a_ticket_can_be_given_back_unused(shared: Pair) -> None:
    ticket = shared.source.ticket(new_id(), [3])
    shared.reading.release(ticket)
    assert next_events(shared.serving) == [TicketReleased(ticket.ticket_id)]
    with pytest.raises(TransferFailed, match="used already"):
        shared.reading.pull(ticket, 0, [0])


def test_tickets_of_strangers_are_refused(shared: Pair) -> None:
    ticket = shared.source.ticket(new_id(), [3])
    for change in ({"source_id": "stranger"}, {"epoch": 2}, {"layout": "other"}):
        with pytest.raises(TransferFailed):
            shared.reading.pull(dataclasses.replace(ticket, **change), 0, [0])
    shared.reading.release(dataclasses.replace(ticket, source_id="stranger"))  # nobody to tell
    assert shared.reading.poll() == []


def test_a_peer_of_another_layout_is_refused(shared: Pair) -> None:
    with pytest.raises(TransferFailed, match="same model"):
        shared.reading.add_peer(dataclasses.replace(shared.serving.peer, layout="other"))
    shared.reading.pull(shared.source.ticket(new_id(), [3]), 0, [0])
    assert finish(shared.reading).error is None
    next_events(shared.serving)


def test_nobody_pulls_from_itself(shared: Pair) -> None:
    shared.reading.add_peer(shared.reading.peer)
    with pytest.raises(TransferFailed, match="reader is not known"):
        shared.reading.pull(shared.reader.ticket(new_id(), [3]), 0, [0])


def test_many_pulls_at_once_end_once_each(shared: Pair) -> None:
    tickets = [shared.source.ticket(new_id(), [block]) for block in range(32)]
    ids = [shared.reading.pull(ticket, 0, [31 - n]) for n, ticket in enumerate(tickets)]
    events = next_events(shared.reading, num=32)
    assert sorted(e.pull_id for e in events if isinstance(e, PullDone) and not e.error) == ids
    for number, ticket in enumerate(tickets):
        assert shared.reader.holds_copy(shared.source, ticket, [31 - number])
    released = next_events(shared.serving, num=32)
    expected = {TicketReleased(ticket.ticket_id) for ticket in tickets}
    assert len(released) == 32 and set(released) == expected
    assert shared.reading.poll() == shared.serving.poll() == []


BLOCKS = st.permutations(range(32))


@examples(20)
@given(BLOCKS, BLOCKS, st.integers(1, 12), st.sets(st.integers(0, 31), max_size=3))
def test_exactly_the_unchanged_is_accepted(
    shared: Pair, block_ids: list[int], into: list[int], num: int, reused: set[int]
) -> None:
    ticket = shared.source.ticket(new_id(), block_ids[:num])
    for block in reused:
        shared.source.reuse(block)
    shared.reading.pull(ticket, 0, into[:num])
    done = finish(shared.reading)
    assert (done.error is None) == reused.isdisjoint(ticket.block_ids)
    if done.error is None:
        assert shared.reader.holds_copy(shared.source, ticket, into[:num])
    next_events(shared.serving)


def test_a_source_that_is_gone_fails_the_pull_and_frees_the_blocks(sides: Sides) -> None:
    pair = open_pair(sides)
    ticket = pair.source.ticket(new_id(), [3])
    sides.close(pair.serving)
    pair.reading.pull(ticket, 0, [0])
    assert finish(pair.reading).error is not None
    other = Memory("other")
    serving = sides.open(other)
    pair.reading.add_peer(serving.peer)
    pair.reading.pull(other.ticket(new_id(), [3]), 0, [0])
    assert finish(pair.reading).error is None


def test_a_restarted_source_is_a_new_peer(sides: Sides) -> None:
    pair = open_pair(sides)
    pair.reading.pull(pair.source.ticket(new_id(), [3]), 0, [0])
    assert finish(pair.reading).error is None
    old_ticket = pair.source.ticket(new_id(), [3])
    sides.close(pair.serving)
    for epoch in range(10, 14):
        restarted = Memory("source", epoch=epoch)
        serving = sides.open(restarted)
        pair.reading.add_peer(serving.peer)
        with pytest.raises(TransferFailed, match=f"epoch {epoch} now"):
            pair.reading.pull(old_ticket, 0, [0])
        ticket = restarted.ticket(new_id(), [6, 7])
        pair.reading.pull(ticket, 0, [8, 9])
        assert finish(pair.reading).error is None
        assert pair.reader.holds_copy(restarted, ticket, [8, 9])
        sides.close(serving)


def test_a_source_that_has_left_is_forgotten_and_may_come_back(sides: Sides) -> None:
    pair = open_pair(sides)
    pair.reading.forget_peer("nobody")
    for _ in range(2):
        pair.reading.forget_peer("source")
        with pytest.raises(TransferFailed, match="source is not known here"):
            pair.reading.pull(pair.source.ticket(new_id(), [3]), 0, [0])
        pair.reading.add_peer(pair.serving.peer)
        ticket = pair.source.ticket(new_id(), [6, 7])
        pair.reading.pull(ticket, 0, [8, 9])
        assert finish(pair.reading).error is None
        assert pair.reader.holds_copy(pair.source, ticket, [8, 9])
