"""Who gets in, what is sent per step, and that a slow or rude ingress costs the worker nothing."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import Counter
from typing import Any

import pytest

from disagg.errors import StartupError
from disagg.links import reports, server
from disagg.links.connection import HEADER, MAX_HANDSHAKE_NBYTES, frame, prove
from disagg.links.server import LinkClosed, LinkServer, choose_home
from disagg.messages import (
    WIRE_VERSION,
    Cancel,
    Challenge,
    Frequency,
    Hello,
    KVEvent,
    Peers,
    Refused,
    Resync,
    Snapshot,
    Start,
    StepFrame,
    ToIngress,
    TokenDelta,
    ToWorker,
    Welcome,
    WorkerStatus,
    decode_to_ingress,
    encode,
)
from tests.links.fakes import KEY, FakeWorker, fake_worker, make_record, make_request, until

BUSY = WorkerStatus(num_running=1)


class RawIngress:
    """Speaks the protocol by hand, so that it can also speak it wrongly."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def __aenter__(self) -> RawIngress:
        record = self._worker.record
        self._reader, self._writer = await asyncio.open_connection(record.host, record.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def read(self) -> ToIngress:
        async with asyncio.timeout(60):
            (nbytes,) = HEADER.unpack(await self._reader.readexactly(4))
            return decode_to_ingress(await self._reader.readexactly(nbytes))

    async def is_closed(self) -> bool:
        async with asyncio.timeout(60):
            try:
                return await self._reader.read() == b""
            except ConnectionResetError:
                return True

    def write(self, message: ToWorker) -> None:
        self._writer.write(frame(encode(message)))

    def write_raw(self, raw: bytes) -> None:
        self._writer.write(raw)

    async def greet(self, key: bytes = KEY, version: int = WIRE_VERSION) -> ToIngress:
        challenge = await self.read()
        assert isinstance(challenge, Challenge)
        proof = prove(key, "ingress", (challenge.nonce, b"mine"), b"raw")
        self.write(Hello(version, "raw", proof, b"mine"))
        return await self.read()


async def test_a_link_gets_a_snapshot_and_then_one_numbered_frame_per_step() -> None:
    async with fake_worker() as worker, RawIngress(worker) as ingress:
        worker.held = [b"a" * 16]
        assert isinstance(await ingress.greet(), Welcome)
        assert await ingress.read() == Snapshot(0, (b"a" * 16,), WorkerStatus(num_blocks=64))
        event = KVEvent("stored", (b"b" * 16,))
        worker.step({1: [TokenDelta(7, (1,)), TokenDelta(9, (2,))]}, [event], BUSY)
        worker.step({1: [TokenDelta(7, (3,))]}, (), BUSY)
        first = StepFrame(1, (TokenDelta(7, (1,)), TokenDelta(9, (2,))), (event,), BUSY)
        assert await ingress.read() == first
        assert await ingress.read() == StepFrame(2, (TokenDelta(7, (3,)),))  # no other load


async def test_a_step_with_nothing_for_a_link_sends_nothing() -> None:
    async with fake_worker(heartbeat_s=60) as worker, RawIngress(worker) as ingress:
        await ingress.greet()
        await ingress.read()
        worker.step(status=BUSY)
        worker.step(status=BUSY)
        worker.step({99: [TokenDelta(1, (1,))]}, status=BUSY)
        worker.step(status=WorkerStatus())
        assert await ingress.read() == StepFrame(1, (), (), BUSY)
        assert await ingress.read() == StepFrame(2, (), (), WorkerStatus())


async def test_an_idle_link_hears_a_heartbeat() -> None:
    async with fake_worker(heartbeat_s=0.01) as worker, RawIngress(worker) as ingress:
        await ingress.greet()
        await ingress.read()
        assert [await ingress.read() for _ in range(3)] == [StepFrame(n, ()) for n in (1, 2, 3)]


async def test_a_large_snapshot_comes_in_parts_and_what_happens_meanwhile_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One frame would hold up both loops, and a name that was evicted meanwhile must not return."""
    names = tuple(bytes([number]) * 16 for number in range(10))
    for module in (server, reports):
        monkeypatch.setattr(module, "PART_NUM_BLOCKS", 3)
    async with fake_worker(heartbeat_s=60) as worker, RawIngress(worker) as ingress:
        worker.answers_resync = False
        await ingress.greet()
        worker.server.publish_snapshot(1, names[:7], BUSY, names[7:])
        removed = KVEvent("removed", (names[6],))
        worker.step({1: [TokenDelta(7, (1,))]}, [removed], BUSY)
        frames = [await ingress.read() for _ in range(6)]
        assert frames[0] == Snapshot(0, names[:3], BUSY)
        assert frames[1] == StepFrame(1, (TokenDelta(7, (1,)),))  # tokens do not wait
        assert [each.kv_events for each in frames[2:] if isinstance(each, StepFrame)] == [
            (KVEvent("stored", names[3:6]),),
            (KVEvent("stored", names[6:7]),),
            (KVEvent("stored", names[7:], "host"),),
            (removed,),
        ]


async def test_an_answer_without_a_step_is_none_of_the_reports_after_a_request() -> None:
    """Else a request for a prefix would end the router's count of reports too early."""
    async with fake_worker(heartbeat_s=60) as worker, RawIngress(worker) as ingress:
        await ingress.greet()
        await ingress.read()
        ingress.write(Frequency(60.0))
        ingress.write(Start(1, make_request()))
        await until(lambda: worker.of_type(Start))
        worker.server.answer(1, TokenDelta(2, (), finish_reason="stop"))
        worker.server.answer(99, TokenDelta(1, ()))
        steps = [WorkerStatus(num_running=number) for number in (1, 2)]
        for status in steps:
            worker.step(status=status)
        answer, *reports = [await ingress.read() for _ in range(3)]
        assert answer == StepFrame(1, (TokenDelta(2, (), finish_reason="stop"),))
        assert [each.status for each in reports if isinstance(each, StepFrame)] == steps


async def test_messages_arrive_in_order_and_the_end_of_a_link_is_the_last() -> None:
    async with fake_worker() as worker:
        async with RawIngress(worker) as ingress:
            await ingress.greet()
            ingress.write(Peers((make_record().peer,)))
            ingress.write(Cancel(3))
            await until(lambda: len(worker.received) == 3)
        await until(lambda: worker.of_type(LinkClosed))
        assert [message for _, message in worker.received] == [
            Resync(),
            Peers((make_record().peer,)),
            Cancel(3),
            LinkClosed("the other side hung up"),
        ]
        assert not worker.server._links
        worker.step({1: [TokenDelta(1, (1,))]})


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        ({"key": b"guess"}, "cluster_key"),
        ({"version": WIRE_VERSION + 1}, f"version {WIRE_VERSION + 1}"),
    ],
    ids=["key", "version"],
)
async def test_a_stranger_is_refused_in_words(greeting: Any, words: str) -> None:
    async with fake_worker() as worker, RawIngress(worker) as ingress:
        answer = await ingress.greet(**greeting)
        assert isinstance(answer, Refused) and words in answer.reason
        assert await ingress.is_closed()
        assert worker.received == []


