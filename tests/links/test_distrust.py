"""A worker that is another one, skips, speaks wrongly or falls silent is left, and why is said."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from disagg.errors import WorkerLost
from disagg.links.connection import HEADER, frame, prove
from disagg.messages import (
    WIRE_VERSION,
    Cancel,
    Challenge,
    Hello,
    KVEvent,
    Resync,
    Snapshot,
    Start,
    StepFrame,
    ToIngress,
    TokenDelta,
    ToWorker,
    Welcome,
    WorkerStatus,
    decode_to_worker,
    encode,
)
from tests.deltas import open_stream
from tests.links.fakes import (
    KEY,
    RecordingObserver,
    collect,
    fake_worker,
    linked,
    make_record,
    make_request,
    pair,
    until,
)


async def test_a_wrong_key_leaves_the_worker_unlinked_and_says_why() -> None:
    observer = RecordingObserver()
    async with fake_worker() as worker, linked(worker.record, observer, key=b"guess") as link:
        await until(lambda: "cluster_key" in link.last_error)
        assert not link.is_up
        assert observer.calls == []
        with pytest.raises(WorkerLost, match="cluster_key"):
            await collect(open_stream(link, make_request()))


async def test_another_worker_behind_the_address_is_not_taken_for_ours() -> None:
    observer = RecordingObserver()
    async with fake_worker(make_record(epoch=2)) as worker:
        stale = make_record(epoch=1, port=worker.record.port)
        async with linked(stale, observer) as link:
            await until(lambda: "epoch 2 answers" in link.last_error)
            assert observer.calls == []


class RawWorker:
    """A worker that speaks the protocol by hand, so that it can also speak it wrongly."""

    def __init__(self, key: bytes = KEY, version: int = WIRE_VERSION) -> None:
        self.received: list[ToWorker] = []
        self.record = make_record()
        self._key = key
        self._version = version
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> RawWorker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.record = make_record(port=self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0.01)

    def write(self, message: ToIngress) -> None:
        self._writers[-1].write(frame(encode(message)))

    def write_raw(self, raw: bytes) -> None:
        self._writers[-1].write(raw)

    async def until_started(self) -> None:
        await until(lambda: any(isinstance(message, Start) for message in self.received))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.write(Challenge(self._version, b"theirs"))
        try:
            while True:
                (nbytes,) = HEADER.unpack(await reader.readexactly(4))
                message = decode_to_worker(await reader.readexactly(nbytes))
                self.received.append(message)
                if isinstance(message, Hello):
                    proof = prove(
                        self._key, "worker", (b"theirs", message.nonce), encode(self.record)
                    )
                    self.write(Welcome(proof, self.record))
                    self.write(Snapshot(0, (), WorkerStatus()))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def test_a_gap_ends_the_streams_and_asks_for_a_snapshot() -> None:
    observer = RecordingObserver()
    async with RawWorker() as worker, linked(worker.record, observer) as link:
        await until(lambda: observer.held)
        task = asyncio.create_task(collect(open_stream(link, make_request())))
        await worker.until_started()
        worker.write(StepFrame(1, (TokenDelta(1, (1,)),), (), WorkerStatus()))
        worker.write(StepFrame(3, (TokenDelta(1, (3,)),), (), WorkerStatus()))
        with pytest.raises(WorkerLost, match="lost frames before number 3"):
            await asyncio.wait_for(task, 60)
        await until(lambda: Resync() in worker.received)
        assert worker.received[-2:] == [Cancel(1), Resync()]
        assert observer.held == {}
        worker.write(StepFrame(4, (), (KVEvent("stored", (b"a" * 16,)),), WorkerStatus()))
        worker.write(Snapshot(9, (b"a" * 16,), WorkerStatus()))
        worker.write(StepFrame(10, (), (KVEvent("stored", (b"b" * 16,)),), WorkerStatus()))
        await until(lambda: observer.held.get("decode-0") == {b"a" * 16, b"b" * 16})
        assert link.is_up


@pytest.mark.parametrize(
    "worker, reason",
    [
        (RawWorker(version=WIRE_VERSION + 1), "same release of disagg everywhere"),
        (RawWorker(key=b"guess"), "worker does not know this cluster's key"),
    ],
    ids=["version", "key"],
)
async def test_a_worker_that_cannot_be_trusted_is_refused(worker: RawWorker, reason: str) -> None:
    observer = RecordingObserver()
    async with worker, linked(worker.record, observer) as link:
        await until(lambda: reason in link.last_error)
        assert observer.calls == []


@pytest.mark.parametrize(
    "raw, reason",
    [
        (HEADER.pack((64 << 20) + 1), "announced"),
        (frame(b"\xc1"), "cannot be understood"),
        (frame(encode(Challenge(WIRE_VERSION, b"again"))), "after the handshake"),
        (frame(encode(StepFrame(1, (), (KVEvent("stored", (b"short",)),)))), "length >= 16"),
    ],
    ids=["oversize", "not msgpack", "wrong time", "no name of a block"],
)
async def test_a_worker_that_speaks_wrongly_is_left(raw: bytes, reason: str) -> None:
    observer = RecordingObserver()
    async with RawWorker() as worker, linked(worker.record, observer) as link:
        await until(lambda: observer.held)
        task = asyncio.create_task(collect(open_stream(link, make_request())))
        await worker.until_started()
        worker.write_raw(raw)
        with pytest.raises(WorkerLost, match=reason):
            await asyncio.wait_for(task, 60)


async def test_a_worker_that_falls_silent_is_left() -> None:
    observer = RecordingObserver()
    async with RawWorker() as worker, linked(worker.record, observer, silence_s=0.05) as link:
        await until(lambda: observer.held)
        with pytest.raises(WorkerLost, match="silent"):
            await asyncio.wait_for(collect(open_stream(link, make_request())), 60)


async def test_a_worker_that_stops_reading_is_left() -> None:
    async with pair(max_buffer_nbytes=1 << 16) as (worker, link, observer):
        (server_link,) = worker.server._links.values()
        assert server_link._transport is not None
        server_link._transport.pause_reading()
        tasks = []
        for turn in range(200):
            request = make_request(f"request-{turn}", num_tokens=50_000)
            tasks.append(asyncio.create_task(collect(open_stream(link, request))))
            await asyncio.sleep(0)
            if not link.is_up:
                break
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, WorkerLost) for result in results)
        assert ("lost", "decode-0") in observer.calls


async def test_many_large_requests_at_once_are_no_slow_reader() -> None:
    """Requests with images, all of which begin in one turn, as after the death of a worker."""
    async with pair(max_buffer_nbytes=8 << 20) as (worker, link, observer):
        worker.on_start = lambda link_id, start: worker.step(
            {link_id: [TokenDelta(start.stream_id, (7,), "stop")]}
        )
        large = msgspec.structs.replace(make_request(), images=(bytes(4 << 20),))
        answers = (collect(open_stream(link, large)) for _ in range(8))
        assert await asyncio.gather(*answers) == [[7]] * 8
        assert ("lost", "decode-0") not in observer.calls


class ForgetfulWorker(RawWorker):
    """Leaves one kind of message out, the first time that it should be sent."""

    def __init__(self, forgets: type[Any]) -> None:
        super().__init__()
        self._forgets: type[Any] | None = forgets
        self.num_connections = 0

    def write(self, message: ToIngress) -> None:
        self.num_connections += isinstance(message, Challenge)
        if self._forgets is not None and isinstance(message, self._forgets):
            self._forgets = None
        else:
            super().write(message)


@pytest.mark.parametrize("forgets", [Challenge, Welcome], ids=lambda kind: kind.__name__)
async def test_a_lost_message_costs_one_timeout(forgets: type[Any]) -> None:
    observer, worker = RecordingObserver(), ForgetfulWorker(forgets)
    async with worker, linked(worker.record, observer, handshake_timeout_s=0.2) as link:
        await until(lambda: observer.held)
        assert link.is_up
        assert worker.num_connections >= 2, "nothing was lost"
