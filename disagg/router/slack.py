"""What one more stream costs a worker whose requests have a TPOT SLO.

A worker fills each step with prompt tokens up to the SLO of its streams
(`engine/sched/step_budget.py`). While steps stay within the SLO, one more stream does not delay the
others; it leaves room for fewer prompt tokens. The first stream of a worker displaces most, since
steps without streams may have any length. So with a tight SLO it is best to gather streams on few
workers; with a loose one they cost little anywhere. Once decode steps alone exceed the SLO, each
additional stream makes all of them miss it.
"""

from __future__ import annotations

from typing import NamedTuple

from disagg.router.running_streams import prompt_rate
from disagg.router.worker_view import WorkerView
from disagg.time_model import CHUNK_TOKENS, TPOT_SHARE


class AddedStream(NamedTuple):
    """The steps of a worker with one more stream, which will generate `num_tokens`.

    per_step_s: a step with nothing in it.
    before_s, step_s: a step without prompt tokens, before it and with it.
    lost_s: how long the worker, without the stream, would compute the prompts that the stream
        displaces.
    is_tight: the SLO leaves less room in a step than a full chunk of prompt tokens takes.
    """

    num_tokens: int
    num_streams: int  # before it
    tpot_slo_s: float
    per_step_s: float
    before_s: float
    step_s: float
    lost_s: float
    is_tight: bool

    @property
    def num_others_missed(self) -> float:
        """How many running streams miss their TPOT SLO because of the new stream.

        If they miss it anyway, one more stream must end before the worker meets the SLO again.
        Until then it serves fewer streams in time, by the share of its streams that could meet the
        SLO. That share is zero on a GPU that is too slow for any stream, so streams that cannot
        meet their SLO go there first.
        """
        slo_s = TPOT_SHARE * self.tpot_slo_s
        if self.step_s <= slo_s:
            return 0.0
        if self.before_s <= slo_s:
            return self.num_streams
        room_s = slo_s - self.per_step_s
        return room_s / (self.before_s - self.per_step_s) if room_s > 0.0 else 0.0

    def is_missed(self, gap_s: float) -> bool:
        """Whether the new stream misses its own TPOT SLO.

        Args:
            gap_s: between its first token and its first step on this worker.
        """
        return self.step_s + gap_s / self.num_tokens > TPOT_SHARE * self.tpot_slo_s


def added_stream(worker: WorkerView, num_tokens: int, num_output_tokens: int) -> AddedStream:
    """A stream of `num_output_tokens` after `num_tokens` on `worker`, which has a TPOT SLO."""
    times, tpot_slo_s, before = worker.times, worker.tpot_slo_s, worker.streams
    assert before is not None
    num_context_then = worker.num_context_tokens + num_tokens + 0.5 * num_output_tokens
    step_s = times.decode_step_s(before.num + 1, num_context_then)
    rate_then, mixed_s = prompt_rate(times, tpot_slo_s, before.num + 1, step_s)
    lost_s = 0.0
    if rate_then < before.prompt_rate:
        lost_rate = before.prompt_rate - rate_then
        lost_s = num_output_tokens * mixed_s * lost_rate / before.full_prompt_rate
        num_queued = worker.num_uncomputed_tokens  # queued prompts wait longer
        slower_s = num_queued * (1.0 / rate_then - 1.0 / before.prompt_rate)
        lost_s += worker.backlog.num_prompts * slower_s
    per_step_s, per_token_s, _, _, _, per_prompt_step_s = times.coefficients
    full_s = step_s + per_prompt_step_s + CHUNK_TOKENS * per_token_s
    is_tight = full_s > TPOT_SHARE * tpot_slo_s
    return AddedStream(
        num_output_tokens,
        before.num,
        tpot_slo_s,
        per_step_s,
        before.step_s,
        step_s,
        lost_s,
        is_tight,
    )


def first_stream_s(worker: WorkerView, num_tokens: int, num_output_tokens: int) -> float:
    """As `lost_s`, if the stream were the first one on a worker like this."""
    times, tpot_slo_s, streams = worker.times, worker.tpot_slo_s, worker.streams
    assert streams is not None
    step_s = times.decode_step_s(1, num_tokens + 0.5 * num_output_tokens)
    rate, mixed_s = prompt_rate(times, tpot_slo_s, 1, step_s)
    full_rate = streams.full_prompt_rate
    return num_output_tokens * mixed_s * max(0.0, full_rate - rate) / full_rate
