from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import StartupError, TransferFailed
from disagg.kvtransfer import pulls
from disagg.kvtransfer.pulls import MAX_TICKET_ID_NBYTES, PullBook, describe
from disagg.kvtransfer.slab import Stamps
from disagg.kvtransfer.ticket import issue_ticket
from tests.kvtransfer.memory import Memory

SOURCE = Memory("source", epoch=3)
READER = Memory("reader")


def book_with_source() -> PullBook:
    book = PullBook(READER.slab, "local")
    book.add_peer(SOURCE.peer())
    return book


def test_a_pull_skips_blocks_that_are_here_already() -> None:
    ticket = SOURCE.ticket("t", [4, 5, 6])
    pull = book_with_source().begin(ticket, 1, [0, 1], now=2.0)
    assert pull.runs == ((5, 0, 2),)
    assert pull.generations == ticket.generations[1:]
    assert (pull.num_blocks, pull.nbytes, pull.started_at) == (2, 2 * SOURCE.block_nbytes, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_id": "stranger"}, "not known"),
        ({"epoch": 2}, "epoch 2"),
        ({"layout": "other"}, "layout 'other'"),
        ({"generations": (1,)}, "1 generations"),
        ({"generations": (1, 2, 3)}, "3 generations"),
        ({"ticket_id": ""}, "1 to 256 bytes"),
        ({"ticket_id": "x" * (MAX_TICKET_ID_NBYTES + 1)}, "1 to 256 bytes"),
        ({"block_ids": (4, 4)}, "named twice"),
        ({"block_ids": (4, -1)}, "block -1"),
        ({"block_ids": (4, 32)}, "block 32"),
        ({"block_ids": (4, 2**31)}, "block 2147483648"),
        ({"block_ids": (4,), "generations": (0,)}, "do not match"),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    book = book_with_source()
    ticket = dataclasses.replace(SOURCE.ticket("t", [4, 5]), **change)
    with pytest.raises(TransferFailed, match=message):
        book.begin(ticket, 0, [0, 1], now=0.0)
    assert book.num_blocks_filling == 0
    book.begin(SOURCE.ticket("t", [4, 5]), 0, [0, 1], now=0.0)  # the refusal did not use it


@pytest.mark.parametrize(
    ("first_block", "into", "message"),
    [
        (0, [0], "do not match"),
        (-1, [0], "do not match"),
        (3, [], "do not match"),
        (2, [], "nothing to copy"),
        (0, [0, 0], "named twice"),
        (0, [0, 32], "block 32"),
        (0, [-1, 0], "block -1"),
    ],
)
def test_blocks_here_that_do_not_fit_are_refused(
    first_block: int, into: list[int], message: str
) -> None:
    with pytest.raises(TransferFailed, match=message):
        book_with_source().begin(SOURCE.ticket("t", [4, 5]), first_block, into, now=0.0)


def test_used_tickets_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MAX_USED_TICKETS", 3)
    book = PullBook(READER.slab, "local")
    book.add_peer(SOURCE.peer())
    for number in range(5):
        book.end(book.begin(SOURCE.ticket(f"t{number}", [4]), 0, [0], now=0.0))
    for number in (2, 3, 4):
        with pytest.raises(TransferFailed, match="used already"):
            book.begin(SOURCE.ticket(f"t{number}", [4]), 0, [0], now=0.0)
    book.begin(SOURCE.ticket("t0", [4]), 0, [0], now=0.0)


def test_two_pulls_never_fill_one_block() -> None:
    book = book_with_source()
    first = book.begin(SOURCE.ticket("a", [4, 5]), 0, [0, 1], now=0.0)
    with pytest.raises(TransferFailed, match="still being filled"):
        book.begin(SOURCE.ticket("b", [6]), 0, [1], now=0.0)
    book.end(first)
    book.begin(SOURCE.ticket("b", [6]), 0, [1], now=0.0)


def test_a_new_epoch_replaces_the_old_one() -> None:
    book = book_with_source()
    restarted = dataclasses.replace(SOURCE.peer(), epoch=4)
    assert book.add_peer(SOURCE.peer()) == ((SOURCE.peer(),), (), False)
    assert book.add_peer(restarted) == ((restarted,), (SOURCE.peer(),), True)
    with pytest.raises(TransferFailed, match="epoch 4 now"):
        book.begin(SOURCE.ticket("t", [4]), 0, [0], now=0.0)
    assert book.peer_of(SOURCE.ticket("t", [4])) is None


def test_the_peer_used_least_recently_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MAX_PEERS", 2)
    book = PullBook(READER.slab, "local")
    peers = [dataclasses.replace(SOURCE.peer(), worker_id=name) for name in ("a", "b", "c")]
    assert book.add_peer(peers[0]).gone == () and book.add_peer(peers[1]).gone == ()
    ticket = dataclasses.replace(SOURCE.ticket("t", [4]), source_id="a")
    book.begin(ticket, 0, [0], now=0.0)
    assert book.add_peer(peers[2]).gone == (peers[1],)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "nixl"}, "'nixl', this worker with 'local'"),
        ({"layout": "qwen"}, "'qwen'.*'llama/bf16/16'"),
        ({"block_nbytes": 512}, "512 bytes.*256 bytes"),
        ({"worker_id": ""}, "cannot be"),
        ({"num_blocks": 0}, "cannot be"),
        ({"base_address": 0}, "cannot be"),
        ({"base_address": 2**64 - 1}, "cannot be"),
        ({"stamps_address": -8}, "cannot be"),
        ({"stamps_address": 4097}, "cannot be"),
        ({"num_blocks": 2**61}, "cannot be"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TransferFailed, match=message):
        PullBook(READER.slab, "local").add_peer(dataclasses.replace(SOURCE.peer(), **change))


def test_a_side_needs_a_name_and_one_stamp_per_block() -> None:
    with pytest.raises(StartupError, match="needs an id"):
        describe("local", READER.slab, Stamps(32, "", 1))
    with pytest.raises(StartupError, match="32 blocks, the stamp table 31"):
        describe("local", READER.slab, Stamps(31, "w", 1))


NUMBERS = st.one_of(st.integers(-2, 40), st.integers(-(2**70), 2**70))


@given(
    st.lists(NUMBERS, max_size=5),
    st.lists(NUMBERS, max_size=5),
    st.lists(NUMBERS, max_size=5),
    st.integers(-3, 6),
)
def test_no_ids_whatever_lead_outside_a_slab(
    block_ids: list[int], generations: list[int], into: list[int], first_block: int
) -> None:
    book = book_with_source()
    ticket = dataclasses.replace(
        SOURCE.ticket("t", [0]), block_ids=tuple(block_ids), generations=tuple(generations)
    )
    try:
        pull = book.begin(ticket, first_block, into, now=0.0)
    except TransferFailed:
        assert book.num_blocks_filling == 0
        return
    for source_block, local_block, num_blocks in pull.runs:
        assert 0 <= source_block < source_block + num_blocks <= 32
        assert 0 <= local_block < local_block + num_blocks <= 32
    assert book.num_blocks_filling == len(into) == sum(run.num_blocks for run in pull.runs)


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