async def test_a_proof_cannot_be_used_for_another_connection() -> None:
    async with fake_worker() as worker:
        async with RawIngress(worker) as ingress:
            challenge = await ingress.read()
            assert isinstance(challenge, Challenge)
            proof = prove(KEY, "ingress", (challenge.nonce, b"mine"), b"raw")
        async with RawIngress(worker) as ingress:
            await ingress.read()
            ingress.write(Hello(WIRE_VERSION, "raw", proof, b"mine"))
            assert isinstance(await ingress.read(), Refused)


@pytest.mark.parametrize(
    "raw",
    [
        HEADER.pack(MAX_HANDSHAKE_NBYTES + 1),
        frame(b"\xc1"),
        frame(encode(Cancel(1))),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["oversize", "not msgpack", "before hello", "http"],
)
async def test_a_stranger_who_speaks_wrongly_is_cut_off(raw: bytes) -> None:
    async with fake_worker() as worker, RawIngress(worker) as ingress:
        await ingress.read()
        ingress.write_raw(raw)
        assert await ingress.is_closed()
        assert worker.received == []


async def test_a_silent_stranger_is_cut_off() -> None:
    async with fake_worker(handshake_timeout_s=0.02) as worker, RawIngress(worker) as ingress:
        await ingress.read()
        assert await ingress.is_closed()


async def test_a_connection_that_is_heard_of_after_the_end_is_not_kept() -> None:
    """The loop may have accepted it just before the server closed."""
    loop = asyncio.get_running_loop()
    async with fake_worker() as worker:
        await worker.server.close()
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname()),
        ):
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            _, link = await loop.connect_accepted_socket(
                lambda: server._IngressLink(worker.server), accepted
            )
            await asyncio.wait_for(link.ended, timeout=60)
            assert link.reason == "the worker shuts down"
    assert worker.received == []


