"""What one more stream costs a worker whose requests have a TPOT SLO.

A worker fills each step with prompt tokens up to the SLO of its streams
(`engine/sched/step_budget.py`). While steps stay within the SLO, one more stream does not delay the
others; it leaves room for fewer prompt tokens. The first stream of a worker displaces most, since
steps without streams may have any length. So with a tight SLO it is best to gather streams on few
workers; with a loose one they cost little anywhere. Once decode steps alone exceed the SLO, each
additional stream makes all of them miss it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from disagg.router.fleet import WorkerView
from disagg.time_model import CHUNK_TOKENS, TPOT_SHARE, StepTimeModel, prompt_tokens_within


class AddedStream(NamedTuple):
    """The steps of a worker with one more stream, which will generate `num_tokens`.

    before_s, step_s: a step without prompt tokens, before it and with it.
    lost_s: seconds of prompts that the worker will not compute while the stream runs.
    is_tight: steps with prompt tokens take all that the SLO allows.
    """

    num_tokens: int
    num_streams: int  # before it
    tpot_slo_s: float
    before_s: float
    step_s: float
    lost_s: float
    is_tight: bool

    @property
    def num_others_missed(self) -> int:
        """Streams that miss their TPOT SLO because of it."""
        is_late = self.step_s > TPOT_SHARE * self.tpot_slo_s >= self.before_s
        return self.num_streams if is_late else 0

    def is_missed(self, gap_s: float) -> bool:
        """Whether it misses its own.

        Args:
            gap_s: between its first token and its first step on this worker.
        """
        return self.step_s + gap_s / self.num_tokens > TPOT_SHARE * self.tpot_slo_s


def added_stream(worker: WorkerView, num_tokens: int, num_output_tokens: int) -> AddedStream:
    """A stream of `num_output_tokens` after `num_tokens` on `worker`, which has a TPOT SLO."""
    times, tpot_slo_s = worker.times, worker.tpot_slo_s
    num_streams, num_context = worker.num_to_decode, worker.num_context_tokens
    before_s = times.decode_step_s(num_streams, num_context)
    num_context_then = num_context + num_tokens + 0.5 * num_output_tokens
    step_s = times.decode_step_s(num_streams + 1, num_context_then)
    rate, _ = _prompt_rate(times, tpot_slo_s, num_streams, num_context)
    rate_then, mixed_s = _prompt_rate(times, tpot_slo_s, num_streams + 1, num_context_then)
    full_rate, _ = _prompt_rate(times, math.inf, 0, 0)
    lost_s = num_output_tokens * mixed_s * max(0.0, rate - rate_then) / full_rate
    if worker.num_uncomputed_tokens:  # queued prompts wait longer
        slower_s = worker.num_uncomputed_tokens * (1.0 / rate_then - 1.0 / rate)
        lost_s += worker.backlog.num_prompts * max(0.0, slower_s)
    is_tight = step_s + CHUNK_TOKENS * times.coefficients[1] > TPOT_SHARE * tpot_slo_s
    return AddedStream(
        num_output_tokens, num_streams, tpot_slo_s, before_s, step_s, lost_s, is_tight
    )


def _prompt_rate(
    times: StepTimeModel, tpot_slo_s: float, num_streams: int, num_context: float
) -> tuple[float, float]:
    """Prompt tokens a second beside so many streams, and the seconds of a step with them."""
    per_step_s, per_token_s, _, _, _ = times.coefficients
    if not num_streams:
        step_s = per_step_s + CHUNK_TOKENS * per_token_s
        return CHUNK_TOKENS / step_s, step_s
    num_within = prompt_tokens_within(times, TPOT_SHARE * tpot_slo_s, num_streams, num_context)
    num_tokens = min(num_within, max(1, CHUNK_TOKENS - num_streams))
    step_s = times.decode_step_s(num_streams, num_context) + num_tokens * per_token_s
    return num_tokens / step_s, step_s
