"""The ingress's side of a link to one worker: many streams over one connection.

A link exists as long as membership has its worker: it connects, reconnects after a loss, and asks
for a snapshot when frames are missing. When the connection ends, all its streams end at once with
`WorkerLost`, and the dispatcher reroutes their requests.

Knows no routing: what workers report about caches and load goes to a `LinkObserver`.
"""

from __future__ import annotations

import asyncio
import hmac
import random
import secrets
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import msgspec

from disagg.blocks import BlockHash
from disagg.errors import DeadlineExceeded, Unavailable, WorkerLost
from disagg.links.connection import (
    MAX_BUFFER_NBYTES,
    NONCE_NBYTES,
    BadFrame,
    Connection,
    prove,
)
from disagg.links.reports import restore
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
    PutDelta,
    Refused,
    Release,
    Resync,
    Snapshot,
    Start,
    StepFrame,
    ToIngress,
    Welcome,
    WorkerRecord,
    WorkerStatus,
    decode_to_ingress,
    encode,
)

FIRST_PAUSE_S = 0.05  # before the second attempt to connect; doubles up to
LONGEST_PAUSE_S = 2.0
SILENCE_S = 4.0  # several missed heartbeats; a frozen worker is left well within 5 s
NUM_CHECKS = 8  # checks without a message, before a worker counts as lost


class LinkObserver(Protocol):
    """Receives the events of links, in order for each link."""

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        """All blocks that the worker has cached. It is routable from now on."""

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus | None
    ) -> None:
        """The worker's changes. `status`: None if the frame has no new load, as in the parts of a
        snapshot after the first."""

    def worker_lost(self, worker_id: str) -> None:
        """The link ended: forget the worker's blocks; it is not routable. May be repeated."""


