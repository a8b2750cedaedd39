"""NIXL between real processes: peers that die, hang, come back, lie."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from disagg.errors import StartupError, TransferFailed
from disagg.kvtransfer.nixl import nixl_xfer_handle
from disagg.kvtransfer.nixl_transport import EMPTY, NixlTransport
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone
from tests.kvtransfer.memory import Memory
from tests.kvtransfer.sides import finish, next_events
from tests.waiting import wait_until
from tests.worker.fake_ranks import FakeWorker

ROOT = Path(__file__).parent.parent.parent
TCP = {"TLS": "tcp,self"}  # needs the source's help to read; shared memory reads past a stopped one


class Source:
    """Talks to a `source_process`."""

    def __init__(
        self, epoch: int, block_nbytes: int, ucx: Mapping[str, str], num_ranks: int = 1
    ) -> None:
        module = "tests.kvtransfer.source_process"
        arguments = str(epoch), str(block_nbytes), json.dumps(dict(ucx)), str(num_ranks)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            bufsize=0,
        )
        self.memory = Memory("source", epoch=epoch, block_nbytes=block_nbytes)  # knows the contents
        self.peer = msgspec.json.decode(self._line(), type=Peer)

    def ticket(self, ticket_id: str, blocks: list[int]) -> KVTicket:
        reply = self._ask(f"ticket {ticket_id} {' '.join(map(str, blocks))}")
        return msgspec.json.decode(reply, type=KVTicket)

    def released(self) -> list[str]:
        return msgspec.json.decode(self._ask("released"), type=list[str])

    def churn(self) -> None:
        self._ask("churn")

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _ask(self, command: str) -> bytes:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        return self._line()

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


Start: TypeAlias = Callable[..., Source]
Open: TypeAlias = Callable[..., NixlTransport]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Source] = []

    def start(
        epoch: int = 1,
        block_nbytes: int = 256,
        ucx: Mapping[str, str] = EMPTY,
        num_ranks: int = 1,
    ) -> Source:
        started.append(Source(epoch, block_nbytes, ucx, num_ranks))
        return started[-1]

    yield start
    for source in started:
        if source.process.returncode is None:
            source.kill()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Source]:
    """One that no test ends, pauses or gives more to do than tickets: it takes seconds to start."""
    source = Source(1, 256, EMPTY)
    yield source
    source.end()


@pytest.fixture
def open_reader() -> Iterator[Open]:
    opened: list[NixlTransport] = []

    def open_reader(
        memory: Memory, *, ucx: Mapping[str, str] = EMPTY, pull_timeout_s: float = 30.0
    ) -> NixlTransport:
        side = NixlTransport(
            memory.slab,
            memory.stamps,
            clock=time.monotonic,
            interface="lo",
            ucx=ucx,
            pull_timeout_s=pull_timeout_s,
            settle_s=0.05,
        )
        opened.append(side)
        return side

    yield open_reader
    for side in opened:
        side.close()


@pytest.mark.parametrize(("num_source_ranks", "num_ranks"), [(1, 2), (2, 1), (2, 4)])
def test_workers_of_unlike_sizes_pull_from_each_other(
    num_source_ranks: int, num_ranks: int, start: Start, lasting: Source, open_reader: Open
) -> None:
    source = lasting if num_source_ranks == 1 else start(num_ranks=num_source_ranks)
    reader = FakeWorker(open_reader, "reader", num_ranks)
    reader.clear()
    reader.transport.add_peer(source.peer)
    ticket = source.ticket(f"for-{num_ranks}", [5, 6, 1])
    reader.transport.pull(ticket, 1, [0, 9])
    assert finish(reader.transport).error is None
    assert reader.holds_copy(source.memory, ticket, [0, 9], first=1)
    wait_until(lambda: ticket.ticket_id in source.released())


def test_a_killed_source_fails_pulls_and_its_successor_serves(
    start: Start, open_reader: Open
) -> None:
    memory = Memory("reader")
    reader = open_reader(memory)
    for epoch in range(1, 4):
        source = start(epoch)
        reader.add_peer(source.peer)
        ticket = source.ticket(f"good-{epoch}", [3, 4])
        reader.pull(ticket, 0, [7, 8])
        assert finish(reader).error is None
        assert memory.holds_copy(source.memory, ticket, [7, 8])
        late = source.ticket(f"late-{epoch}", [3, 4])
        source.kill()
        reader.pull(late, 0, [7, 8])
        assert finish(reader).error is not None
    with pytest.raises(TransferFailed, match="used already"):
        reader.pull(late, 0, [7, 8])


@pytest.mark.parametrize("ucx", [EMPTY, TCP], ids=["", "tcp"])
def test_a_source_that_died_before_the_handshake_fails_pulls(
    ucx: Mapping[str, str], start: Start, open_reader: Open
) -> None:
    source, memory = start(ucx=ucx), Memory("reader")
    tickets = [source.ticket(f"t{number}", [number]) for number in range(2)]
    source.kill()
    reader = open_reader(memory, ucx=ucx)
    reader.add_peer(source.peer)
    for ticket in tickets:
        reader.pull(ticket, 0, [0])
        assert finish(reader).error is not None


def test_a_source_killed_in_the_middle_of_pulls_fails_them_all(
    start: Start, open_reader: Open
) -> None:
    source, memory = start(ucx=TCP), Memory("reader")
    reader = open_reader(memory, ucx=TCP)
    reader.add_peer(source.peer)
    reader.pull(source.ticket("first", [0]), 0, [0])
    assert finish(reader).error is None
    tickets = [source.ticket(f"t{block}", [block]) for block in range(6)]
    source.pause()
    pending = {reader.pull(ticket, 0, [block]) for block, ticket in enumerate(tickets)}
    assert reader.poll() == []
    source.kill()
    for done in next_events(reader, num=len(pending)):
        assert isinstance(done, PullDone) and done.error is not None
        pending.remove(done.pull_id)
    assert pending == set()


def test_blocks_of_a_hanging_pull_stay_blocked_until_it_is_over(
    start: Start, open_reader: Open
) -> None:
    """The trap: the bytes of a given-up pull arrive when the source wakes up."""
    source, memory = start(ucx=TCP), Memory("reader")
    reader = open_reader(memory, ucx=TCP, pull_timeout_s=0.0)
    reader.add_peer(source.peer)
    reader.pull(source.ticket("warm-up", [0]), 0, [0])
    finish(reader)
    hanging, other = source.ticket("hanging", [1, 2, 3]), source.ticket("other", [4])
    memory.clear()
    source.pause()
    reader.pull(hanging, 0, [1, 2, 3])
    for _ in range(200):
        assert reader.poll() == []
        time.sleep(0.001)
    with pytest.raises(TransferFailed, match="still being filled"):
        reader.pull(other, 0, [2])
    source.resume()
    error = finish(reader).error
    assert error is not None and "did not arrive within" in error
    assert memory.holds_copy(source.memory, hanging, [1, 2, 3])  # late, and so not accepted


def test_closing_ends_even_a_hanging_pull(start: Start) -> None:
    source, memory = start(ucx=TCP), Memory("reader")
    reader = NixlTransport(
        memory.slab, memory.stamps, clock=time.monotonic, interface="lo", ucx=TCP
    )
    reader.add_peer(source.peer)
    reader.pull(source.ticket("warm-up", [0]), 0, [0])
    finish(reader)
    hanging = source.ticket("hanging", [1, 2, 3])
    memory.clear()
    source.pause()
    reader.pull(hanging, 0, [1, 2, 3])
    reader.close()
    source.resume()
    for _ in range(20):  # it is awake and has had its turn
        assert "hanging" not in source.released()
    assert memory.raw == bytes(len(memory.raw))


def test_no_accepted_pull_has_torn_content(start: Start, open_reader: Open) -> None:
    source, memory = start(block_nbytes=64 * 1024), Memory("reader", block_nbytes=64 * 1024)
    reader = open_reader(memory)
    reader.add_peer(source.peer)
    source.churn()
    rng = random.Random(3)
    outcomes = {True: 0, False: 0}
    while min(outcomes.values()) < 15:
        num_churning = rng.choice([0, 1, 2, 8])
        blocks = [*rng.sample(range(24), num_churning), *range(24, 32)]
        ticket = source.ticket(f"t{sum(outcomes.values())}", blocks)
        into = rng.sample(range(32), len(blocks))
        reader.pull(ticket, 0, into)
        done = finish(reader)
        accepted = done.error is None
        outcomes[accepted] += 1
        assert done.is_torn is not accepted
        assert not accepted or memory.holds_copy(source.memory, ticket, into)


def test_a_peer_that_promises_more_than_it_registered_fails_cleanly(
    lasting: Source, open_reader: Open
) -> None:
    source, memory = lasting, Memory("reader")
    reader = open_reader(memory)
    reader.add_peer(dataclasses.replace(source.peer, num_blocks=64))
    ticket = dataclasses.replace(source.ticket("t", [5]), block_ids=(40,))
    reader.pull(ticket, 0, [0])
    assert finish(reader).error is not None
    reader.pull(source.ticket("honest", [5]), 0, [0])
    assert finish(reader).error is None


@pytest.mark.parametrize("record", [b"", b"garbage", b"other"])
def test_a_wrong_connection_record_fails_the_pull_in_words(
    record: bytes, lasting: Source, open_reader: Open
) -> None:
    source, memory = lasting, Memory("reader")
    reader = open_reader(memory)
    if record == b"other":
        record = open_reader(Memory("other")).peer.agent
    reader.add_peer(dataclasses.replace(source.peer, agent=record))
    reader.pull(source.ticket("t", [5]), 0, [0])
    error = finish(reader).error
    assert error is not None and "source#1" in error


def test_a_thousand_pulls_leave_nothing_behind(open_reader: Open) -> None:
    source, memory = Memory("source"), Memory("reader")
    serving, reader = open_reader(source), open_reader(memory)
    reader.add_peer(serving.peer)
    resident = []
    for quarter in range(4):
        for number in range(250):
            ticket = source.ticket(f"{quarter}-{number}", [number % 31, number % 31 + 1])
            reader.pull(ticket, 0, [3, 8])
            assert finish(reader).error is None
            serving.poll()
        gc.collect()
        resident.append(resident_nbytes())
    handles = [each for each in gc.get_objects() if type(each) is nixl_xfer_handle]
    assert handles == []
    # What else is in this process may grow meanwhile, but a leak grows in every quarter.
    assert min(after - before for before, after in pairwise(resident)) < 1 << 20
    open_files = len(os.listdir("/proc/self/fd"))
    for epoch in range(2, 6):
        restarted = Memory("source", epoch=epoch)
        serving = open_reader(restarted)
        reader.add_peer(serving.peer)
        reader.pull(restarted.ticket(f"epoch-{epoch}", [1]), 0, [1])
        assert finish(reader).error is None
        serving.close()
    assert len(os.listdir("/proc/self/fd")) <= open_files + 8


def test_memory_that_is_not_there_is_refused_at_start() -> None:
    slab = Slab(4096, num_blocks=4, block_nbytes=4096, layout="l", device_id=0)
    with pytest.raises(StartupError, match=r"NIXL could not be started .*libnvidia-ml"):
        NixlTransport(slab, Stamps(4, "w", 1), clock=time.monotonic)


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_transport_with_nothing_to_do_uses_no_processor(open_reader: Open) -> None:
    """A thread that polls without a pause never sleeps."""
    threads = Path("/proc/self/task")
    before = set(threads.iterdir())
    open_reader(Memory("idle"))
    own, looks = set(threads.iterdir()) - before, deque[bool](maxlen=20)

    def sleep_each_time() -> bool:
        states = [(each / "stat").read_text().rpartition(")")[2].split()[0] for each in own]
        looks.append(set(states) == {"S"})
        return looks.count(True) == looks.maxlen

    assert own
    wait_until(sleep_each_time)
