"""The figures of a load test, and how sure they are. Names follow `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from disagg.errors import RequestError
from disagg.tools.bench.endpoint import RequestTiming
from disagg.tools.sim.report import percentile

LATE_S = 0.005  # a request that is sent so long after it was due counts as late
QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_NORMAL_95 = 1.96  # standard errors of a 95 % interval

# Milliseconds of one request.
METRICS: dict[str, Callable[[RequestTiming], float]] = {
    "ttft": lambda each: 1e3 * each.ttft_s,
    "tpot": lambda each: 1e3 * each.tpot_s,
    "e2el": lambda each: 1e3 * each.e2el_s,
}


class BenchResult(msgspec.Struct, kw_only=True):
    """One load test.

    load: what was asked for, in words and numbers.
    slos: most milliseconds of each metric, for goodput.
    cpu_percent: of one core, that the generator itself took.
    """

    date: str
    url: str
    model: str
    endpoint: str
    load: dict[str, Any]
    slos: dict[str, float] = {}
    duration: float = 0.0
    cpu_percent: float = 0.0
    was_stopped: bool = False
    figures: dict[str, float] = {}  # computed from the requests, for programs
    errors: dict[str, int] = {}
    requests: list[RequestTiming] = []

    @property
    def answered(self) -> list[RequestTiming]:
        return [each for each in self.requests if not each.error]

    def values(self, metric: str) -> list[float]:
        """The milliseconds of all answered requests, or of all pauses between events, in order."""
        if metric == "itl":
            return sorted(
                1e3 * (after - before)
                for each in self.answered
                for before, after in zip(each.event_s, each.event_s[1:], strict=False)
            )
        answered = self.answered
        if metric == "tpot":
            answered = [each for each in answered if each.num_output_tokens > 1]
        return sorted(map(METRICS[metric], answered))

    @property
    def num_in_time(self) -> int:
        return sum(
            all(METRICS[metric](each) <= limit for metric, limit in self.slos.items())
            for each in self.answered
        )

    @property
    def num_late(self) -> int:
        return sum(each.lag_s > LATE_S for each in self.requests)


def finished(result: BenchResult) -> BenchResult:
    """The same with its figures, which follow from the requests."""
    answered = result.answered
    ends_s = max((each.event_s[-1] for each in answered), default=0.0)
    begins_s = min((each.due_s for each in result.requests), default=0.0)
    duration = max(ends_s - begins_s, 1e-9)
    num_in = sum(each.num_prompt_tokens for each in answered)
    num_out = sum(each.num_output_tokens for each in answered)
    figures: dict[str, float] = {
        "completed": len(answered),
        "failed": len(result.requests) - len(answered),
        "total_input_tokens": num_in,
        "total_cached_tokens": sum(each.num_cached_tokens for each in answered),
        "total_output_tokens": num_out,
        "request_throughput": len(answered) / duration,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "late_sends": result.num_late,
        "max_send_lag_ms": 1e3 * max((each.lag_s for each in result.requests), default=0.0),
    }
    if result.slos:
        figures["request_goodput"] = result.num_in_time / duration
        figures["slo_attainment"] = result.num_in_time / max(1, len(result.requests))
    for metric in (*METRICS, "itl"):
        values = result.values(metric)
        figures[f"mean_{metric}_ms"] = statistics.fmean(values) if values else 0.0
        figures[f"std_{metric}_ms"] = statistics.pstdev(values) if values else 0.0
        for name, fraction in QUANTILES.items():
            figures[f"{name}_{metric}_ms"] = percentile(values, fraction)
        figures[f"max_{metric}_ms"] = max(values, default=0.0)
    errors = dict(Counter(each.error for each in result.requests if each.error))
    return msgspec.structs.replace(result, duration=duration, figures=figures, errors=errors)


def read_result(path: Path) -> BenchResult:
    """Raises `RequestError` if it is no file of `disagg bench --json`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path} is not a result of `disagg bench`: {error}.") from error


class Interval(NamedTuple):
    """Where a figure lies with 95 % confidence, if requests were independent of each other.

    Those of one run are not quite: a busy minute delays many, so it is rather too narrow.
    """

    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


def quantile_interval(ordered: Sequence[float], fraction: float) -> Interval:
    """By the ranks between which the quantile lies: it assumes no distribution."""
    if not ordered:
        return Interval(0.0, 0.0)
    num = len(ordered)
    spread = _NORMAL_95 * math.sqrt(num * fraction * (1 - fraction))
    low, high = math.floor(num * fraction - spread), math.ceil(num * fraction + spread)
    return Interval(ordered[max(0, low)], ordered[min(num - 1, high)])


def share_interval(num: int, total: int) -> Interval:
    """Of a share (Wilson's score interval)."""
    if not total:
        return Interval(0.0, 1.0)
    share, square = num / total, _NORMAL_95**2 / total
    middle = share + square / 2
    spread = _NORMAL_95 * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return Interval((middle - spread) / (1 + square), (middle + spread) / (1 + square))


class Difference(NamedTuple):
    """A figure of two runs. `is_clear`: their intervals do not overlap; None: it has none."""

    name: str
    before: float
    after: float
    is_clear: bool | None = None

    @property
    def percent(self) -> float | None:
        return 100 * (self.after / self.before - 1) if self.before else None


def compare(before: BenchResult, after: BenchResult) -> list[Difference]:
    rows = [
        Difference(name, before.figures[name], after.figures[name])
        for name in ("completed", "failed", "request_throughput", "output_throughput")
    ]
    if before.slos and before.slos == after.slos:
        shares = [share_interval(each.num_in_time, len(each.requests)) for each in (before, after)]
        is_clear = not shares[0].overlaps(shares[1])
        name = "slo_attainment"
        rows.append(Difference(name, before.figures[name], after.figures[name], is_clear))
    for metric in (*METRICS, "itl"):
        one, other = before.values(metric), after.values(metric)
        for name, fraction in QUANTILES.items():
            key = f"{name}_{metric}_ms"
            intervals = [quantile_interval(each, fraction) for each in (one, other)]
            differs = not intervals[0].overlaps(intervals[1])
            # Pauses of one answer follow each other: many of them are not many independent ones.
            verdict = None if metric == "itl" else differs
            rows.append(Difference(key, before.figures[key], after.figures[key], verdict))
    return rows
