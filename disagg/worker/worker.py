"""A worker from start to drain: builds its parts, hands messages in and steps out.

    link server (event loop)  --Start, Cancel, Peers, Resync-->  engine thread
    link server (event loop)  <--one call per step: deltas, KV events, load--  engine thread

Everything that touches the engine, the doors or the transport runs in the engine's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from disagg.config import ServeConfig, TierConfig
from disagg.decode_worker.arrivals import Arrivals
from disagg.decode_worker.cold_prefix import ColdPrefixes
from disagg.engine.engine_thread import EngineThread, StepResult
from disagg.engine.sequence import Sequence
from disagg.errors import DisaggError, EngineFailed, TransferFailed, Unavailable
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.links.server import LinkClosed, LinkServer, Received
from disagg.messages import Cancel, Peers, Resync, Role, Start, WorkerRecord, WorkerStatus
from disagg.prefill_worker.leaving import Leaving
from disagg.time_model import StepTimeFit, TransferTimeModel
from disagg.worker.parts import Parts, build_parts
from disagg.worker.phases import record_pull
from disagg.worker.streams import LinkId, Streams, sequence_id

log = logging.getLogger(__name__)
T = TypeVar("T")

# An engine that has not turned for this long is dead: longer than any step, first one included.
HEARTBEAT_LIMIT_S = 30.0
STOP_TIMEOUT_S = 10.0
DRAIN_POLL_S = 0.05


class Worker:
    """One engine behind a link. Made by `start`; every method is called on its event loop."""

    def __init__(
        self,
        parts: Parts,
        role: Role,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._parts = parts
        self._loop = loop
        self._clock = clock
        self._step_times = StepTimeFit()
        self._transfer_times = TransferTimeModel()
        self._engine = parts.engine
        self._transport = parts.transport
        self._streams = Streams()
        self._leaving = Leaving(parts.engine, parts.transport.peer, parts.stamps.generations)
        self._arrivals = Arrivals(parts.engine, parts.transport, self._pull_ended)
        self._cold: ColdPrefixes | None = None
        if parts.cold_tier is not None:
            self._cold = ColdPrefixes(
                parts.engine,
                parts.cold_tier,
                parts.read_block,
                parts.write_block,
                lambda: self._step_times.model.prefill_s,
            )
            parts.engine.save_evicted = self._cold.save
        self._accepting = True
        self._thread = EngineThread(
            parts.engine,
            publish=self._publish,
            clock=clock,
            timer=time.monotonic,
            between_steps=self._between_steps,
            name=f"engine-{role}",
        )
        self._server: LinkServer | None = None

    @classmethod
    async def start(
        cls,
        config: ServeConfig,
        tier: TierConfig,
        role: Role,
        *,
        worker_id: str,
        epoch: int,
        host: str,
        clock: Callable[[], float] = time.time,
        build: Callable[..., Parts] = build_parts,
    ) -> Worker:
        """Load the model, warm up, listen. Returns when requests can come.

        Args:
            epoch: unique to this process start; a restarted worker is a new peer.
            host: the address that ingresses reach this machine by.
            build: makes the engine and the transport; tests give one with a fake model.

        Raises:
            StartupError: in words for the user.
        """
        loop = asyncio.get_running_loop()
        parts = await loop.run_in_executor(None, build, config, tier, worker_id, epoch)
        worker = cls(parts, role, loop, clock)
        record = WorkerRecord(
            worker_id=worker_id,
            role=role,
            model=tier.name,
            host=host,
            port=0,
            epoch=epoch,
            block_size=parts.engine.pool.block_size,
            num_blocks=parts.engine.pool.num_blocks,
            max_model_len=parts.engine.scheduler.max_model_len,
            peer=parts.transport.peer,
            pid=os.getpid(),
        )
        worker._server = LinkServer(
            key=config.cluster_key.encode(),
            record=record,
            receive=worker._receive,
            status=parts.engine.status(),
        )
        worker._thread.start()
        await worker._server.start()
        return worker

    @property
    def record(self) -> WorkerRecord:
        """What to publish about this worker."""
        assert self._server is not None
        return self._server.record

    def check_health(self) -> None:
        """Raises `EngineFailed` if the engine broke or does not turn. Never asks a peer."""
        if self._thread.failed is not None:
            raise EngineFailed(f"The engine broke: {self._thread.failed!r}.")
        if self._thread.heartbeat_age_s > HEARTBEAT_LIMIT_S:
            raise EngineFailed(
                f"The engine has not finished a step for {self._thread.heartbeat_age_s:.0f} s."
            )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish those that run (up to `timeout_s`), then close."""
        self._accepting = False
        deadline = self._loop.time() + timeout_s
        # Asked, not told: the engine's thread has no event of this loop to set.
        while not await self._is_idle() and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        await self.close()

    async def close(self) -> None:
        """End everything at once; streams that are left end as `WorkerLost`."""
        stopped = await self._loop.run_in_executor(None, self._thread.stop, STOP_TIMEOUT_S)
        assert self._server is not None
        await self._server.close()
        if stopped:  # a thread that hangs may still use them
            self._transport.close()
            if self._cold is not None:
                self._cold.close()

    async def check(self) -> None:
        """Recount every block and hold, between two steps. Raises `AssertionError`."""
        await self._ask(self._check)

    async def _is_idle(self) -> bool:
        return await self._ask(lambda: not self._streams.num_open and not self._leaving.num_holds)

    async def _ask(self, question: Callable[[], T]) -> T:
        """Have `question` answered in the engine's thread."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def reply() -> None:
            try:
                value = question()
            except Exception as error:
                self._loop.call_soon_threadsafe(answer.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(answer.set_result, value)

        self._thread.post(reply)
        return await answer

    # On the event loop: what ingresses say.

    def _receive(self, link_id: LinkId, message: Received) -> None:
        match message:
            case Start():
                self._thread.post(lambda: self._start(link_id, message))
            case Cancel(stream_id=stream_id):
                self._thread.post(lambda: self._cancel(sequence_id(link_id, stream_id)))
            case Peers(peers=peers):
                self._thread.post(lambda: self._add_peers(Peers(peers)))
            case Resync():
                self._thread.post(lambda: self._snapshot(link_id))
            case LinkClosed():
                self._thread.post(lambda: self._close_link(link_id))

    # In the engine's thread.

    def _start(self, link_id: LinkId, start: Start) -> None:
        sequence = self._streams.open(link_id, start, self._clock())
        try:
            if not self._accepting:
                raise Unavailable("This worker is stopping and takes no new requests.")
            if start.ticket is not None:
                self._arrivals.admit(sequence, start.ticket)
            elif self._cold is not None:
                self._cold.admit(sequence)
            else:
                self._engine.submit(sequence)
        except DisaggError as error:
            self._engine.end(sequence, error)

    def _cancel(self, name: str) -> None:
        """Forget a stream wherever its sequence is: on its way in, running, or gone already."""
        self._streams.close(name)
        arriving = self._arrivals.cancel(name) or (
            self._cold is not None and self._cold.cancel(name)
        )
        if not arriving and self._engine.abort(name) is None:
            self._leaving.release(name)  # it has left: the ticket will not be used

    def _close_link(self, link_id: LinkId) -> None:
        for name in self._streams.of_link(link_id):
            self._cancel(name)

    def _add_peers(self, message: Peers) -> None:
        for peer in message.peers:
            try:
                self._transport.add_peer(peer)
            except TransferFailed as error:
                # Not lost: a ticket of this peer is refused with the same words and computed here.
                log.warning("Cannot pull from %s: %s", peer.worker_id, error.message)

    def _snapshot(self, link_id: LinkId) -> None:
        # Posted like a step, so that it arrives in order with the cache events.
        assert self._server is not None
        hashes = self._engine.pool.hashes()
        self._loop.call_soon_threadsafe(
            self._server.publish_snapshot, link_id, hashes, self._status(self._engine.status())
        )

    def _between_steps(self, now: float) -> bool:
        for event in self._transport.poll():
            match event:
                case PullDone():
                    self._arrivals.finish(event)
                case TicketReleased(ticket_id=ticket_id):
                    self._leaving.release(ticket_id)
        self._leaving.advance(now)
        is_loading = self._cold is not None and self._cold.advance()
        return self._arrivals.advance(now) or is_loading

    def _publish(self, result: StepResult) -> None:
        assert self._server is not None
        now = self._clock()
        if result.features is not None:
            self._step_times.observe(result.features, result.seconds)
        deltas = self._streams.deltas(
            result.events, lambda sequence: self._leaving.leave(sequence, now), now, result.seconds
        )
        if result.failure is not None:  # nothing may wait for an engine that is broken
            for link_id, last in self._streams.fail_all(result.failure).items():
                deltas.setdefault(link_id, []).extend(last)
        self._loop.call_soon_threadsafe(
            self._server.publish, deltas, result.kv_events, self._status(result.status)
        )

    def _pull_ended(self, sequence: Sequence, ticket: KVTicket, done: PullDone) -> None:
        record_pull(self._streams.traceparent(sequence), done, self._clock())
        if done.error is not None:
            log.warning("KV of %s is computed here: %s", ticket.ticket_id, done.error)
            return
        self._transfer_times.observe(ticket.source_id, done.nbytes, done.seconds)

    def _status(self, status: WorkerStatus) -> WorkerStatus:
        """The engine's load plus what only the worker knows."""
        num_arriving = self._arrivals.num_arriving
        if self._cold is not None:
            num_arriving += self._cold.num_arriving
        return msgspec.structs.replace(
            status,
            num_waiting=status.num_waiting + num_arriving,
            num_holds=self._leaving.num_holds,
            accepting=self._accepting,
            step_costs=self._step_times.to_costs(),
            transfers=self._transfer_times.figures(),
        )

    def _check(self) -> None:
        self._engine.check([*self._leaving.holders(), *self._arrivals.holders()])
