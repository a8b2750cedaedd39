"""Detects a hung engine: its thread completes no iteration, for longer than a step may take.

Time is counted in looks of the watching task, not on a clock: while the process is stopped or gets
no CPU time, it does not look either, and its engine must not be mistaken for a hung one.
"""

from __future__ import annotations

LOOK_S = 0.25  # between two looks
TURN_S = 3.0  # what a turn may take on top of its step
STEP_FACTOR = 4.0  # times what the time model predicts for the step under way
DEAD_FACTOR = 3.0  # routing around a worker costs little, starting it anew costs its cache


class Liveness:
    """The verdict over successive looks at one engine."""

    def __init__(self) -> None:
        self.still_s = 0.0  # since the engine was last seen to turn
        self._limit_s = TURN_S
        self._num_turns = -1

    @property
    def is_stalled(self) -> bool:
        """The engine hangs: requests should leave it."""
        return self.still_s > self._limit_s

    @property
    def is_dead(self) -> bool:
        """It will not turn again."""
        return self.still_s > DEAD_FACTOR * self._limit_s

    def look(self, num_turns: int, step_s: float) -> bool:
        """Compare with the last look. True when the engine is found stalled, once each time.

        Args:
            num_turns: of the engine's thread, so far.
            step_s: what the step under way should take.
        """
        was_stalled = self.is_stalled
        self.still_s = self.still_s + LOOK_S if num_turns == self._num_turns else 0.0
        self._num_turns = num_turns
        self._limit_s = TURN_S + STEP_FACTOR * step_s
        return self.is_stalled and not was_stalled
