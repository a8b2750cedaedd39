"""The thread that owns an engine, and the only bridge between it and an asyncio loop.

Other threads post messages; results are passed to `publish`, once per iteration that has any. If
the engine fails, every sequence ends with an error, and the thread keeps running to refuse new
requests, so that none waits for ever.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

import msgspec

from disagg.engine.engine import Engine
from disagg.engine.sched.step import TokenEvent
from disagg.errors import DisaggError, EngineFailed, WorkerLost
from disagg.messages import KVEvent, WorkerStatus
from disagg.time_model import StepFeatures

IN_FLIGHT_WAIT_S = 0.0005  # between two checks while a transfer is running
STALLED_WAIT_S = 0.005  # while sequences wait for blocks that other parts hold
IDLE_WAIT_S = 0.25  # while idle; a healthy thread iterates at least this often

Message = Callable[[], None]

log = logging.getLogger(__name__)


class StepResult(msgspec.Struct, frozen=True):
    """The result of one iteration of the thread.

    features, seconds: features and duration of the step, for the time model; features is None if
        the iteration had no step.
    failure: not None if the engine is broken; then everything that waits for it must end with it.
    """

    events: tuple[TokenEvent, ...]
    kv_events: tuple[KVEvent, ...]
    status: WorkerStatus
    features: StepFeatures | None = None
    seconds: float = 0.0
    failure: DisaggError | None = None


# CUDA's codes for the device's own faults: it is unavailable, or its memory or NVLink is defective.
DEVICE_FAULTS = (46, 214, 220)


def engine_failed(cause: Exception) -> DisaggError:
    """The error of the requests in a step that broke the engine, of which any may be the cause."""
    if getattr(cause, "error_code", None) in DEVICE_FAULTS:  # of torch.AcceleratorError
        return WorkerLost(f"The worker's device failed: {cause!r}")
    return EngineFailed(
        f"The engine failed in a step of this request, which is sent to no other: {cause!r}"
    )


class EngineThread:
    """Runs an engine until stopped.

    Args:
        engine: after `start`, only this thread and posted messages may use it.
        publish: takes each result, in the engine's thread; it must not block.
        clock: returns Unix seconds, for deadlines.
        timer: returns monotonic seconds, for durations.
        between_steps: called between steps with the time of the clock; returns whether it has work
            in progress and wants to be called again soon.
        diagnose: makes the error that requests in a step get from the exception that broke the
            engine; it may block.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        publish: Callable[[StepResult], None],
        clock: Callable[[], float],
        timer: Callable[[], float],
        between_steps: Callable[[float], bool] | None = None,
        diagnose: Callable[[Exception], DisaggError] = engine_failed,
        name: str = "engine",
    ) -> None:
        self.engine = engine
        self.failed: BaseException | None = None
        self.num_turns = 0  # iterations so far; other threads read it to see that the engine runs
        self._publish = publish
        self._clock = clock
        self._timer = timer
        self._between_steps = between_steps
        self._diagnose = diagnose
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopping = False
        self._wait_s = 0.0
        self._began_s = 0.0  # when the running step, or else the last one, began
        self._last_status = WorkerStatus()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, message: Message) -> None:
        """Call `message()` in the engine's thread before its next step. Thread-safe."""
        self._messages.put(message)

    def stop(self, timeout: float) -> bool:
        """End all sequences with `WorkerLost` and the thread. False if it is alive after `timeout`
        seconds."""
        self.post(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            self.engine.begin_thread()
            while not self._stopping:
                self._turn()
            self._take_messages(0.0)
            self.engine.end_all(WorkerLost("The worker stopped before the request was done."))
            self._publish_result(self.engine.step(), 0.0)
        except Exception as error:
            # Serve only tells its controller why it replaces the worker.
            log.error("The engine failed, and its worker ends: %r.", error, exc_info=True)
            self.failed = error
            self._refuse_all(error)

    def _turn(self) -> None:
        self._take_messages(self._wait_s)
        self.num_turns += 1
        now = self._clock()
        in_flight = self._between_steps is not None and self._between_steps(now)
        engine = self.engine
        engine.expire(now)
        if not engine.is_under_way:  # otherwise the step began when the last one ended
            self._began_s = self._timer()
        events = engine.step()
        began_s, self._began_s = self._began_s, self._timer()
        # The time model is of the model's own steps.
        drafts_s = engine.scheduler.drafting.take_spent_s()
        self._publish_result(events, self._began_s - began_s - drafts_s)
        if engine.last_plan.sequences:
            self._wait_s = 0.0
        elif in_flight:
            self._wait_s = IN_FLIGHT_WAIT_S
        else:
            self._wait_s = STALLED_WAIT_S if engine.has_work else IDLE_WAIT_S

    def _take_messages(self, wait_s: float) -> None:
        """Run all posted messages; wait up to `wait_s` for the first."""
        while True:
            try:
                message = self._messages.get(block=wait_s > 0, timeout=wait_s)
            except queue.Empty:
                return
            message()
            wait_s = 0.0

    def _publish_result(self, events: list[TokenEvent], seconds: float) -> None:
        plan = self.engine.last_plan
        kv_events = self.engine.pool.take_events()
        status = self.engine.status()
        if not (plan.sequences or events or kv_events) and status == self._last_status:
            return
        self._last_status = status
        result = StepResult(
            tuple(events),
            kv_events,
            status,
            plan.features if plan.sequences else None,
            seconds,
        )
        self._publish(result)

    def _refuse_all(self, cause: Exception) -> None:
        """Answer every request with the engine's failure, until `stop` is called.

        Those that were in no step are not its cause: another worker may serve them.
        """
        of_step = self._diagnose(cause)
        of_step.__cause__ = cause
        of_others = WorkerLost(f"The engine of this worker failed before this request: {cause!r}")
        while True:
            events = tuple(self.engine.abandon(of_step, of_others))
            self._publish(StepResult(events, (), self._last_status, failure=of_others))
            if self._stopping:
                return
            with contextlib.suppress(Exception):  # the first failure is the one to report
                self._messages.get()()