@pytest.mark.parametrize("num_turns", range(5))
def test_who_was_accepted_while_it_closes_is_gone_when_it_has_closed(num_turns: int) -> None:
    """The loop accepts a connection some turns before anybody hears of it."""

    async def close_early() -> list[asyncio.Transport]:
        worker = server.LinkServer(key=KEY, record=make_record(), receive=lambda *_: None)
        record = await worker.start()
        address = (record.host, record.port)
        ingress.extend(socket.create_connection(address) for _ in range(3))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await worker.close()
        loop: Any = asyncio.get_running_loop()
        return [each for each in loop._transports.values() if each._sock is not None]

    ingress: list[socket.socket] = []
    try:
        assert not asyncio.run(close_early())
        gc.collect()  # which warns of connections that nobody has closed
    finally:
        for each in ingress:
            each.close()


async def test_a_crowd_of_strangers_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_NUM_STRANGERS", 1)
    async with fake_worker() as worker, RawIngress(worker) as first:
        async with RawIngress(worker) as second:
            assert await second.is_closed()
        assert isinstance(await first.greet(), Welcome)
        async with RawIngress(worker) as third:
            assert isinstance(await third.greet(), Welcome)


async def test_a_second_hello_ends_the_link() -> None:
    async with fake_worker() as worker, RawIngress(worker) as ingress:
        await ingress.greet()
        await ingress.read()
        ingress.write(Hello(WIRE_VERSION, "raw", b"", b""))
        assert await ingress.is_closed()
        assert [type(message) for _, message in worker.received] == [Resync, LinkClosed]


async def test_an_oversize_frame_after_the_handshake_ends_only_that_link() -> None:
    async with fake_worker() as worker, RawIngress(worker) as rude, RawIngress(worker) as polite:
        await rude.greet()
        await polite.greet()
        await polite.read()
        rude.write_raw(HEADER.pack((64 << 20) + 1))
        await until(lambda: worker.of_type(LinkClosed))
        (closed,) = worker.of_type(LinkClosed)
        assert "announced" in closed.reason
        worker.step(status=BUSY)
        assert await polite.read() == StepFrame(1, (), (), BUSY)


async def test_a_reader_that_stops_reading_loses_its_link() -> None:
    async with fake_worker(max_buffer_nbytes=1 << 16) as worker, RawIngress(worker) as ingress:
        await ingress.greet()
        await until(lambda: worker.received)
        many = [TokenDelta(1, tuple(range(1000)))] * 20
        for _ in range(2000):
            worker.step({1: many})
            if not worker.server._links:
                break
            await asyncio.sleep(0)
        (closed,) = worker.of_type(LinkClosed)
        assert "reads too slowly" in closed.reason


async def test_close_lets_what_was_published_arrive() -> None:
    async with fake_worker() as worker, RawIngress(worker) as ingress:
        await ingress.greet()
        await ingress.read()
        worker.step({1: [TokenDelta(1, (1,), "stop")]}, status=BUSY)
        await worker.server.close()
        assert await ingress.read() == StepFrame(1, (TokenDelta(1, (1,), "stop"),), (), BUSY)
        assert await ingress.is_closed()


async def test_an_address_that_cannot_be_bound_is_a_startup_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        record = make_record(port=taken.getsockname()[1])
        server = FakeWorker(record).server
        with pytest.raises(StartupError, match="link_host"):
            await server.start()


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(StartupError, match="cluster key is empty"):
        LinkServer(key=b"", record=make_record(), receive=lambda link_id, message: None)


# Homes of workers


HOMED = [f"worker-{number}" for number in range(400)]
INGRESSES = ["a", "b", "c", "d"]


def test_ingresses_share_the_workers_about_evenly() -> None:
    counts = Counter(choose_home(worker, INGRESSES) for worker in HOMED)
    assert set(counts) == set(INGRESSES) and min(counts.values()) > 70


def test_an_ingress_that_goes_moves_only_its_own() -> None:
    before = {worker: choose_home(worker, INGRESSES) for worker in HOMED}
    after = {worker: choose_home(worker, ["d", "b", "a"]) for worker in HOMED}
    assert {before[worker] for worker in HOMED if before[worker] != after[worker]} == {"c"}


def test_a_single_ingress_has_no_share() -> None:
    assert (
        choose_home("worker", ["a"])
        == choose_home("worker", ["a", "a"])
        == choose_home("worker", [])
        == ""
    )
