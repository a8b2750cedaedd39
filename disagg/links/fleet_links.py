"""All links of one ingress: one per worker of the membership.

Membership arrives as the full list of records whenever it changes. KV events and load of the
workers go to the `LinkObserver` (the router's fleet).

Membership adds workers; only the end of its link removes one. A worker that is missing in the list
but whose link is up keeps its streams, and gets new ones while it accepts them: a draining worker
refuses by itself, and a worker that a restarted controller has not found yet is alive. When such a
link ends, it is not opened again.

Each route that moves KV tells the reader how to reach the source (1 KB), even if the reader already
knows. So an ingress need not remember what its workers know. Sending all addresses to each of 1,000
workers would take 0.9 GB at a start.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from disagg.errors import WorkerLost
from disagg.kvtransfer.ticket import KVTicket
from disagg.links.client import Link, LinkObserver
from disagg.messages import (
    AdapterNews,
    Peers,
    Prefetch,
    PutDelta,
    Release,
    Start,
    WorkerRecord,
)

# Reports of all workers that an ingress takes in each second; one takes about 11 us of CPU
# (docs/notebook/routing.md).
MAX_REPORTS_PER_S = 10_000
NUM_UNLIMITED = 64  # workers that may report every step, of 10 ms and more
LONGEST_INTERVAL_S = 0.5  # half of a heartbeat


def report_interval_s(num_workers: int) -> float:
    """How long each worker must wait between two reports.

    It doubles with the fleet, so a few workers more or less change nothing.
    """
    if num_workers <= NUM_UNLIMITED:
        return 0.0
    doubled = 1 << (num_workers - 1).bit_length()
    return min(doubled / MAX_REPORTS_PER_S, LONGEST_INTERVAL_S)


class FleetLinks:
    """All links of one ingress. Everything runs on one loop.

    Args:
        key: the cluster's secret.
        observer: called with every worker's cache and load; never blocks.
    """

    def __init__(
        self,
        *,
        key: bytes,
        ingress_id: str,
        observer: LinkObserver,
        rng: random.Random,
    ) -> None:
        self._key = key
        self._ingress_id = ingress_id
        self._observer = observer
        self._rng = rng
        self._links: dict[str, Link] = {}
        self._leaving: set[str] = set()  # linked, and not in the membership any more
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def records(self) -> list[WorkerRecord]:
        return [link.record for link in self._links.values()]

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """Make the links follow the membership. A changed record is a new worker."""
        wanted = {record.worker_id: record for record in records}
        gone = []
        self._leaving.clear()
        for worker_id, link in list(self._links.items()):
            record = wanted.get(worker_id)
            if record is None and link.is_up:
                self._leaving.add(worker_id)
            elif record != link.record:
                self._drop(link)
                if record is None:
                    gone.append(worker_id)
        if gone:
            self._tell_gone(gone)
        for record in [wanted[worker_id] for worker_id in wanted if worker_id not in self._links]:
            link = Link(
                record,
                key=self._key,
                ingress_id=self._ingress_id,
                observer=self._observer,
                lost=self._lost,
                rng=self._rng,
            )
            self._links[record.worker_id] = link
            link.open()
        interval_s = report_interval_s(len(self._links))
        for link in self._links.values():
            link.report_every(interval_s)

    def link(self, worker_id: str) -> Link:
        """Raises `WorkerLost` when membership does not have the worker (any more)."""
        link = self._links.get(worker_id)
        if link is None:
            raise WorkerLost(f"Worker {worker_id} has left the fleet.")
        return link

    def num_buffered_bytes(self, worker_id: str) -> int:
        """Bytes that wait to be sent to a worker; 0 if it has left."""
        link = self._links.get(worker_id)
        return 0 if link is None else link.num_buffered_bytes

    async def run(self, worker_id: str, start: Start, put: PutDelta, *, timeout_s: float) -> None:
        """`Link.run` of that worker. Raises `WorkerLost` when it has left."""
        await self.link(worker_id).run(start, put, timeout_s=timeout_s)

    def release(self, ticket: KVTicket) -> None:
        """Tell the ticket's source that it will not be used, so that it frees the blocks."""
        link = self._links.get(ticket.source_id)
        if link is not None and link.record.epoch == ticket.epoch:
            link.send(Release(ticket.ticket_id))

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        """Make a worker pull blocks that a later request will need, unless it has left."""
        link = self._links.get(worker_id)
        if link is not None:
            link.send(asked)

    def tell_adapters(self, worker_id: str, adapters: AdapterNews) -> None:
        """Tell a worker what is known of LoRA adapters, unless it has left."""
        link = self._links.get(worker_id)
        if link is not None:
            link.send(adapters)

    def introduce(self, worker_id: str, source_id: str) -> None:
        """Tell a worker how to reach another one, whose KV it will pull."""
        link, source = self._links.get(worker_id), self._links.get(source_id)
        if link is not None and source is not None and link is not source:
            link.send(Peers((source.record.peer,)))

    async def close(self) -> None:
        self._leaving.clear()
        for link in list(self._links.values()):
            self._drop(link)
        if self._closing:
            await asyncio.wait(self._closing)

    def _drop(self, link: Link) -> None:
        del self._links[link.record.worker_id]
        link.close()
        task = asyncio.create_task(link.wait_closed())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _lost(self, worker_id: str) -> None:
        if worker_id in self._leaving:
            self._leaving.remove(worker_id)
            self._drop(self._links[worker_id])
            self._tell_gone((worker_id,))

    def _tell_gone(self, gone: Sequence[str]) -> None:
        for link in self._links.values():
            link.send(Peers((), tuple(gone)))