class Link:
    """One worker, seen from one ingress. Everything runs on the loop that called `open`.

    Args:
        record: the worker as membership has it.
        key: the cluster's secret.
        rng: spreads the reconnects of many ingresses.
        lost: called after `observer.worker_lost`.
        silence_s: a worker that sends nothing for so long, not even a heartbeat, counts as lost.
    """

    def __init__(
        self,
        record: WorkerRecord,
        *,
        key: bytes,
        ingress_id: str,
        observer: LinkObserver,
        rng: random.Random,
        lost: Callable[[str], None] = lambda worker_id: None,
        handshake_timeout_s: float = 5.0,
        silence_s: float = SILENCE_S,
        max_buffer_nbytes: int = MAX_BUFFER_NBYTES,
    ) -> None:
        self.record = record
        self.key = key
        self.ingress_id = ingress_id
        self.observer = observer
        self.silence_s = silence_s
        self.max_buffer_nbytes = max_buffer_nbytes
        self.interval_s = 0.0  # see `report_every`
        self.last_error = "not connected yet"  # for messages: why the link is not up
        self._rng = rng
        self._lost = lost
        self._handshake_timeout_s = handshake_timeout_s
        self._connection: _WorkerConnection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._connection is not None and self._connection.is_up

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes that wait to be sent to the worker."""
        return 0 if self._connection is None else self._connection.num_buffered_bytes

    def open(self) -> None:
        """Connect in the background, and again after every loss, until `close`."""
        self._task = asyncio.create_task(self._keep_connected())

    def close(self) -> None:
        """End the link at once, and its streams with `WorkerLost`. Calls the observer."""
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.end("the ingress closed the link")
            self._connection.lost()

    async def wait_closed(self) -> None:
        """Wait until nothing of the link is left, after `close`."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def report_every(self, interval_s: float) -> None:
        """Have the worker report its cache and load at most so often, in seconds."""
        if interval_s != self.interval_s:
            self.interval_s = interval_s
            self.send(Frequency(interval_s))

    def send(self, message: AdapterNews | Frequency | Peers | Prefetch | Release) -> None:
        """Does nothing while the link is down: a lost message costs only time or memory."""
        if self._connection is not None and self._connection.is_up:
            self._connection.send(message)

    async def run(self, start: Start, put: PutDelta, *, timeout_s: float) -> None:
        """Run a request on this worker. Returns after the delta whose `is_last` is true.

        Cancelling it, and an exception of `put`, cancels the request on the worker.

        Raises:
            WorkerLost: the link is down or went down; `put` got all that had arrived.
            DeadlineExceeded: `timeout_s` passed; `put` got all that had arrived.
            BadFrame: the request is too long for a frame.
        """
        connection = self._connection
        if connection is None or not connection.is_up:
            raise WorkerLost(f"Worker {self.record.worker_id} is not linked: {self.last_error}.")
        deadline_s = asyncio.get_running_loop().time() + max(0.0, timeout_s)
        try:
            async with asyncio.timeout_at(deadline_s):
                await connection.room()
        except TimeoutError:
            raise _too_late() from None
        stream_id, stream = connection.start(start, put)
        try:
            async with asyncio.timeout_at(deadline_s):
                await stream.ended
        except TimeoutError:
            if stream.ended.cancelled():
                raise _too_late() from None
            stream.ended.result()  # its end came in the turn of the event loop of the deadline
        finally:
            connection.forget(stream_id)

    def lost(self) -> None:
        """Tell that what is known of the worker is out of date."""
        self.observer.worker_lost(self.record.worker_id)
        self._lost(self.record.worker_id)

    async def _keep_connected(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            connection = self._connection = _WorkerConnection(self)
            try:
                await self._connect(connection)
                pause_s = FIRST_PAUSE_S
                await asyncio.wait([connection.ended])
                self.last_error = connection.reason
            except (OSError, TimeoutError, Unavailable) as error:
                self.last_error = str(error) or "no answer in time"
            finally:
                connection.abort()
                self._connection = None
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self, connection: _WorkerConnection) -> None:
        """Raises `OSError`, `TimeoutError`, or `Unavailable` when one side refused the other."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._handshake_timeout_s):
            await loop.create_connection(lambda: connection, self.record.host, self.record.port)
            await connection.welcomed


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded(
        "The request's deadline passed before its answer was complete; ask for fewer tokens or"
        " allow more time."
    )


class _WorkerConnection(Connection):
    """One TCP connection of a `Link`."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.max_buffer_nbytes)
        self._loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.is_up = False
        self._link = link
        self._nonces: tuple[bytes, bytes] | None = None  # the worker's and ours
        self._streams: dict[int, LinkStream] = {}
        self._stream_ids = count(1)
        self._num_received = 0  # the last step frame's number
        self._status: WorkerStatus | None = None  # the last one since a snapshot; None: none came
        self._was_heard = True  # since the last look
        self._num_silent_checks = 0
        self._watch: asyncio.TimerHandle | None = None

    def start(self, message: Start, put: PutDelta) -> tuple[int, LinkStream]:
        stream_id = next(self._stream_ids)
        self.send(msgspec.structs.replace(message, stream_id=stream_id))
        if not self.is_open:  # this message overflowed its buffer
            raise WorkerLost(f"Worker {self._link.record.worker_id} was lost: {self.reason}.")
        stream = self._streams[stream_id] = LinkStream(put, self._loop.create_future())
        return stream_id, stream

    def forget(self, stream_id: int) -> None:
        """Cancel a stream on the worker, unless it has ended."""
        if self._streams.pop(stream_id, None) is not None:
            self.send(Cancel(stream_id))

    # Connection

    def opened(self) -> None:
        self._check_liveness()

    def closed(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._reject(f"The handshake failed: {self.reason}.")
        self.lost()

    def lost(self) -> None:
        """End all streams and tell the observer, once."""
        if self.is_up:
            self.is_up = False
            self._fail_streams(f"was lost: {self.reason}")
            self._link.lost()

    def received(self, payload: bytes) -> None:
        self._was_heard = True
        message = decode_to_ingress(payload)
        if not self.welcomed.done():
            self._shake_hands(message)
        elif isinstance(message, StepFrame):
            self._stepped(message)
        elif isinstance(message, Snapshot):
            self._num_received = message.sequence_number
            self._status = message.status
            record, observer = self._link.record, self._link.observer
            observer.worker_synced(record, message.block_hashes, message.status)
        else:
            raise BadFrame(f"{type(message).__name__} came after the handshake")

    def _shake_hands(self, message: ToIngress) -> None:
        link = self._link
        if isinstance(message, Refused):
            self._refuse(f"The worker refused the link. {message.reason}")
        elif isinstance(message, Challenge) and self._nonces is None:
            if message.version != WIRE_VERSION:
                self._refuse(
                    f"The worker speaks link version {message.version}, this ingress"
                    f" {WIRE_VERSION}; run the same release of disagg everywhere."
                )
                return
            nonces = self._nonces = (message.nonce, secrets.token_bytes(NONCE_NBYTES))
            proof = prove(link.key, "ingress", nonces, link.ingress_id.encode())
            self.send(Hello(WIRE_VERSION, link.ingress_id, proof, nonces[1]))
        elif isinstance(message, Welcome) and self._nonces is not None:
            proof = prove(link.key, "worker", self._nonces, encode(message.worker))
            if not hmac.compare_digest(proof, message.proof):
                self._refuse("The worker does not know this cluster's key.")
            elif message.worker != link.record:
                self._refuse(
                    f"Worker {message.worker.worker_id} of epoch {message.worker.epoch} answers"
                    f" where {link.record.worker_id} of epoch {link.record.epoch} should be."
                )
            else:
                self.trust()
                self.is_up = True
                self.welcomed.set_result(None)
                if link.interval_s:
                    self.send(Frequency(link.interval_s))
        else:
            raise BadFrame(f"{type(message).__name__} came in the middle of the handshake")

    def _refuse(self, reason: str) -> None:
        self._reject(reason)
        self.end(reason)

    def _reject(self, reason: str) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(Unavailable(reason))
            self.welcomed.exception()  # the task that waited may be gone

    def _stepped(self, step: StepFrame) -> None:
        self._num_received += 1
        if step.sequence_number != self._num_received:
            self._resync(step.sequence_number)
            return
        streams = self._streams
        for delta in step.deltas:
            stream = streams.get(delta.stream_id)
            if stream is None:  # it was cancelled while the delta was on its way
                continue
            if delta.is_last:
                del streams[delta.stream_id]
            try:
                stream.put(delta)
            except Exception as error:  # the failure of one request, and not of its link
                self.forget(delta.stream_id)
                stream.fail(error)
            else:
                if delta.is_last:
                    stream.end()
        if self._status is None:
            return
        status = None
        if step.status is not None:
            status = self._status = restore(step.status, step.kept, self._status)
        if status is not None or step.kv_events:
            worker_id, observer = self._link.record.worker_id, self._link.observer
            observer.worker_stepped(worker_id, step.kv_events, status)

    def _resync(self, sequence_number: int) -> None:
        """Frames are missing, perhaps with tokens or KV events: end all streams, and ask for a
        snapshot."""
        for stream_id in list(self._streams):
            self.send(Cancel(stream_id))
        self._fail_streams(f"lost frames before number {sequence_number}")
        self._num_received = sequence_number
        if self._status is not None:
            self._status = None
            self._link.lost()
        self.send(Resync())

    def _fail_streams(self, what: str) -> None:
        error = WorkerLost(f"Worker {self._link.record.worker_id} {what}.")
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()

    def _check_liveness(self) -> None:
        """Hang up on a worker that has been silent for the whole of `silence_s`.

        Counted in checks, not seconds: if our own event loop stalls, the worker is not to blame.
        """
        self._num_silent_checks = 0 if self._was_heard else self._num_silent_checks + 1
        if self._num_silent_checks == NUM_CHECKS:
            self.end(f"silent for {self._link.silence_s} s")
            return
        self._was_heard = False
        self._watch = self._loop.call_later(self._link.silence_s / NUM_CHECKS, self._check_liveness)


class LinkStream(NamedTuple):
    """One request on the worker."""

    put: PutDelta
    ended: asyncio.Future[None]

    def end(self) -> None:
        if not self.ended.done():  # otherwise its task is cancelled
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # its task may be gone
