"""Drafts that are tried while none pays, to notice when some pay again. Knows no clock."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from disagg.engine.sched.sequence import Sequence

SHARE = 0.005  # of the time that all trials together may take
NUM_STEPS = 32  # after which a trial ends without a draft


class Trials:
    """One sequence after the other gets one draft, when enough seconds have passed.

    Attributes:
        sequence: the one of the trial that is going on, if there is one.
        cost_s: seconds that this trial, or the last one, has taken.
    """

    def __init__(self) -> None:
        self.sequence: Sequence | None = None
        self.cost_s = 0.0
        self._calm_s = 0.0
        self._num_begun, self._num_left = 0, 0

    def begin(self, sequences: SequenceOf[Sequence], calm_s: float, least_s: float) -> None:
        """Begin a trial if it is time.

        Args:
            calm_s: seconds without a draft since the last call.
            least_s: seconds that a trial takes, beside those of making its draft.
        """
        self._calm_s += calm_s
        if self.sequence is None and SHARE * self._calm_s >= self.cost_s:
            self.sequence = sequences[self._num_begun % len(sequences)]
            self._num_begun, self._num_left = self._num_begun + 1, NUM_STEPS
            self._calm_s, self.cost_s = 0.0, least_s

    def step(self) -> None:
        """Count a step. The last one ends the trial."""
        self._num_left -= 1
        if not self._num_left:
            self.sequence = None
