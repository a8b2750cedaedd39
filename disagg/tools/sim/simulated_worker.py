"""A simulated worker: the real engine, block pool, KV export and import, without a device.

It does what `engine_thread` and `links` do for a real worker: it takes messages between steps,
reports each step to the router's fleet when it ends, and passes tokens to their streams. Only the
first token of a stream is passed on at once. The others are passed on with the
last token, because the simulation does not read them earlier.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable

import msgspec

from disagg.engine.engine import Engine
from disagg.engine.engine_thread import STALLED_WAIT_S, StepResult
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.step import TokenEvent
from disagg.errors import WorkerLost
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.messages import (
    KVEvent,
    Prefetch,
    PutDelta,
    Role,
    Start,
    TokenDelta,
    WorkerRecord,
    WorkerStatus,
)
from disagg.router.fleet import NUM_STATUSES_UNTIL_SEEN
from disagg.time_model import StepTimeModel
from disagg.tools.sim.ingresses import EveryIngress
from disagg.tools.sim.network import SimulatedNetwork, SimulatedTransport
from disagg.tools.sim.steps import StepRun, StepTimes, TimedRunner, move_on, num_alike
from disagg.worker.core import WorkerCore
from disagg.worker.kv_export import HOLD_TTL_S
from disagg.worker.parts import Parts
from disagg.worker.streams import sequence_id

LINK = 0  # all ingresses count as one link, because none of them is ever lost
LAYOUT = "simulated"


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of one worker. Fields are named like the engine's settings."""

    worker_id: str
    role: Role
    model: str
    num_blocks: int
    block_size: int
    block_nbytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    times: StepTimeModel  # the prior, until it has measured steps
    steps: StepTimes


