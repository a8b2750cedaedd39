"""How well a given number of workers would have served the recent load, for sizing pools.

The load of the last minutes is replayed second by second, so bursts are not averaged away. For
steady arrivals a queueing formula adds the effect of chance. Prompts of one second count with their
mean length. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from disagg.queueing import QUANTILE, under_way, wait_s
from disagg.router.load_report import PoolState, RequestTotals
from disagg.time_model import CHUNK_TOKENS, StepTimeModel

# A queue of prompts of unlike lengths: variance of their seconds over the squared mean.
VARIABILITY = 1.0

# Admission refuses usual prompts where the queue takes about this share of the SLO: beyond it, the
# errors of predictions make too many late.
QUEUE_PER_SLO = 0.75

# A refused prompt is longer than the mean, because short ones still fit: by this share of the
# variability of lengths. Compared with a queue of single requests in docs/notebook/routing.md.
REFUSED_LONGER = 1 / 3

# A rate counts as steady after so long. That of the first second would often be several times the
# usual one, by chance.
STEADY_S = 30.0


class Slice(msgspec.Struct, frozen=True):
    """The requests of a tier in the `seconds` that ended at `ends_s`."""

    ends_s: float
    seconds: float
    asked: RequestTotals


def prefill_ttft_s(
    slices: Sequence[Slice],
    times: StepTimeModel,
    num_workers: float,
    ttft_slo_s: float = math.inf,
) -> float:
    """The 95 % quantile of TTFT in seconds if `num_workers` had served `slices`.

    A fraction of a worker is a worker that also decodes. Admission refuses requests that would miss
    `ttft_slo_s`, with its usual margin: they count as late, and leave no work behind.
    """
    if num_workers <= 0.0:
        return math.inf if any(each.asked.num_requests for each in slices) else 0.0
    backlog_s = work_s = lasted_s = num_requests = 0.0
    longer = 1.0 + REFUSED_LONGER * sum_of(slices).length_variability
    seen: list[tuple[float, float]] = []
    own: list[tuple[float, float]] = []
    for each in slices:
        number = each.asked.num_requests
        own_s = own_prefill_s(each.asked, times)
        before_s, room_s = backlog_s, num_workers * each.seconds
        backlog_s = max(0.0, before_s + number * own_s - room_s)
        if number > 0.0:
            longest_s = num_workers * max(own_s, QUEUE_PER_SLO * ttft_slo_s)
            num_refused = 0.0
            if backlog_s > longest_s:
                # Of prompts that are cached, nothing is to be computed, and they would wait too.
                num_refused, refused_s = number, number * own_s
                if refused_s > backlog_s - longest_s:
                    refused_s = backlog_s - longest_s
                    num_refused = refused_s / (longer * own_s)
                seen.append((backlog_s / num_workers / QUEUE_PER_SLO, num_refused))
                backlog_s -= refused_s  # what was admitted before stays
            waited_s = max(0.0, max(before_s, backlog_s) / num_workers - own_s)
            seen.append((waited_s + own_s, number - num_refused))
            own.append((own_s, number))
        work_s += number * own_s
        num_requests += number
        lasted_s += each.seconds
    if not num_requests:
        return 0.0
    mean_s = work_s / num_requests
    offered = work_s / max(lasted_s, STEADY_S)
    by_chance_s = wait_s(num_workers, offered, mean_s, VARIABILITY)
    return max(quantile(seen), by_chance_s + quantile(own))


def sum_of(slices: Sequence[Slice]) -> RequestTotals:
    """The requests of all slices together."""
    return RequestTotals(*map(sum, zip(*(each.asked for each in slices), strict=True)))


def decode_tpot_s(slices: Sequence[Slice], state: PoolState, num_workers: float) -> float:
    """The 95 % quantile of TPOT in seconds if `num_workers` had served `slices`.

    Little's law, with time to settle: answers of L tokens at a step of s seconds stay for L s, and
    the batch that they make decides how long a step takes. Infinite where they have no room.
    """
    times = state.times or StepTimeModel()
    if num_workers <= 0.0:
        return math.inf if any(each.asked.num_requests for each in slices) else 0.0
    running = 0.0  # on one worker
    seen: list[tuple[float, float]] = []
    for each in slices:
        number = each.asked.num_requests
        if not number:
            stays_s = times.decode_step_s(1.0, 0.0)  # short answers; the rest is gone soon
            running *= math.exp(-each.seconds / max(stays_s, 1e-9))
            continue
        length = max(1.0, each.asked.num_output_tokens / number)
        reads = each.asked.num_prompt_tokens / number + 0.5 * length
        stays_s = length * times.decode_step_s(max(1.0, running), running * reads)
        settled = number / each.seconds / num_workers * stays_s
        peak = max(running, settled)
        running = settled + (running - settled) * math.exp(-each.seconds / max(stays_s, 1e-9))
        batch = max(1.0, under_way(peak * num_workers) / num_workers)
        seen.append((seconds_of_step(state, times, batch, batch * reads), number))
    return quantile(seen)


def seconds_queued(slices: Sequence[Slice], state: PoolState, times: StepTimeModel) -> float:
    """Seconds of one worker for the queued prompts, if they are as long as the recent ones."""
    num_requests = sum(each.asked.num_requests for each in slices)
    num_tokens = sum(each.asked.num_prompt_tokens for each in slices)
    mean = num_tokens / num_requests if num_requests and num_tokens else CHUNK_TOKENS
    mean = min(mean, state.num_queued_tokens)
    return state.num_queued_tokens / mean * times.prefill_s(mean) if mean else 0.0


# Each size of a pool that is tried has the same load replayed: a quarter of an hour is 900 slices.
@lru_cache(maxsize=4096)
def own_prefill_s(asked: RequestTotals, times: StepTimeModel) -> float:
    if not asked.num_requests:
        return 0.0
    cached = min(asked.num_cached_tokens, asked.num_prompt_tokens) / asked.num_requests
    return times.prefill_s(asked.num_prompt_tokens / asked.num_requests - cached, cached)


def seconds_of_step(
    state: PoolState, times: StepTimeModel, batch: float, num_context: float
) -> float:
    """Seconds of a decode step of a worker with so many sequences; infinite without room."""
    if state.max_num_seqs and batch > max(1, state.max_num_seqs):
        return math.inf
    if state.num_kv_tokens and num_context > state.num_kv_tokens and batch > 1.0:
        return math.inf
    return times.decode_step_s(batch, num_context)


def quantile(seen: list[tuple[float, float]]) -> float:
    """The value that `QUANTILE` of the weights are not above, of (value, weight)."""
    left = (1.0 - QUANTILE) * sum(weight for _, weight in seen)
    for value, weight in sorted(seen, reverse=True):
        left -= weight
        if left < 0.0:
            return value
    return 0.0
