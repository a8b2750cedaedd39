"""The report of a simulation: percentiles, hits, imbalance and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from disagg.messages import Role
from disagg.router.cascade import Attempt
from disagg.tools.sim.config import LARGEST, SimConfig
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one request, in seconds of virtual time.

    error: the code of the error that ended it, or "".
    attempts: its outcome on each model of a cascade; the last model answered.
    """

    arrival_s: float
    first_s: float
    last_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error: str
    tenant: str = ""
    attempts: tuple[Attempt, ...] = ()


class WorkDone(msgspec.Struct, frozen=True):
    """The work that one worker did, and the seconds for which it lived."""

    model: str
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


class TierReport(msgspec.Struct, frozen=True):
    """Figures of one model of a cascade. Percentiles are of the requests that it answered.

    num_asked: requests that came to it; a larger model answered `escalated_percent` of them.
    busy_hours: hours in which its workers computed.
    """

    model: str
    num_asked: int
    num_answered: int
    escalated_percent: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    busy_hours: float
    worker_hours: float


class SimReport(msgspec.Struct, frozen=True):
    """Figures of one simulation. Percentiles are of the requests that were answered.

    hit_percent: percent of the prompts' tokens that were cached, counted in blocks of 512.
    imbalance: the most prompt tokens per second of its life that one worker computed, divided by
        the mean of its pool, for the prefill pool of the largest model.
    utilisation: the fraction of their lives in which the workers of that pool computed.
    cost_percent: the work of a cascade's models as a share of the work of the largest model alone,
        in tokens times size, as if no prompt were cached (docs/cascade.md).
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
    tiers: tuple[TierReport, ...] = ()  # smallest model first; empty if there is only one
    cost_percent: float = 100.0


def summarise(
    config: SimConfig,
    outcomes: Sequence[Outcome],
    work: Sequence[WorkDone],
    worker_hours: Mapping[str, float],
) -> SimReport:
    """Make the report of one simulation. `worker_hours`: by model."""
    answered = [each for each in outcomes if not each.error]
    ttft_s, tpot_s = _ttft_s(answered), _tpot_s(answered)
    ends_s = max((each.last_s for each in answered), default=0.0)
    duration_s = max(ends_s - min((each.arrival_s for each in answered), default=0.0), 1e-9)
    num_blocks = sum(-(-each.num_prompt_tokens // TRACE_BLOCK_TOKENS) for each in outcomes)
    num_cached_tokens = sum(each.num_cached_tokens for each in answered)
    pool = [each for each in work if (each.model, each.role) == (LARGEST, "prefill")]
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
        worker_hours=sum(worker_hours.values()),
        in_time_percent=_in_time_percent(outcomes, config.ttft_slo_s, config.tpot_slo_s),
        refused_percent=100.0 * (len(outcomes) - len(answered)) / max(1, len(outcomes)),
        **_of_the_longest(config, outcomes),
        tiers=_by_tier(answered, work, worker_hours) if config.smaller else (),
        cost_percent=100.0 * _cost(answered, config.sizes),
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


def _by_tier(
    answered: Sequence[Outcome], work: Sequence[WorkDone], worker_hours: Mapping[str, float]
) -> tuple[TierReport, ...]:
    reports = []
    for model, hours in worker_hours.items():
        asked = [each for each in answered if any(a.model == model for a in each.attempts)]
        own = [each for each in asked if each.attempts[-1].model == model]
        ttft_s, tpot_s = _ttft_s(own), _tpot_s(own)
        reports.append(
            TierReport(
                model=model,
                num_asked=len(asked),
                num_answered=len(own),
                escalated_percent=100.0 * (len(asked) - len(own)) / max(1, len(asked)),
                ttft_p50_s=percentile(ttft_s, 0.5),
                ttft_p95_s=percentile(ttft_s, 0.95),
                tpot_p50_s=percentile(tpot_s, 0.5),
                tpot_p95_s=percentile(tpot_s, 0.95),
                busy_hours=sum(each.busy_s for each in work if each.model == model) / 3600.0,
                worker_hours=hours,
            )
        )
    return tuple(reports)


def _cost(answered: Sequence[Outcome], sizes: Mapping[str, float]) -> float:
    """The work of all models as a share of the largest model's work without a cascade.

    The largest model would compute every prompt, and every token of an answer but the last.
    """
    spent = alone = 0.0
    for each in answered:
        num_whole = each.num_prompt_tokens + each.num_output_tokens - 1
        alone += num_whole
        spent += num_whole * (sizes[each.attempts[-1].model] if each.attempts else 1.0)
        for given_up in each.attempts[:-1]:
            if given_up.verdict is not None:
                num_judged = each.num_prompt_tokens + given_up.verdict.num_tokens - 1
                spent += num_judged * sizes[given_up.model]
    return spent / alone if alone else 1.0


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