class SimulatedWorker:
    """A simulated worker, which reports to `fleet` what a real worker's links would report.

    num_prompt_tokens, busy_s: work done so far.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        epoch: int,
        network: SimulatedNetwork,
        fleet: EveryIngress,
    ) -> None:
        self.spec = spec
        self.busy_s = 0.0
        self._loop = network.loop
        self._began_s, self._died_s = network.loop.time(), math.inf
        self._fleet = fleet
        stamps = Stamps(spec.num_blocks, spec.worker_id, epoch)
        pool = BlockPool(spec.num_blocks, spec.block_size, stamps.generations)
        scheduler = Scheduler(
            pool,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
        )
        self._runner = TimedRunner()
        self._engine = Engine(scheduler, self._runner)
        slab = Slab(1, spec.num_blocks, spec.block_nbytes, LAYOUT)
        self.transport = SimulatedTransport(network, slab, stamps, self._wake)
        self._core = WorkerCore(
            Parts(
                self._engine,
                stamps,
                self.transport,
                None,
                lambda block_ids: [b""] * len(block_ids),
                lambda block_id, content: None,
                spec.times,
            )
        )
        self._streams: dict[str, _Stream] = {}  # by request id
        self._stream_ids = itertools.count(1)
        self._messages: list[Callable[[float], None]] = []
        self._has_arrivals = False  # whether requests have arrived since the last step
        self._run: StepRun | None = None
        self._events: tuple[TokenEvent, ...] = ()  # events of the run's first step
        self._kv_events: tuple[KVEvent, ...] = ()
        self._status = WorkerStatus()
        self._num_reported = 0  # steps of the run that were reported to the fleet
        self._timer: asyncio.Handle | None = None
        self._is_alive = True
        record = WorkerRecord(
            worker_id=spec.worker_id,
            role=spec.role,
            model=spec.model,
            host="simulated",
            port=0,
            epoch=epoch,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            max_model_len=spec.max_model_len,
            peer=self.transport.peer,
            pid=0,
            max_num_seqs=spec.max_num_seqs,
        )
        self._home_ingress = fleet.home_of(spec.worker_id)
        fleet.worker_synced(record, (), self._status_now())

    @property
    def num_prompt_tokens(self) -> int:
        return self._runner.num_prompt_tokens

    def meet(self, other: SimulatedWorker) -> None:
        self._core.add_peers((other.transport.peer,))

    async def run(self, start: Start, put: PutDelta) -> None:
        """See `ingress.dispatch.Workers`."""
        stream_id, token_ids = next(self._stream_ids), start.request.token_ids
        name = sequence_id(LINK, stream_id)
        stream = self._streams[name] = _Stream(token_ids[0] if token_ids else 0)
        start = msgspec.structs.replace(start, stream_id=stream_id)
        enter = self._prefix_ticket if start.is_prefix_request else self._start
        self._post(lambda now: enter(start, now))
        try:
            delta: TokenDelta | None = None
            while delta is None or not delta.is_last:
                delta = await stream.deltas.get()
                if delta is None:
                    raise WorkerLost(f"Worker {self.spec.worker_id} is gone.")
                put(delta)
        finally:
            if self._streams.pop(name, None) is not None:
                self._post(lambda now: self._core.cancel(LINK, stream_id, now))

    def _start(self, start: Start, now: float) -> None:
        self._core.start(LINK, start, now)
        self._has_arrivals = True

    def _prefix_ticket(self, start: Start, now: float) -> None:
        self._hand_over(self._core.prefix_ticket(LINK, start, now), now)

    def release(self, ticket_id: str) -> None:
        """Free the blocks of this worker's ticket, which will not be used."""
        self._post(lambda now: self._core.release(ticket_id))

    def prefetch(self, asked: Prefetch) -> None:
        """See `ingress.dispatch.Workers`."""
        self._post(lambda now: self._core.prefetch(asked, now))

    @property
    def is_idle(self) -> bool:
        """Whether the worker has neither streams nor holds."""
        return self._run is None and self._core.is_idle

    def drain(self, leave_by_s: float) -> None:
        """Refuse new requests, and hand over requests that will not end before `leave_by_s`."""
        self._post(lambda now: self._begin_drain(leave_by_s, now))

    def _begin_drain(self, leave_by_s: float, now: float) -> None:
        self._core.drain(leave_by_s)
        self._report(StepResult((), (), self._engine.status()), now)

    @property
    def alive_s(self) -> float:
        """Seconds from its start to its death, or until now."""
        return min(self._died_s, self._loop.time()) - self._began_s

    def die(self) -> None:
        """Die without notice: all streams end, and the transport closes."""
        self._is_alive = False
        self._died_s = self._loop.time()
        self._plan_turn(None)
        self._core.close()
        self._fleet.worker_lost(self.spec.worker_id)
        for stream in self._streams.values():
            stream.deltas.put_nowait(None)
        self._streams.clear()

    def report_progress(self) -> None:
        """Report each step that has ended to the fleet, as a link's frames would."""
        run = self._run
        if run is not None and run.num_more:
            # Its turn reports the last step.
            self._report_steps(run, min(run.num_ended(self._loop.time()), run.num_more))

    def check(self) -> None:
        """Recount every block. Raises `AssertionError`."""
        self._core.check()

    def _post(self, message: Callable[[float], None]) -> None:
        self._messages.append(message)
        self._wake()

    def _wake(self) -> None:
        """Run the worker's loop now, or after the running step."""
        if not self._is_alive:
            return
        if self._run is None:
            self._plan_turn(self._loop.time())
        elif self._run.num_more:
            self._run.cut(self._loop.time())
            self._plan_turn(self._run.ends_s[-1])

    def _plan_turn(self, at_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at_s is None else self._loop.call_at(at_s, self._turn)

    def _turn(self) -> None:
        now = self._loop.time()
        self._timer = None
        if self._run is not None:
            self._end_run(self._run, now)
        messages, self._messages = self._messages, []
        for message in messages:
            message(now)
        is_moving = self._core.advance(now)
        if self._has_arrivals:
            self._has_arrivals = False
            self._fleet.requests_arrived(self.spec.worker_id, self._status_now)
        self._engine.expire(now)
        events = tuple(self._engine.step())
        kv_events = self._engine.pool.take_events()
        if self._engine.last_plan.sequences:
            self._begin_run(events, kv_events, now, is_moving)
            return
        if events or kv_events or messages:
            self._report(StepResult(events, kv_events, self._engine.status()), now)
        if self._engine.has_work or (is_moving and not self.transport.is_pulling):
            self._plan_turn(now + STALLED_WAIT_S)

    def _begin_run(
        self,
        events: tuple[TokenEvent, ...],
        kv_events: tuple[KVEvent, ...],
        now: float,
        is_moving: bool,
    ) -> None:
        """Begin a run. The engine has applied its first step, which is reported when it ends.

        Args:
            is_moving: KV is being pulled, which may be given up between two steps.
        """
        self._events, self._kv_events, self._num_reported = events, kv_events, 0
        is_plain = not kv_events and not is_moving and all(map(self._may_wait, events))
        num_more = num_alike(self._engine) if is_plain else 0
        self._run = StepRun(self._engine.last_plan.features, self.spec.steps, now, num_more)
        self._status = self._engine.status()
        self._plan_turn(self._run.ends_s[-1])

    def _end_run(self, run: StepRun, now: float) -> None:
        self._run = None
        self.busy_s += now - run.began_s
        events: list[TokenEvent] = []
        for event in self._events:
            if self._may_wait(event):
                num_late = len(event.token_ids) + run.num_more
                self._streams[event.sequence.request_id].num_late += num_late
            else:
                events.append(event)
        self._report_steps(run, run.num_more)  # all but the last
        if run.num_more:
            move_on(self._engine.scheduler, run.num_more)
        self._report(self._result_of(run, run.num_more, tuple(events), self._kv_events), now)

    def _result_of(
        self,
        run: StepRun,
        number: int,
        events: tuple[TokenEvent, ...] = (),
        kv_events: tuple[KVEvent, ...] = (),
    ) -> StepResult:
        features, status = run.features(number), self._status
        if number:
            num_context = status.num_context_tokens + features.num_decoding * number
            status = msgspec.structs.replace(status, num_context_tokens=num_context)
        return StepResult(events, kv_events, status, features, run.steps_s[number])

    def _may_wait(self, event: TokenEvent) -> bool:
        """Whether an event's tokens are in the middle of a stream."""
        stream = self._streams.get(event.sequence.request_id)
        return not event.is_last and stream is not None and stream.has_begun

    def _report_steps(self, run: StepRun, num_ended: int) -> None:
        """Report the run's first `num_ended` steps to the fleet, at the times when they ended.

        The fleet needs only the last ones, and those that have changed what it knows of the worker.
        """
        for number in range(self._num_reported, num_ended):
            before, at_s = self._core.step_costs, run.ends_s[number]
            result = self._result_of(run, number)
            with self._loop.back_at(at_s):
                self._core.take(result, at_s)
                is_last = num_ended - number <= NUM_STATUSES_UNTIL_SEEN
                if is_last or self._core.step_costs is not before:
                    self._tell(result)
        self._num_reported = max(self._num_reported, num_ended)

    def _report(self, result: StepResult, now: float) -> None:
        for deltas in self._core.take(result, now).values():
            for delta in deltas:
                self._hand_over(delta, now)
        self._tell(result)

    def _tell(self, result: StepResult) -> None:
        status = self._core.status(result.status, self._home_ingress)
        self._fleet.worker_stepped(self.spec.worker_id, result.kv_events, status)

    def _status_now(self) -> WorkerStatus:
        return self._core.status(None, self._home_ingress)

    def _hand_over(self, delta: TokenDelta, now: float) -> None:
        if delta.ticket is not None:  # check later whether the reader came
            self._loop.call_at(now + HOLD_TTL_S, self._wake)
        name = sequence_id(LINK, delta.stream_id)
        stream = self._streams.get(name)
        if stream is None:
            return
        stream.has_begun = True
        if delta.is_last:
            del self._streams[name]
            if stream.num_late:
                tokens = (stream.token_id,) * stream.num_late + delta.token_ids
                delta = msgspec.structs.replace(delta, token_ids=tokens)
        stream.deltas.put_nowait(delta)


class _Stream:
    """A stream of tokens.

    token_id: the token that the answer repeats.
    num_late: number of tokens that are not passed on yet.
    """

    __slots__ = ("deltas", "has_begun", "num_late", "token_id")

    def __init__(self, token_id: int) -> None:
        self.deltas: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        self.token_id = token_id
        self.has_begun = False
        self.num_late = 0
