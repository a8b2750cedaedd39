"""A worker from start to drain: builds its parts, passes messages in and step results out.

    link server (event loop)  --Start, Cancel, Release, ...-->  engine thread
    link server (event loop)  <--one call per step: deltas, KV events, load--  engine thread

All code that uses the engine or the transport is in `core.py` and runs in the engine's thread. This
module calls it only through `EngineThread.post`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

from disagg.adapters import AdapterEntry
from disagg.config import ServeConfig, TierConfig
from disagg.engine.engine_thread import EngineThread, StepResult, engine_failed
from disagg.errors import EngineFailed, WorkerLost
from disagg.links.server import LinkClosed, LinkServer, Received
from disagg.messages import (
    AdapterNews,
    Cancel,
    Peers,
    Prefetch,
    Release,
    Resync,
    Role,
    Start,
    WorkerRecord,
    WorkerStatus,
)
from disagg.time_model import StepTimeModel
from disagg.worker.core import WorkerCore
from disagg.worker.liveness import LOOK_S, Liveness
from disagg.worker.parts import Parts, build_parts
from disagg.worker.streams import LinkId

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
DRAIN_POLL_S = 0.05
FAIL_WAIT_S = 0.7  # time for the engine to notice that a rank is gone


class Worker:
    """One engine behind a link server. Create it with `start`, and call it on its event loop."""

    def __init__(
        self,
        parts: Parts,
        record: WorkerRecord,
        key: bytes,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._engine = parts.engine
        self._loop = loop
        self._clock = clock
        self._core = WorkerCore(parts)
        self._thread = EngineThread(
            parts.engine,
            publish=self._publish,
            clock=clock,
            timer=time.monotonic,
            between_steps=self._between_steps,
            diagnose=engine_failed if parts.ranks is None else parts.ranks.diagnose,
            name=f"engine-{record.role}",
        )
        self._server = LinkServer(
            key=key, record=record, receive=self._receive, status=self._core.status()
        )
        self._has_arrivals = False  # since the last step
        self._liveness = Liveness()
        self._first_times = parts.first_times
        self._watch: asyncio.Task[None] | None = None
        self._ranks = parts.ranks
        if parts.ranks is not None:
            parts.ranks.watch(self._lose)

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
        """Load the model, warm up and listen. Returns when requests can be served.

        Args:
            epoch: unique for each process start; a restarted worker is a new peer.
            host: address at which ingresses reach this machine.
            build: builds the parts; tests pass a function with a fake model.

        Raises:
            StartupError: the worker cannot start.
        """
        loop = asyncio.get_running_loop()
        tier = tier.for_role(role)
        parts = await loop.run_in_executor(None, build, config, tier, worker_id, epoch)
        groups = parts.engine.pool.groups
        record = WorkerRecord(
            worker_id=worker_id,
            role=role,
            model=tier.name,
            host=host,
            port=0,
            epoch=epoch,
            block_size=groups.block_size,
            num_blocks=groups.num_whole(parts.engine.pool.num_blocks),
            max_model_len=parts.engine.scheduler.max_model_len,
            peer=parts.transport.peer,
            pid=os.getpid(),
            max_num_seqs=parts.engine.scheduler.max_num_seqs,
            max_num_batched_tokens=parts.engine.scheduler.max_num_batched_tokens,
            kv_windows=groups.windows,
        )
        worker = cls(parts, record, config.cluster_key.encode(), loop, clock)
        worker._thread.start()
        try:
            await worker._server.start()
        except BaseException:
            await worker.close()
            raise
        worker._watch = loop.create_task(worker._keep_watch())
        return worker

    @property
    def record(self) -> WorkerRecord:
        """The record that membership publishes about this worker."""
        return self._server.record

    def check_health(self) -> None:
        """Raises `EngineFailed` if the engine failed or hangs. Does not depend on other workers."""
        if self._thread.failed is not None:
            raise EngineFailed(f"The engine failed: {self._thread.failed!r}.")
        if self._liveness.is_dead:
            raise EngineFailed(
                f"The engine has not finished a step for {self._liveness.still_s:.0f} s."
            )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and close when all requests have left, or after `timeout_s`.

        In the first half of the time sequences may finish here, in the second half other workers
        pull the KV of sequences that were handed over. If the engine has failed, the worker closes
        at once, so that the worker that Serve starts instead can use its devices.
        """
        leave_by_s = self._clock() + timeout_s / 2
        self._thread.post(lambda: self._begin_drain(leave_by_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                # It polls, because the engine's thread cannot set an event of this loop.
                while not await self._ask(self._is_done):  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_S)
        await self.close()

    async def close(self) -> None:
        """End everything at once; open streams end with `WorkerLost`."""
        if self._watch is not None:
            self._watch.cancel()
        stopped = await self._loop.run_in_executor(None, self._thread.stop, STOP_TIMEOUT_S)
        await self._server.close()
        if stopped:  # otherwise a hung thread may still use the parts
            # This waits for the threads of the parts, some seconds if the store hangs.
            await self._loop.run_in_executor(None, self._core.close)
        if self._ranks is not None:
            await self._loop.run_in_executor(None, self._ranks.close)

    async def check(self) -> None:
        """Recount every block and hold, between two steps. Raises `AssertionError`."""
        await self._ask(self._core.check)

    async def _ask(self, question: Callable[[], T]) -> T:
        """Run `question` in the engine's thread and return its result."""
        answer = Future[T]()

        def ask() -> None:
            if answer.set_running_or_notify_cancel():  # otherwise the caller was cancelled
                try:
                    answer.set_result(question())
                except Exception as error:
                    answer.set_exception(error)

        self._thread.post(ask)
        return await asyncio.wrap_future(answer)

    async def _keep_watch(self) -> None:
        """Close all links if the engine hangs, so that ingresses reroute its streams.

        Links reconnect at once, but the worker is not routable before the engine's thread has
        answered `Resync`; tokens for the old links are dropped.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            features = self._engine.last_plan.features
            learned = StepTimeModel.from_costs(self._server.status.step_costs)
            step_s = max(self._first_times.step_s(features), learned.step_s(features))
            is_stalled = self._liveness.look(self._thread.num_turns, step_s)
            if is_stalled and self._thread.failed is None:
                reason = f"the engine has not finished a step for {self._liveness.still_s} s"
                log.error("Closing all links: %s; it was expected to take %.3f s.", reason, step_s)
                self._server.hang_up(reason)

    def _lose(self, reason: str) -> None:
        """End the worker because a rank has ended. Called in a separate thread."""

        def fail() -> NoReturn:
            raise WorkerLost(f"The worker has lost a rank: {reason}.")

        log.error("The worker ends because it has lost a rank: %s.", reason)
        self._thread.post(fail)
        if self._ranks is not None and self._ranks.may_hang:
            time.sleep(FAIL_WAIT_S)
            if self._thread.failed is None:
                os._exit(1)

    # On the event loop: messages from ingresses.

    def _receive(self, link_id: LinkId, message: Received) -> None:
        core, post = self._core, self._thread.post
        match message:
            case Start() if message.is_prefix_request:
                post(lambda: self._prefix_ticket(link_id, message))
            case Start():
                post(lambda: self._start(link_id, message))
            case Prefetch():
                post(lambda: core.prefetch(message, self._clock()))
            case Cancel(stream_id=stream_id):
                post(lambda: core.cancel(link_id, stream_id, self._clock()))
            case Release(ticket_id=ticket_id):
                post(lambda: core.release(ticket_id))
            case Peers(peers=peers, gone=gone):
                post(lambda: core.add_peers(peers))
                post(lambda: core.forget_peers(gone))
            case AdapterNews(entries=entries):
                post(lambda: self._learn_adapters(entries))
            case Resync():
                post(lambda: self._snapshot(link_id))
            case LinkClosed():
                post(lambda: core.close_link(link_id, self._clock()))

    # In the engine's thread.

    def _is_done(self) -> bool:
        """Whether a drain has nothing left to wait for."""
        return self._core.is_idle or self._thread.failed is not None

    def _begin_drain(self, leave_by_s: float) -> None:
        self._core.drain(leave_by_s)
        self._loop.call_soon_threadsafe(self._server.publish, {}, (), self._status())

    def _learn_adapters(self, entries: tuple[AdapterEntry, ...]) -> None:
        self._core.learn_adapters(entries)
        self._loop.call_soon_threadsafe(self._server.publish, {}, (), self._status())

    def _start(self, link_id: LinkId, start: Start) -> None:
        self._core.start(link_id, start, self._clock())
        self._has_arrivals = True

    def _between_steps(self, now: float) -> bool:
        is_busy = self._core.advance(now)
        if self._has_arrivals and self._server.home_ingress:  # several ingresses
            self._loop.call_soon_threadsafe(self._server.publish_arrivals, self._status())
        self._has_arrivals = False
        return is_busy

    def _prefix_ticket(self, link_id: LinkId, start: Start) -> None:
        # It is answered at once, because the request should not wait for a step.
        delta = self._core.prefix_ticket(link_id, start, self._clock())
        self._loop.call_soon_threadsafe(self._server.answer, link_id, delta)

    def _snapshot(self, link_id: LinkId) -> None:
        # It is posted like the result of a step, so that it arrives in order with KV events.
        hashes, in_host = self._engine.pool.hashes(), self._core.host_hashes()
        self._loop.call_soon_threadsafe(
            self._server.publish_snapshot, link_id, hashes, self._status(), in_host
        )

    def _publish(self, result: StepResult) -> None:
        deltas = self._core.take(result, self._clock())
        kv_events = result.kv_events + self._core.take_host_events()
        self._loop.call_soon_threadsafe(
            self._server.publish, deltas, kv_events, self._status(result)
        )

    def _status(self, result: StepResult | None = None) -> WorkerStatus:
        status = None if result is None else result.status
        return self._core.status(status, self._server.home_ingress)
