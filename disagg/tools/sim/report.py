"""The report of a simulation: percentiles, hits, imbalance and costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from disagg.messages import Role
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one request, in seconds of virtual time.

    error: the code of the error that ended it, or "".
    """

    arrival_s: float
    first_s: float
    last_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error: str
    tenant: str = ""


class WorkDone(msgspec.Struct, frozen=True):
    """The work that one worker did, and the seconds for which it lived."""

    role: Role
    num_prompt_tokens: int  # prompt tokens that it computed
    busy_s: float
    alive_s: float


class TenantReport(msgspec.Struct, frozen=True):
    """Figures of the requests of one tenant."""

    tenant: str
    num_requests: int
    num_failed: int
    ttft_p50_s: float
    ttft_p95_s: float


class SimReport(msgspec.Struct, frozen=True):
    """Figures of one simulation. Percentiles are of the requests that were answered.

    hit_percent: percent of the prompts' tokens that were cached, counted in blocks of 512.
    imbalance: the most prompt tokens per second of its life that one worker computed, divided by
        the mean of its pool, for the prefill pool.
    utilisation: the fraction of their lives in which the workers of that pool computed.
    """

    policy: str
    speed: float
    num_requests: int
    num_failed: int
    duration_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    requests_per_s: float
    output_tokens_per_s: float
    hit_percent: float
    imbalance: float
    utilisation: float
    tenants: tuple[TenantReport, ...] = ()  # empty if there is only one
    worker_hours: float = 0.0  # of all workers, including start and drain
    in_time_percent: float = 100.0  # percent of all requests that met both SLOs
    refused_percent: float = 0.0  # percent of all requests that were refused or failed
    long_refused_percent: float = 0.0  # of these, in the longest seventh of all prompts
    long_work_percent: float = 0.0  # what that seventh would take of all prompts' computing time


def summarise(
    config: SimConfig,
    outcomes: Sequence[Outcome],
    work: Sequence[WorkDone],
    worker_hours: float,
) -> SimReport:
    """Make the report of one simulation."""
    answered = [each for each in outcomes if not each.error]
    ttft_s, tpot_s = _ttft_s(answered), _tpot_s(answered)
    ends_s = max((each.last_s for each in answered), default=0.0)
    duration_s = max(ends_s - min((each.arrival_s for each in answered), default=0.0), 1e-9)
    num_blocks = sum(-(-each.num_prompt_tokens // TRACE_BLOCK_TOKENS) for each in outcomes)
    num_cached_tokens = sum(each.num_cached_tokens for each in answered)
    pool = [each for each in work if each.role == "prefill"]
    alive_s = sum(each.alive_s for each in pool)
    return SimReport(
        policy=config.policy,
        speed=config.speed,
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(answered),
        duration_s=duration_s,
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p95_s=percentile(ttft_s, 0.95),
        ttft_p99_s=percentile(ttft_s, 0.99),
        tpot_p50_s=percentile(tpot_s, 0.5),
        tpot_p95_s=percentile(tpot_s, 0.95),
        tpot_p99_s=percentile(tpot_s, 0.99),
        requests_per_s=len(answered) / duration_s,
        output_tokens_per_s=sum(each.num_output_tokens for each in answered) / duration_s,
        hit_percent=100.0 * num_cached_tokens / TRACE_BLOCK_TOKENS / max(1, num_blocks),
        imbalance=_imbalance(pool),
        utilisation=sum(each.busy_s for each in pool) / alive_s if alive_s else 0.0,
        tenants=_by_tenant(outcomes),
        worker_hours=worker_hours,
        in_time_percent=_in_time_percent(outcomes, config.ttft_slo_s, config.tpot_slo_s),
        refused_percent=100.0 * (len(outcomes) - len(answered)) / max(1, len(outcomes)),
        **_of_the_longest(config, outcomes),
    )


def _of_the_longest(config: SimConfig, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """How often long prompts were refused, beside their share of the work."""
    by_length = sorted(outcomes, key=lambda each: each.num_prompt_tokens, reverse=True)
    longest = by_length[: -(-len(by_length) // 7)]

    def work_s(requests: Sequence[Outcome]) -> float:
        return sum(config.times.prefill_s(each.num_prompt_tokens) for each in requests)

    num_refused = sum(bool(each.error) for each in outcomes)
    num_long = sum(bool(each.error) for each in longest)
    return {
        "long_refused_percent": 100.0 * num_long / max(1, num_refused),
        "long_work_percent": 100.0 * work_s(longest) / (work_s(outcomes) or 1.0),
    }


def _imbalance(pool: Sequence[WorkDone]) -> float:
    """Workers that lived shortly may have computed one prompt in that time: they do not count."""
    longest_s = max((each.alive_s for each in pool), default=0.0)
    old = [each for each in pool if each.alive_s > 0.5 * longest_s]
    num_tokens = sum(each.num_prompt_tokens for each in old)
    if not num_tokens:
        return 1.0
    mean = num_tokens / sum(each.alive_s for each in old)
    return max(each.num_prompt_tokens / each.alive_s for each in old) / mean


def _ttft_s(answered: Iterable[Outcome]) -> list[float]:
    return sorted(each.first_s - each.arrival_s for each in answered)


def _tpot_s(answered: Iterable[Outcome]) -> list[float]:
    return sorted(
        (each.last_s - each.first_s) / (each.num_output_tokens - 1)
        for each in answered
        if each.num_output_tokens > 1
    )


def _by_tenant(outcomes: Sequence[Outcome]) -> tuple[TenantReport, ...]:
    names = sorted({each.tenant for each in outcomes})
    reports = []
    for name in names if len(names) > 1 else ():
        own = [each for each in outcomes if each.tenant == name]
        ttft_s = sorted(each.first_s - each.arrival_s for each in own if not each.error)
        median_s, late_s = percentile(ttft_s, 0.5), percentile(ttft_s, 0.95)
        num_failed = len(own) - len(ttft_s)
        reports.append(TenantReport(name, len(own), num_failed, median_s, late_s))
    return tuple(reports)


def _in_time_percent(outcomes: Sequence[Outcome], ttft_slo_s: float, tpot_slo_s: float) -> float:
    """The percentage of all requests whose TTFT and TPOT (mean of a request) met the SLOs."""
    num_in_time = sum(
        not each.error
        and each.first_s - each.arrival_s <= ttft_slo_s
        and each.last_s - each.first_s <= tpot_slo_s * max(1, each.num_output_tokens - 1)
        for each in outcomes
    )
    return 100.0 * num_in_time / max(1, len(outcomes))


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction does not exceed; 0 if there are no values."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
