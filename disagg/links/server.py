"""The worker's side of its links: accepts ingresses, passes on their messages, publishes steps.

Every link gets one `StepFrame` per engine step that has something for it: tokens of its streams,
KV events, or a changed load (`reports.py` says how often). An idle worker sends an empty one every
`heartbeat_s`, so that the ingress can tell an idle worker from a dead one. Publishing never blocks.
A snapshot is sent in parts, so that neither side's loop is held up by one.

How a snapshot and KV events stay in order: when a link comes up, or asks with `Resync`, the worker
receives `Resync` for it and passes it to the engine's thread. That thread reads the pool's block
hashes between two steps and posts `publish_snapshot` to the loop the same way as it posts steps, so
both arrive here in the engine's order. Before the last part the link gets no KV events, afterwards
all since the first. Events that were pending when the hashes were read are in both; applying them
twice changes nothing, because the last event of each block is the same.

Knows no engine: `receive` decides what a `Start` means. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import msgspec

from disagg.blocks import BlockHash
from disagg.errors import StartupError
from disagg.links.connection import (
    MAX_BUFFER_NBYTES,
    NONCE_NBYTES,
    BadFrame,
    Connection,
    prove,
)
from disagg.links.reports import PART_NUM_BLOCKS, LinkReports, Report, split_snapshot
from disagg.messages import (
    WIRE_VERSION,
    AdapterNews,
    Cancel,
    Challenge,
    Frequency,
    Hello,
    KVEvent,
    Peers,
    Prefetch,
    Refused,
    Release,
    Resync,
    Snapshot,
    Start,
    StepFrame,
    TokenDelta,
    Welcome,
    WorkerRecord,
    WorkerStatus,
    decode_to_worker,
    encode,
)

log = logging.getLogger(__name__)

LinkId: TypeAlias = int
PART_BUFFER_NBYTES = 1 << 20  # a link with more to send gets its next part later
PART_PAUSE_S = 0.005
MAX_NUM_STRANGERS = 64  # connections in the middle of a handshake


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The last message of a link that `receive` gets: its streams have no reader any more."""

    reason: str


Received: TypeAlias = (
    Start | Prefetch | Cancel | Release | Peers | Resync | AdapterNews | LinkClosed
)


