"""Detects a hung engine, whose thread completes no iteration for longer than a step may take.

Time is counted in checks of the watching task, not with a clock. While the process is stopped or
gets no CPU time, the task makes no checks either, so the engine does not look hung.
"""

from __future__ import annotations

LOOK_S = 0.25  # between two checks
TURN_S = 3.0  # an iteration may take this long, plus ...
STEP_FACTOR = 4.0  # ... this many times the predicted seconds of the running step
DEAD_FACTOR = 3.0  # a worker is replaced later than it is avoided, because that loses its cache


class Liveness:
    """Whether one engine hangs, from successive checks.

    Args:
        turn_s: how long an iteration may take besides its step; `TURN_S` if it is None.
    """

    def __init__(self, turn_s: float | None = None) -> None:
        self.still_s = 0.0  # time since the engine completed an iteration
        self._turn_s = self._limit_s = TURN_S if turn_s is None else turn_s
        self._num_turns = -1

    @property
    def is_stalled(self) -> bool:
        """Whether the engine hangs, so that its requests should be rerouted."""
        return self.still_s > self._limit_s

    @property
    def is_dead(self) -> bool:
        """Whether the engine hangs for so long that the worker should be replaced."""
        return self.still_s > DEAD_FACTOR * self._limit_s

    def look(self, num_turns: int, step_s: float) -> bool:
        """Check once. Returns True only when the engine is found stalled for the first time.

        Args:
            num_turns: number of iterations of the engine's thread so far.
            step_s: predicted seconds of the running step.
        """
        was_stalled = self.is_stalled
        self.still_s = self.still_s + LOOK_S if num_turns == self._num_turns else 0.0
        self._num_turns = num_turns
        self._limit_s = self._turn_s + STEP_FACTOR * step_s
        return self.is_stalled and not was_stalled
