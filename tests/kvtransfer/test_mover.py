"""Any fault at any step of the wire: every pull ends once, and no unfinished transfer is let go."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.kvtransfer.mover import (
    MAX_UNREAD_NOTICES,
    Close,
    Connect,
    Job,
    Look,
    Mover,
    Notice,
    Notify,
    PullEnded,
    agent_name,
)
from disagg.kvtransfer.pulls import ByteRange, PullBook
from disagg.kvtransfer.slab import Slab
from disagg.kvtransfer.ticket import Peer
from disagg.kvtransfer.transport import TicketReleased
from tests.kvtransfer.memory import Memory, peer_of, rank_memories


class Fault(Exception):
    """Like NIXL's errors, of no family."""


@dataclass
class Reading:
    pieces: Sequence[ByteRange]
    looks: int  # until it is done
    posted: bool = False
    ended: bool = False
    released: bool = False


class FaultyWire:
    """Copies with memmove, `slowness` looks after the post, or twice as many in turn; raises when
    `fails` says so.

    Args:
        fails: is told the step and how many times it was taken before.
    """

    def __init__(self, fails: Callable[[str, int], bool], slowness: int = 0) -> None:
        self._fails = fails
        self._steps: Counter[str] = Counter()
        self._slowness = slowness
        self.readings: list[Reading] = []
        self.sent: list[tuple[str, bytes]] = []
        self.inbox: list[bytes] = []
        self.connected: Counter[str] = Counter()
        self.closed = False
        self.misuse: list[str] = []  # the mover survives exceptions, so they would hide it

    def _step(self, name: str) -> None:
        number = self._steps[name]
        self._steps[name] += 1
        if self._fails(name, number):
            raise Fault(f"{name} {number}")

    def connect(self, record: bytes) -> str:
        self._step("connect")
        self.connected[record.decode()] += 1
        return record.decode()

    def forget(self, name: str) -> None:
        if any(reading.posted and not reading.ended for reading in self.readings):
            self.misuse.append(f"forgot {name} during a transfer")
        self.connected[name] -= 1
        self._step("forget")

    def read_blocks(self, peer: Peer, pieces: Sequence[ByteRange]) -> Reading:
        return self._read(peer, pieces)

    def read_stamps(self, peer: Peer, pieces: Sequence[ByteRange]) -> Reading:
        return self._read(peer, pieces)

    def _read(self, peer: Peer, pieces: Sequence[ByteRange]) -> Reading:
        self._step("prepare")
        if self.connected[agent_name(peer)] != 1:
            self.misuse.append(f"read from {agent_name(peer)} without a connection")
        self.readings.append(Reading(pieces, self._slowness * (1 + len(self.readings) % 2)))
        return self.readings[-1]

    def post(self, transfer: Reading) -> None:
        transfer.posted = True
        try:
            self._step("post")
        except Fault:
            transfer.ended = True
            raise

    def is_done(self, transfer: Reading) -> bool:
        try:
            self._step("is_done")
        except Fault:
            transfer.ended = True
            raise
        if transfer.looks > 0:
            transfer.looks -= 1
            return False
        for local_address, remote_address, nbytes in transfer.pieces:
            ctypes.memmove(local_address, remote_address, nbytes)
        transfer.ended = True
        return True

    def release(self, transfer: Reading) -> None:
        if transfer.posted and not transfer.ended:
            self.misuse.append("released a transfer under way")
        if transfer.released:
            self.misuse.append("released a transfer twice")
        self._step("release")
        transfer.released = True

    def notify(self, name: str, message: bytes) -> None:
        self._step("notify")
        if message:
            self.sent.append((name, message))

    def messages(self) -> list[bytes]:
        self._step("messages")
        messages, self.inbox = self.inbox, []
        return messages

    def close(self) -> None:
        self.closed = True
        self._step("close")


class Notices(SimpleQueue[Notice]):
    """Notes in `wire.misuse` what ends while its blocks may still be written."""

    def __init__(self, wire: FaultyWire, slab: Slab) -> None:
        self._wire, self._slab = wire, slab

    def put(self, item: Notice, *args: Any) -> None:
        if isinstance(item, PullEnded):
            size = self._slab.block_nbytes
            begins = [self._slab.address(block) for block in item.pull.local_blocks]
            for reading in self._wire.readings:
                if reading.posted and not reading.ended:
                    written = [piece.local_address for piece in reading.pieces]
                    if any(0 <= at - begin < size for at in written for begin in begins):
                        self._wire.misuse.append(f"pull {item.pull.pull_id} ended too early")
        super().put(item, *args)