class LinkServer:
    """Accepts links at `record.host`, `record.port` (0: any free port).

    Args:
        key: the cluster's secret, the same in every process.
        record: this worker's record; `start` fills in the port.
        receive: called on the loop with a link's id and each message, in order; must not block.
        status: reported until the first `publish`.

    Raises:
        StartupError: the key is empty.
    """

    def __init__(
        self,
        *,
        key: bytes,
        record: WorkerRecord,
        receive: Callable[[LinkId, Received], None],
        status: WorkerStatus | None = None,
        heartbeat_s: float = 1.0,
        handshake_timeout_s: float = 5.0,
        max_buffer_nbytes: int = MAX_BUFFER_NBYTES,
    ) -> None:
        if not key:
            raise StartupError(
                "The cluster key is empty; every process of a cluster needs the same secret.",
                param="cluster_key",
            )
        self.record = record
        self.home_ingress = ""  # of those that are linked; goes into `WorkerStatus`
        self.receive = receive
        self.key = key
        self.handshake_timeout_s = handshake_timeout_s
        self.max_buffer_nbytes = max_buffer_nbytes
        self._heartbeat_s = heartbeat_s
        self._status = status or WorkerStatus()
        self._links: dict[LinkId, _IngressLink] = {}
        self._strangers: set[_IngressLink] = set()
        self._accepted: set[_IngressLink] = set()  # all whose connections are not yet gone
        self._ids = count(1)
        self._server: asyncio.Server | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def status(self) -> WorkerStatus:
        """The last one that was published."""
        return self._status

    async def start(self) -> WorkerRecord:
        """Listen. Returns the record to publish, with the port that was bound.

        Raises:
            StartupError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._accept, self.record.host, self.record.port
            )
        except OSError as error:
            raise StartupError(
                f"Cannot listen on {self.record.host}:{self.record.port}: {error}. Set link_host"
                " to an address of this machine.",
                param="link_host",
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        self.record = msgspec.structs.replace(self.record, port=port)
        self._heartbeat = asyncio.create_task(self._beat())
        return self.record

    def publish(
        self,
        deltas: Mapping[LinkId, Sequence[TokenDelta]],
        kv_events: Sequence[KVEvent],
        status: WorkerStatus,
    ) -> None:
        """Send the results of an engine step. Deltas for links that are gone are dropped."""
        self._status = status
        events = tuple(kv_events)
        for link_id, link in list(self._links.items()):
            report, of_link = link.reports.after_step(events, status), deltas.get(link_id, ())
            if of_link or report is not None:
                link.send_step(tuple(of_link), report)

    def publish_arrivals(self, status: WorkerStatus) -> None:
        """Requests have arrived, and a step begins: tell the ingresses that sent none of them."""
        for link in list(self._links.values()):
            link.send_report(link.reports.others_arrived(status))

    def answer(self, link_id: LinkId, delta: TokenDelta) -> None:
        """Send deltas that no engine step has produced, without a report: after a request the
        router takes the next reports for reports of steps. Nothing is sent if the link has
        ended."""
        link = self._links.get(link_id)
        if link is not None:
            link.send_step((delta,), None)

    def publish_snapshot(
        self,
        link_id: LinkId,
        block_hashes: Iterable[BlockHash],
        status: WorkerStatus,
        host_block_hashes: Iterable[BlockHash] = (),
    ) -> None:
        """Answer a `Resync`: the hashes of all blocks that are cached between two published steps,
        and of those in host memory."""
        self._status = status
        link = self._links.get(link_id)
        if link is not None:
            link.publish_snapshot(tuple(block_hashes), status, tuple(host_block_hashes))

    def hang_up(self, reason: str) -> None:
        """End every link at once. An ingress that reconnects waits for the answer to `Resync`."""
        for link in list(self._links.values()):
            link.end(reason)

    async def close(self, flush_s: float = 1.0) -> None:
        """Stop listening and end every link; each is reported as `LinkClosed`.

        Published messages are still sent, unless a reader takes longer than `flush_s`.
        """
        self._is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._server is not None:
            loop = asyncio.get_running_loop()
            for listening in self._server.sockets:
                loop.remove_reader(listening.fileno())
            # Whom the loop has accepted before is in `_accepted` then; a server that is closed
            # drops such a connection without closing it (asyncio's Server._attach).
            await asyncio.sleep(0)
            self._server.close()
        ends = list(self._accepted)
        for link in ends:
            link.end("the worker shuts down", flush=True)
        if ends:
            _, slow = await asyncio.wait([link.ended for link in ends], timeout=flush_s)
            for link in ends:
                link.abort()
            if slow:
                await asyncio.wait(slow, timeout=flush_s)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for link in list(self._links.values()):
                link.beat()

    def _accept(self) -> _IngressLink:
        """For a connection that the loop has accepted; `arrived` hears of it some turns later."""
        link = _IngressLink(self)
        self._accepted.add(link)
        link.ended.add_done_callback(lambda _: self._accepted.discard(link))
        return link

    # called by the links

    def arrived(self, link: _IngressLink) -> str:
        """A connection was accepted. Returns why it cannot stay; empty: it may."""
        if self._is_closed:  # accepted before, but reported only now
            return "the worker shuts down"
        if len(self._strangers) >= MAX_NUM_STRANGERS:
            return "too many handshakes at a time"
        self._strangers.add(link)
        return ""

    def established(self, link: _IngressLink) -> LinkId:
        self._strangers.discard(link)
        link_id = next(self._ids)
        self._links[link_id] = link
        self._choose_home()
        return link_id

    def gone(self, link: _IngressLink) -> None:
        self._strangers.discard(link)
        if link.link_id is not None and self._links.pop(link.link_id, None) is not None:
            self._choose_home()
            self.receive(link.link_id, LinkClosed(link.reason))

    def _choose_home(self) -> None:
        linked = {link.ingress_id for link in self._links.values()}
        self.home_ingress = choose_home(self.record.worker_id, linked)


class _IngressLink(Connection):
    """One ingress. `link_id` is None until it has proven that it knows the key."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__(server.max_buffer_nbytes)
        self.link_id: LinkId | None = None
        self.ingress_id = ""
        self._server = server
        self._nonce = secrets.token_bytes(NONCE_NBYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._last_stream_id = 0
        self._num_sent = 0  # step frames
        self._num_sent_before_beat = 0
        self._loop = asyncio.get_running_loop()
        self.reports = LinkReports(self._loop, self.send_report)
        self._parts: deque[KVEvent] = deque()  # of a snapshot, still to be sent
        self._part_timer: asyncio.Handle | None = None

    def opened(self) -> None:
        refusal = self._server.arrived(self)
        if refusal:
            self.end(refusal)
            return
        self._timer = self._loop.call_later(
            self._server.handshake_timeout_s, self.end, "no valid hello in time"
        )
        self.send(Challenge(WIRE_VERSION, self._nonce))

    def closed(self) -> None:
        for timer in (self._timer, self._part_timer):
            if timer is not None:
                timer.cancel()
        self.reports.stop()
        self._server.gone(self)

    def received(self, payload: bytes) -> None:
        message = decode_to_worker(payload)
        if self.link_id is None:
            if not isinstance(message, Hello):
                raise BadFrame(f"{type(message).__name__} came before Hello")
            self._welcome(message)
            return
        if isinstance(message, Hello):
            raise BadFrame("a second Hello came")
        if isinstance(message, Frequency):
            self.reports.interval_s = message.interval_s
            return
        if isinstance(message, Resync):
            self.reports.stop()
            self._parts.clear()
        elif isinstance(message, Start):
            if message.stream_id <= self._last_stream_id:
                raise BadFrame(f"stream {message.stream_id} came after {self._last_stream_id}")
            self._last_stream_id = message.stream_id
            if not message.is_prefix_request:  # which no step computes
                self.reports.request_arrived()
        self._server.receive(self.link_id, message)

    def _welcome(self, hello: Hello) -> None:
        if hello.version != WIRE_VERSION:
            self._refuse(
                f"The ingress speaks link version {hello.version}, this worker {WIRE_VERSION};"
                " run the same release of disagg everywhere."
            )
            return
        key, nonces = self._server.key, (self._nonce, hello.nonce)
        proof = prove(key, "ingress", nonces, hello.ingress_id.encode())
        if not hmac.compare_digest(proof, hello.proof):
            self._refuse(
                "The ingress does not know this cluster's key; give every process the same"
                " cluster_key."
            )
            return
        assert self._timer is not None
        self._timer.cancel()
        self.trust()
        record = self._server.record
        self.ingress_id = hello.ingress_id
        self.link_id = self._server.established(self)
        self.send(Welcome(prove(key, "worker", nonces, encode(record)), record))
        self._server.receive(self.link_id, Resync())

    def _refuse(self, reason: str) -> None:
        log.warning("Refused a link: %s", reason)
        self.send(Refused(reason))
        self.end(reason, flush=True)

    def publish_snapshot(
        self,
        block_hashes: tuple[BlockHash, ...],
        status: WorkerStatus,
        host_block_hashes: tuple[BlockHash, ...],
    ) -> None:
        self.reports.restart(status)
        self._parts = deque(split_snapshot(block_hashes, host_block_hashes))
        self.reports.is_holding = bool(self._parts)
        self._send_or_end(Snapshot(self._num_sent, block_hashes[:PART_NUM_BLOCKS], status))
        if self._parts and self._part_timer is None:
            self._part_timer = self._loop.call_soon(self._send_part)

    def _send_part(self) -> None:
        """One part of a snapshot, and then the events since its first one."""
        self._part_timer = None
        if not self.is_open:
            return
        if self._parts:
            has_room = self.num_buffered_bytes < PART_BUFFER_NBYTES
            if has_room:
                self.send_step((), Report((self._parts.popleft(),)))
            pause_s = 0.0 if has_room else PART_PAUSE_S
            self._part_timer = self._loop.call_later(pause_s, self._send_part)
        else:
            self.send_report(self.reports.release())

    def beat(self) -> None:
        """Show that the worker is alive, if nothing was sent since the last beat."""
        if self._num_sent == self._num_sent_before_beat:
            self.send_step((), self.reports.due())
        self._num_sent_before_beat = self._num_sent

    def send_report(self, report: Report | None) -> None:
        if report is not None:
            self.send_step((), report)

    def send_step(self, deltas: tuple[TokenDelta, ...], report: Report | None) -> None:
        self._num_sent += 1
        self._send_or_end(StepFrame(self._num_sent, deltas, *(report or ())))

    def _send_or_end(self, message: StepFrame | Snapshot) -> None:
        try:
            self.send(message)
        except BadFrame as error:  # tokens would be missing from here on
            self.end(str(error))


def choose_home(worker_id: str, ingress_ids: Collection[str]) -> str:
    """The home of a worker, one of the ingresses; "" if there are fewer than two.

    Ingresses that route at the same moment do not know of each other's requests. Among idle workers
    that cost the same, each ingress prefers those whose home it is, so two rarely choose the same.
    Rendezvous hashing: each ingress gets a similar share of the workers, and if an ingress comes or
    goes, only its own share changes.
    """
    if len(set(ingress_ids)) < 2:
        return ""
    return max(ingress_ids, key=lambda ingress_id: _draw(worker_id, ingress_id))


def _draw(worker_id: str, ingress_id: str) -> bytes:
    return hashlib.blake2b(f"{worker_id} {ingress_id}".encode(), digest_size=8).digest()
