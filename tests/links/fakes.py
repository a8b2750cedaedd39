"""A worker without an engine, and an observer that writes down what it hears."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from disagg.blocks import BlockHash
from disagg.links.client import Link, LinkObserver
from disagg.links.server import LinkId, LinkServer, Received
from disagg.messages import (
    GenerateRequest,
    KVEvent,
    Resync,
    Start,
    TokenDelta,
    WorkerRecord,
    WorkerStatus,
)
from tests.router import fakes as of_fleet
from tests.waiting import until as until

KEY = b"the cluster's key"


def make_record(worker_id: str = "decode-0", **changes: Any) -> WorkerRecord:
    """Of a worker that listens on any free port."""
    return of_fleet.make_record(worker_id, **({"role": "decode", "port": 0} | changes))


def make_request(request_id: str = "request-0", num_tokens: int = 8) -> GenerateRequest:
    return of_fleet.make_request(num_tokens, request_id=request_id, block_hashes=())


class FakeWorker:
    """A link server whose cache is a list of names; answers nothing by itself but `Resync`."""

    def __init__(self, record: WorkerRecord, key: bytes = KEY, **options: Any) -> None:
        self.received: list[tuple[LinkId, Received]] = []
        self.held: list[BlockHash] = []
        self.answers_resync = True
        self.on_start: Callable[[LinkId, Start], None] | None = None
        self.server = LinkServer(key=key, record=record, receive=self._receive, **options)

    @property
    def record(self) -> WorkerRecord:
        return self.server.record

    def _receive(self, link_id: LinkId, message: Received) -> None:
        self.received.append((link_id, message))
        if isinstance(message, Resync) and self.answers_resync:
            self.server.publish_snapshot(link_id, self.held, WorkerStatus(num_blocks=64))
        if isinstance(message, Start) and self.on_start is not None:
            self.on_start(link_id, message)

    def of_type(self, kind: type[Any]) -> list[Any]:
        return [message for _, message in self.received if isinstance(message, kind)]

    def step(
        self,
        deltas: dict[LinkId, list[TokenDelta]] | None = None,
        events: Sequence[KVEvent] = (),
        status: WorkerStatus | None = None,
    ) -> None:
        self.server.publish(deltas or {}, events, status or WorkerStatus(num_blocks=64))


class RecordingObserver(LinkObserver):
    """Holds what a router would: the blocks and load of every routable worker."""

    def __init__(self) -> None:
        self.held: dict[str, set[BlockHash]] = {}
        self.statuses: dict[str, WorkerStatus] = {}
        self.calls: list[tuple[str, str]] = []

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        self.calls.append(("synced", record.worker_id))
        self.held[record.worker_id] = set(block_hashes)
        self.statuses[record.worker_id] = status

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus | None
    ) -> None:
        held = self.held[worker_id]
        for event in kv_events:
            if event.kind == "stored":
                held.update(event.block_hashes)
            elif event.kind == "removed":
                held.difference_update(event.block_hashes)
            else:
                held.clear()
        if status is not None:
            self.statuses[worker_id] = status

    def worker_lost(self, worker_id: str) -> None:
        self.calls.append(("lost", worker_id))
        self.held.pop(worker_id, None)
        self.statuses.pop(worker_id, None)


@asynccontextmanager
async def fake_worker(
    record: WorkerRecord | None = None, key: bytes = KEY, **options: Any
) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(record or make_record(), key, **options)
    await worker.server.start()
    try:
        yield worker
    finally:
        await worker.server.close()


@asynccontextmanager
async def linked(
    record: WorkerRecord,
    observer: LinkObserver,
    key: bytes = KEY,
    ingress_id: str = "ingress-0",
    **options: Any,
) -> AsyncIterator[Link]:
    link = Link(
        record, key=key, ingress_id=ingress_id, observer=observer, rng=random.Random(1), **options
    )
    link.open()
    try:
        yield link
    finally:
        link.close()
        await link.wait_closed()


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[FakeWorker, Link, RecordingObserver]]:
    observer = RecordingObserver()
    async with fake_worker() as worker, linked(worker.record, observer, **options) as link:
        await until(lambda: observer.held)
        yield worker, link, observer


def start_of(worker: FakeWorker, request_id: str) -> tuple[LinkId, Start]:
    for link_id, message in worker.received:
        if isinstance(message, Start) and message.request.request_id == request_id:
            return link_id, message
    raise AssertionError(f"{request_id} was not started")


async def collect(stream: AsyncIterator[TokenDelta]) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]