class Bench:
    """A source, a reader and a mover that runs when told to, on a clock that counts calls.

    Args:
        num_ranks: of the source.
    """

    def __init__(
        self,
        wire: FaultyWire,
        pull_timeout_s: float = 1e6,
        settle_s: float = 0.01,
        before_pull: Callable[[], None] = lambda: None,
        num_ranks: int = 1,
    ) -> None:
        self.wire = wire
        self.ranks, self.reader = rank_memories("source", num_ranks), Memory("reader")
        self.source = self.ranks[0]
        self.peer = peer_of([m.peer(agent=f"{m.worker_id}#1".encode()) for m in self.ranks])
        self.book = PullBook(self.reader.slab, "local")
        self.book.add_peer(self.peer)
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.notices: SimpleQueue[Notice] = Notices(wire, self.reader.slab)
        ticks = itertools.count()
        self.mover = Mover(
            wire,
            self.reader.slab,
            array("Q", bytes(self.reader.stamps.nbytes)),
            self.jobs,
            self.notices,
            clock=lambda: next(ticks) * 1e-3,
            pull_timeout_s=pull_timeout_s,
            settle_s=settle_s,
            before_pull=before_pull,
        )

    def pull(self, blocks: list[int], into: list[int], *, releases: bool = True) -> int:
        ticket = self.source.ticket(f"t{blocks}-{into}", blocks)
        pull = self.book.begin(ticket, 0, into, 0.0, releases)
        self.jobs.put(pull)
        return pull.pull_id

    def rest(self) -> None:
        """Let the blocks of a broken transfer rest, until its peer is forgotten."""
        for _ in range(41):
            self.jobs.put(Look())

    def reuse(self, block_id: int) -> None:
        self.source.reuse(block_id)
        for each in self.ranks[1:]:
            each.fill(block_id)

    def run(self) -> list[Notice]:
        self.jobs.put(Close())
        self.mover.run()
        assert self.wire.closed and self.wire.misuse == []
        return [self.notices.get_nowait() for _ in range(self.notices.qsize())]


def never(step: str, number: int) -> bool:
    return False


STEPS = ["connect", "forget", "prepare", "post", "is_done", "release", "notify", "close"]


@given(
    st.sets(st.tuples(st.sampled_from(STEPS), st.integers(0, 12)), max_size=5),
    st.integers(0, 3),
    st.sampled_from([1, 2, 4]),
)
def test_whatever_fails_every_pull_ends_once_and_only_intact_ones_succeed(
    faults: set[tuple[str, int]], slowness: int, num_ranks: int
) -> None:
    wire = FaultyWire(lambda step, number: (step, number) in faults, slowness)
    bench = Bench(wire, num_ranks=num_ranks)
    bench.jobs.put(Connect((bench.peer, *bench.peer.ranks), ()))
    bench.reuse(9)
    pulls = [
        bench.pull([number * 4, number * 4 + 1], [number * 2, 31 - number]) for number in range(5)
    ]
    bench.reuse(8)
    ended = [notice for notice in bench.run() if isinstance(notice, PullEnded)]
    assert sorted(notice.pull.pull_id for notice in ended) == pulls
    for notice in ended:
        intact = bench.reader.holds_copy(
            bench.source, notice.pull.ticket, list(notice.pull.local_blocks)
        )
        assert intact or notice.error is not None
        if not faults:
            assert (notice.error is None) == (8 not in notice.pull.ticket.block_ids)
    if not any(step == "release" for step, _ in faults):
        assert all(reading.released for reading in bench.wire.readings)
    told = [message for _, message in bench.wire.sent]
    assert len(told) == len(set(told))


@pytest.mark.parametrize("step", ["connect", "prepare", "post", "is_done", "release"])
def test_a_fault_is_named_and_the_next_pull_goes_well(step: str) -> None:
    bench = Bench(FaultyWire(lambda name, number: (name, number) == (step, 0)))
    first = bench.pull([1], [1])
    bench.rest()
    second = bench.pull([2], [2])
    ended = {n.pull.pull_id: n.error for n in bench.run() if isinstance(n, PullEnded)}
    assert f"{step} 0" in (ended[first] or "")
    assert ended[second] is None


@pytest.mark.parametrize("is_told_later", [False, True])
@pytest.mark.parametrize("step", ["post", "is_done", "notify"])
def test_a_source_that_lives_hears_of_a_ticket_whose_pull_broke(
    step: str, is_told_later: bool
) -> None:
    """Also when the other ranks of its reader have ended, which is later than this rank, whose
    connection was taken down meanwhile."""
    first = 1 if step == "notify" else 0  # the first notification sets the connection up
    bench = Bench(FaultyWire(lambda name, number: (name, number) == (step, first)))
    bench.pull([1], [1], releases=not is_told_later)
    bench.rest()
    if is_told_later:
        bench.jobs.put(Notify(bench.peer, "t[1]-[1]"))
    bench.run()
    assert bench.wire.sent == [("source#1", b"t[1]-[1]")]


