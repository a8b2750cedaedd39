"""Draining: empties a worker that is about to stop, without computing any token twice.

Sequences that have not begun are refused, so that their ingress reroutes them. Sequences that are
predicted to finish in time may finish. The others are handed over after one more token, with a
ticket for their KV, as after a prefill. It is used by the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.errors import Unavailable
from disagg.time_model import StepTimeModel


def refusal() -> Unavailable:
    return Unavailable("This worker is stopping and takes no new requests.")


class Draining:
    """Empties an engine.

    Args:
        take_waiting: removes and returns sequences that can start on another worker instead.
        step_times: the current time model.
        leave_by_s: Unix seconds; sequences that would end later are handed over at once.
    """

    def __init__(
        self,
        engine: Engine,
        take_waiting: Callable[[], list[Sequence]],
        step_times: Callable[[], StepTimeModel],
        leave_by_s: float,
    ) -> None:
        self._engine = engine
        self._take_waiting = take_waiting
        self._step_times = step_times
        self._leave_by_s = leave_by_s

    def advance(self, now: float) -> None:
        """Refuse waiting sequences, and hand over those that would not finish in time."""
        for sequence in [*self._engine.scheduler.waiting, *self._take_waiting()]:
            self._engine.end(sequence, refusal())
        scheduler = self._engine.scheduler
        left_s = self._leave_by_s - now
        step_s = self._step_s()
        for sequence in [*scheduler.running, *scheduler.imported]:
            if not sequence.hand_over and _num_steps(sequence) * step_s > left_s:
                scheduler.hand_over(sequence)

    def _step_s(self) -> float:
        running = self._engine.scheduler.running
        num_context_tokens = sum(sequence.num_computed for sequence in running)
        return self._step_times().decode_step_s(len(running), num_context_tokens)


def _num_steps(sequence: Sequence) -> int:
    """Upper bound of the number of steps until a sequence ends."""
    return sequence.max_num_tokens - len(sequence.tokens)
