"""The streams of a worker whose requests have a TPOT SLO, and the room that their steps leave."""

from __future__ import annotations

import math
from typing import NamedTuple

from disagg.time_model import (
    CHUNK_TOKENS,
    LEAST_CHUNK_TOKENS,
    TPOT_SHARE,
    StepTimeModel,
    prompt_tokens_in,
)

# A step takes longer. Fitted costs may be 0 for each step and for each token, where prompts are so
# long that what they attend to explains all their time.
LEAST_STEP_S = 1e-6


class RunningStreams(NamedTuple):
    """The streams of a worker whose requests have a TPOT SLO. Computed once per report.

    num: sequences that decode, and sequences that will decode here after their prompt.
    step_s: a step without prompt tokens.
    prompt_rate: prompt tokens that the worker can compute a second beside them.
    full_prompt_rate: the same if there were no streams.
    room_s: seconds that a step beside them has for prompts; inf: there are no streams.
    """

    num: int
    step_s: float
    prompt_rate: float
    full_prompt_rate: float
    room_s: float = math.inf
    prompt_step_s: float = 0.0  # a step with prompts, but for their tokens

    def beside_s(self, num_tokens: int, work_s: float) -> float:
        """Seconds of a prompt's steps beside these streams, without its own tokens.

        Args:
            work_s: what `num_tokens` of the prompt add to the steps that compute them.
        """
        num_most = max(1, CHUNK_TOKENS - self.num)
        return max(math.ceil(work_s / self.room_s), -(-num_tokens // num_most)) * self.prompt_step_s

    @classmethod
    def predict(
        cls, times: StepTimeModel, tpot_slo_s: float, num: int, num_context_tokens: int
    ) -> RunningStreams:
        """`num_context_tokens`: of all of them."""
        _, per_token_s, _, _, _, per_prompt_step_s = times.coefficients
        chunk_s = times.prompt_step_s + CHUNK_TOKENS * per_token_s
        full_rate = CHUNK_TOKENS / max(chunk_s, LEAST_STEP_S)
        if not num:
            return cls(0, 0.0, full_rate, full_rate)
        step_s = times.decode_step_s(num, num_context_tokens)
        rate, _ = prompt_rate(times, tpot_slo_s, num, step_s)
        least_s = LEAST_CHUNK_TOKENS * per_token_s
        prompt_step_s = step_s + per_prompt_step_s
        room_s = max(least_s, TPOT_SHARE * tpot_slo_s - prompt_step_s)
        return cls(num, step_s, rate, full_rate, room_s, prompt_step_s)


def prompt_rate(
    times: StepTimeModel, tpot_slo_s: float, num_streams: int, streams_s: float
) -> tuple[float, float]:
    """Prompt tokens that a worker can compute a second beside some streams, and the seconds of a
    step with both.

    Args:
        streams_s: of a step without prompt tokens.
    """
    num_within = prompt_tokens_in(times, TPOT_SHARE * tpot_slo_s - streams_s)
    num_tokens = min(num_within, max(1, CHUNK_TOKENS - num_streams))
    _, per_token_s, _, _, _, per_prompt_step_s = times.coefficients
    step_s = max(streams_s + per_prompt_step_s + num_tokens * per_token_s, LEAST_STEP_S)
    return num_tokens / step_s, step_s
