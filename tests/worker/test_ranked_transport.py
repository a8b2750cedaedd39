"""Workers of several ranks: a pull is what all ranks pull, and ends when they have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from disagg.errors import TransferFailed
from disagg.kvtransfer import pulls
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.rank_messages import ConnectPeer, PullBlocks, encode
from tests.kvtransfer.memory import Memory
from tests.kvtransfer.test_local_transport import open_side
from tests.worker.fake_ranks import FakeWorker


def pair(num_source_ranks: int, num_ranks: int, num_heads: int = 8) -> tuple[FakeWorker, ...]:
    """A source and a reader that knows it."""
    opened = partial(open_side, LocalFleet())
    source = FakeWorker(opened, "source", num_source_ranks, num_heads)
    reader = FakeWorker(opened, "reader", num_ranks, num_heads)
    reader.clear()
    reader.transport.add_peer(source.transport.peer)
    return source, reader


@pytest.mark.parametrize("num_heads", [8, 2, 1])
@pytest.mark.parametrize("num_source_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_pull_ends_when_the_last_rank_has_its_part(
    num_source_ranks: int, num_ranks: int, num_heads: int
) -> None:
    source, reader = pair(num_source_ranks, num_ranks, num_heads)
    ticket = source.ticket("t", [3, 4, 9])
    for rank in reader.ranks[-1:]:
        rank.is_slow = True
    number = reader.transport.pull(ticket, 1, [0, 1])
    if reader.ranks:
        assert reader.transport.poll() == []
        assert source.transport.poll() == []  # its blocks are still needed
        reader.ranks[-1].is_slow = False
    (done,) = reader.transport.poll()
    assert isinstance(done, PullDone)
    nbytes = sum(2 * each.block_nbytes for each in reader.memories)
    assert (done.pull_id, done.error, done.num_blocks, done.nbytes) == (number, None, 2, nbytes)
    assert reader.holds_copy(source.memories[0], ticket, [0, 1], first=1)
    assert source.transport.poll() == [TicketReleased("t")]


@pytest.mark.parametrize("num_source_ranks", [1, 2, 4])
def test_a_pull_fails_if_one_rank_does(num_source_ranks: int) -> None:
    source, reader = pair(num_source_ranks, 2)
    ticket = source.ticket("t", [3])
    reader.ranks[0].is_slow = True
    reader.transport.pull(ticket, 0, [0])
    assert reader.transport.poll() == []  # the first rank has its part
    source.reuse(3)
    reader.ranks[0].is_slow = False
    (done,) = reader.transport.poll()
    assert isinstance(done, PullDone) and done.is_torn
    assert done.error is not None and "used the blocks again" in done.error
    assert source.transport.poll() == [TicketReleased("t")]


def test_a_worker_of_one_rank_pulls_from_one_of_two_without_more() -> None:
    """Its transport is that of workers of one rank, which tells the source itself."""
    opened = partial(open_side, LocalFleet())
    source, memory = FakeWorker(opened, "source", 2), Memory("alone")
    alone = opened(memory)
    alone.add_peer(source.transport.peer)
    ticket = source.ticket("t", [3, 4])
    alone.pull(ticket, 0, [7, 6])
    (done,) = alone.poll()
    assert isinstance(done, PullDone) and done.error is None
    assert memory.holds_copy(source.memories[0], ticket, [7, 6])
    assert source.transport.poll() == [TicketReleased("t")]


def test_a_source_that_lacks_a_rank_is_refused_in_words() -> None:
    source, reader = pair(2, 1)
    half = replace(source.transport.peer, ranks=())
    with pytest.raises(TransferFailed, match=r"bytes 0 to 128 of each block.* has byte 128"):
        reader.transport.add_peer(half)


def test_a_source_one_of_whose_ranks_does_not_fit_is_refused_in_words() -> None:
    source, reader = pair(2, 1)
    (other,) = source.transport.peer.ranks
    for change, words in (
        ({"layout": "qwen"}, "worker source stores KV as 'qwen'"),
        ({"num_blocks": 31}, "numbers that cannot be"),
        ({"part": None}, "blocks of 128 bytes, this worker .* of 256"),
    ):
        peer = replace(source.transport.peer, ranks=(replace(other, **change),))
        with pytest.raises(TransferFailed, match=words):
            reader.transport.add_peer(peer)


def test_ranks_are_told_of_a_source_once_and_again_when_they_have_forgotten_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls, "MAX_PEERS", 2)
    source, reader = pair(2, 2)
    (rank,) = reader.ranks
    rank.told.clear()

    def told() -> list[str]:
        return [task.peer.worker_id for task in rank.told if isinstance(task, ConnectPeer)]

    peer, add = source.transport.peer, reader.transport.add_peer
    add(peer)
    assert not told()
    restarted = replace(peer, epoch=2)
    add(restarted)
    add(replace(restarted))  # as it comes with each request
    add(peer)
    assert told() == ["source", "source"]
    add(replace(peer, worker_id="second"))
    reader.transport.pull(source.ticket("t", [3]), 0, [0])
    add(replace(peer, worker_id="third"))
    add(peer)
    add(replace(peer, worker_id="second"))  # was used least recently
    assert told()[2:] == ["second", "third", "second"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ranks_forget_a_source_that_has_left(num_ranks: int) -> None:
    source, reader = pair(2, num_ranks)
    reader.transport.forget_peer("source")
    with pytest.raises(TransferFailed, match="source is not known here"):
        reader.transport.pull(source.ticket("t", [3]), 0, [0])
    for rank in reader.ranks:
        with pytest.raises(TransferFailed, match="source is not known here"):
            rank.tell(encode(PullBlocks(1, source.ticket("t", [3]), 0, [0])))
    reader.transport.add_peer(source.transport.peer)
    reader.transport.pull(source.ticket("t", [3]), 0, [0])
    (done,) = reader.transport.poll()
    assert isinstance(done, PullDone) and done.error is None


def test_its_own_record_is_ignored() -> None:
    _, reader = pair(2, 2)
    reader.transport.add_peer(reader.transport.peer)
    with pytest.raises(TransferFailed, match="not known here"):
        reader.transport.pull(reader.ticket("t", [3]), 0, [0])