def test_a_pull_from_two_ranks_waits_for_the_other_one_when_one_breaks() -> None:
    """Which may still write into the blocks: `Notices` would note that they were given back."""
    wire = FaultyWire(lambda name, number: (name, number) == ("is_done", 0), slowness=50)
    bench = Bench(wire, settle_s=0.01, num_ranks=2)
    bench.pull([1], [1])
    (ended,) = bench.run()
    assert isinstance(ended, PullEnded) and "is_done 0" in str(ended.error)
    first, second = bench.wire.readings
    assert first.ended and second.ended and second.looks == 0
    assert bench.wire.sent == [("source#1", b"t[1]-[1]")]


@pytest.mark.parametrize("steps", [{"connect"}, {"notify"}, {"connect", "notify"}])
def test_a_dead_source_is_told_once_more_and_then_no_more(steps: set[str]) -> None:
    bench = Bench(FaultyWire(lambda name, number: name in steps and number > 0))
    bench.pull([1], [1])
    bench.rest()
    bench.run()
    assert bench.wire._steps["connect"] <= 2 and bench.wire._steps["notify"] <= 4


@pytest.mark.parametrize("step", ["post", "is_done"])
def test_the_blocks_of_a_broken_transfer_rest_before_they_are_given_back(step: str) -> None:
    bench = Bench(FaultyWire(lambda name, number: name == step), settle_s=0.5)
    bench.pull([1], [1])
    (ended,) = bench.run()
    assert isinstance(ended, PullEnded) and ended.error is not None and ended.seconds >= 0.5


def test_a_late_pull_is_not_accepted_and_its_transfer_not_let_go() -> None:
    bench = Bench(FaultyWire(never, slowness=50), pull_timeout_s=0.005)
    bench.pull([1], [1])
    (ended,) = bench.run()
    assert isinstance(ended, PullEnded)
    assert ended.error is not None and "did not arrive within" in ended.error
    (reading,) = bench.wire.readings  # no stamps were read
    assert reading.ended and reading.released


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_peer_that_has_left_is_forgotten_after_its_last_pull(is_replaced: bool) -> None:
    bench = Bench(FaultyWire(never, slowness=30))
    bench.pull([1], [1])
    gone = bench.book.forget_peer("source")
    successors = (Memory("source", epoch=2).peer(agent=b"source#2"),) if is_replaced else ()
    bench.jobs.put(Connect(successors, gone))  # `forget` looks for pulls under way
    (ended,) = bench.run()
    assert isinstance(ended, PullEnded) and ended.error is None
    assert bench.wire.connected == {"source#1": 0} | ({"source#2": 1} if is_replaced else {})


def test_blocks_are_not_written_before_their_earlier_content_is_saved() -> None:
    saved: list[int] = []
    bench = Bench(FaultyWire(never), before_pull=lambda: saved.append(len(bench.wire.readings)))
    bench.pull([1], [1])
    bench.pull([2], [2])
    first, second = bench.run()
    assert isinstance(first, PullEnded) and isinstance(second, PullEnded)
    assert first.error is None and second.error is None
    assert len(saved) == 2 and saved[0] == 0

    def fails() -> None:
        raise RuntimeError("the device is lost")

    bench = Bench(FaultyWire(never), before_pull=fails)
    bench.pull([1], [1])
    (ended,) = bench.run()
    assert isinstance(ended, PullEnded) and "the device is lost" in str(ended.error)
    assert not bench.wire.readings, "nothing was asked of the wire"


def test_a_record_of_somebody_else_is_refused() -> None:
    bench = Bench(FaultyWire(never))
    bench.peer = bench.source.peer(agent=b"mallory#1")
    bench.book.add_peer(bench.peer)
    bench.pull([1], [1])
    (ended,) = bench.run()
    assert isinstance(ended, PullEnded)
    assert ended.error is not None and "source#1 belongs to mallory#1" in ended.error
    assert bench.wire.connected["mallory#1"] == 0


def test_messages_become_released_tickets_within_bounds() -> None:
    bench = Bench(FaultyWire(never))
    bench.wire.inbox = [b"t1", b"", b"x" * 257, b"\xff\xfe", *[b"flood"] * MAX_UNREAD_NOTICES]
    bench.jobs.put(Look())
    notices = bench.run()
    assert notices[:3] == [
        TicketReleased("t1"),
        TicketReleased("\ufffd\ufffd"),
        TicketReleased("flood"),
    ]
    assert len(notices) == MAX_UNREAD_NOTICES


def test_releases_reach_known_peers_only() -> None:
    bench = Bench(FaultyWire(never))
    bench.jobs.put(Notify(bench.peer, "before the connection"))
    bench.jobs.put(Connect((bench.peer,), ()))
    bench.jobs.put(Notify(bench.peer, "t1"))
    assert bench.run() == []
    assert bench.wire.sent == [("source#1", b"t1")]
