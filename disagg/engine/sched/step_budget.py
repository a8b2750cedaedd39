"""How many tokens a step may have, so that its decoding streams meet their TPOT SLOs.

A stream's TPOT is a mean, so a stream that was faster than its SLO has time to spare, and one that
waited for its KV has to catch up. The stream with the least time to spare decides how long a step
with prompt tokens may last, by the worker's fitted step times. So prompts use the slack of streams,
and delay no stream that has none. A stream that can no longer meet its SLO counts as if it were
exactly on time: it neither stops prompts nor lets steps grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from disagg.engine.sched.sequence import Sequence
from disagg.time_model import TPOT_SHARE, StepTimeModel, prompt_tokens_within

# Slack is spent, and a delay is made up, within the first number of steps, or within a share of the
# tokens that a short answer may still have. A stream that would need more than the second number of
# steps can no longer meet its SLO.
NUM_STEPS_TO_SPEND, NUM_STEPS_TO_RECOVER = 8, 64
SHARE_TO_CATCH_UP = 0.25

_TPOT_SLO_S = attrgetter("tpot_slo_s")


class StepBudget:
    """The token budget of steps.

    Args:
        max_num_batched_tokens: most tokens of any step.

    Attributes:
        most: the same number.
        times: the fitted time model; None: not known yet.
        now_s: when the next step begins, in seconds of any clock.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.times: Callable[[], StepTimeModel] | None = None
        self.now_s = 0.0
        self.most = max_num_batched_tokens

    def of_prompts(
        self, decodes: SequenceOf[Sequence], num_context: int, num_before: int | None
    ) -> int:
        """Tokens that are left for prompts in a step with `decodes`, which take one each.

        Args:
            num_context: tokens of `decodes`.
            num_before: computed tokens of the first prompt; None: there is no prompt.
        """
        budget = self.most - len(decodes)
        if self.times is None or num_before is None or not decodes:
            return budget
        if min(map(_TPOT_SLO_S, decodes)) == math.inf:
            return budget
        times = self.times()
        least_s = times.decode_step_s(len(decodes), num_context)
        step_slo_s = min([self._allowed_s(sequence, least_s) for sequence in decodes])
        num_tokens = prompt_tokens_within(times, step_slo_s, len(decodes), num_context, num_before)
        return min(budget, num_tokens)

    def _allowed_s(self, sequence: Sequence, least_s: float) -> float:
        """Seconds that the next step may take for a stream. `least_s`: a step without prompts."""
        tpot_slo_s = sequence.tpot_slo_s
        if tpot_slo_s == math.inf:
            return math.inf
        if sequence.stream_since is None:
            sequence.stream_since = self.now_s, len(sequence.tokens)
        since_s, num_tokens = sequence.stream_since
        spare_s = tpot_slo_s * (len(sequence.tokens) - num_tokens) - (self.now_s - since_s)
        usual_s = TPOT_SHARE * tpot_slo_s
        if usual_s + spare_s / NUM_STEPS_TO_RECOVER < least_s:
            return usual_s
        num_steps: float = NUM_STEPS_TO_SPEND
        if spare_s < 0.0:
            num_left = sequence.max_num_tokens - len(sequence.tokens)
            num_steps = min(num_steps, max(1.0, SHARE_TO_CATCH_UP * num_left))
        return usual_s + spare_s / num_steps
