"""Figures, how sure they are, and the search for a rate, from times that the test makes."""

from __future__ import annotations

import msgspec
import pytest

from disagg.tools.bench.endpoint import RequestTiming
from disagg.tools.bench.result import (
    BenchResult,
    Interval,
    compare,
    finished,
    quantile_interval,
    share_interval,
)
from disagg.tools.bench.slo_search import HighestRate, search
from disagg.tools.bench.tables import warnings


def result_of(*timings: RequestTiming, **fields: object) -> BenchResult:
    result = BenchResult(
        date="today", url="u", model="m", endpoint="e", load={}, requests=list(timings)
    )
    return finished(msgspec.structs.replace(result, **fields))


def timing(due_s: float, *event_s: float, lag_s: float = 0.0, tokens: int = 0) -> RequestTiming:
    return RequestTiming(
        due_s=due_s,
        sent_s=due_s + lag_s,
        event_s=list(event_s),
        num_prompt_tokens=10,
        num_output_tokens=tokens or len(event_s),
    )


def test_figures_follow_from_the_times() -> None:
    result = result_of(
        timing(1.0, 1.5, 2.0, 3.0),  # TTFT 500, TPOT 750, E2EL 2,000
        timing(2.0, 2.25, 4.25, tokens=5, lag_s=0.006),  # 250, 500, 2,250
        timing(2.0, 2.75),  # 750, and no second token
        RequestTiming(due_s=3.0, sent_s=3.0, error="429 overloaded", message="too late"),
        slos={"ttft": 600.0, "tpot": 700.0},
    )
    figures = result.figures
    assert result.duration == 3.25 and result.errors == {"429 overloaded": 1}
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 9)
    assert figures["output_throughput"] == 9 / 3.25
    assert (figures["mean_ttft_ms"], figures["median_ttft_ms"]) == (500.0, 500.0)
    assert (figures["max_tpot_ms"], figures["mean_tpot_ms"]) == (750.0, 625.0)
    assert result.values("itl") == [500.0, 1000.0, 2000.0]
    assert figures["slo_attainment"] == 1 / 4 and figures["request_goodput"] == 1 / 3.25
    assert figures["late_sends"] == 1 and figures["max_send_lag_ms"] == pytest.approx(6.0)
    assert len(warnings(result)) == 1
    assert len(warnings(msgspec.structs.replace(result, cpu_percent=81.0))) == 2


def test_nothing_answered_has_figures() -> None:
    figures = result_of(RequestTiming(due_s=0.0, error="timeout")).figures
    assert figures["completed"] == 0 and figures["p99_ttft_ms"] == 0.0


def run_with(ttft_s: float, num: int = 400) -> BenchResult:
    return result_of(
        *(timing(i, i + ttft_s * (1 + i * 37 % num / num), i + 2.0) for i in range(num)),
        slos={"ttft": 1000.0},
    )


def test_a_comparison_tells_differences_from_noise() -> None:
    before, slightly, much = run_with(0.500), run_with(0.501), run_with(0.9)
    assert not any(row.is_clear for row in compare(before, slightly))
    clear = {row.name for row in compare(before, much) if row.is_clear}
    assert {"slo_attainment", "median_ttft_ms", "p99_ttft_ms"} <= clear
    assert not any(name.endswith("e2el_ms") for name in clear)


def test_intervals() -> None:
    assert quantile_interval(range(1, 101), 0.5) == Interval(41, 61)
    assert quantile_interval([], 0.5) == Interval(0, 0)
    # Wilson's, as in tables: 8 of 10 and 0 of 20.
    assert share_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert share_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert share_interval(0, 0) == Interval(0, 1)


@pytest.mark.parametrize("start", [0.3, 1.0, 64.0])
def test_the_search_finds_the_highest_rate_that_holds(start: float) -> None:
    found = search(lambda rate: (200 if rate <= 10.0 else 100, 200), start, 0.95, 0.05)
    assert found.holds is not None and found.fails is not None
    assert 9.5 <= found.holds.rate <= 10.0 < found.fails.rate <= found.holds.rate * 1.05
    assert found.holds.interval.low > 0.95 > found.fails.interval.high


def test_a_share_too_near_to_tell_is_measured_again() -> None:
    rates: list[float] = []

    def measure(rate: float) -> tuple[int, int]:
        rates.append(rate)
        return (96 if rate <= 1.0 else 10), 100

    found = search(measure, 1.0, 0.95, 0.9)
    assert found.holds is not None and rates[:4] == [1.0, 1.0, 1.0, 2.0]
    assert (found.holds.num_in_time, found.holds.num_requests) == (288, 300)


def test_no_rate_may_hold() -> None:
    found: HighestRate = search(lambda rate: (0, 50), 1.0, 0.95, 0.1)
    assert found.holds is None and found.fails is not None
