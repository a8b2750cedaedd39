"""What Serve is told, given what ingresses report. Serve's own part is in tests/e2e."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from disagg.app import autoscaling
from disagg.app.autoscaling import INGRESS, Scaler, scaler_of, serve_options
from disagg.app.pool_policy import PoolPolicy
from disagg.config import AutoscalingConfig, PoolConfig, ServeConfig, TierConfig
from disagg.router.autoscale import ScalingDecision
from disagg.router.load_report import Demand, PoolState, report
from disagg.time_model import StepTimeModel
from tests.waiting import Clock

TIMES = StepTimeModel(1e-2, 1e-4, 1e-9, 1e-4, 1e-8, 0.0)
LIMITS = AutoscalingConfig(
    min_replicas=1, max_replicas=9, start_s=5.0, look_back_s=20.0, down_after_s=5.0
)
TIER = TierConfig(
    model="toy",
    prefill=PoolConfig(num_replicas=1, autoscaling=LIMITS),
    decode=PoolConfig(num_replicas=2),
    ttft_slo_s=0.5,
)


@pytest.fixture(autouse=True)
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """What would go to Ray's metrics, without a Ray."""
    seen: dict[tuple[str, str], float] = {}

    def gauge(name: str) -> Any:
        return SimpleNamespace(
            set=lambda value, tags: seen.__setitem__((name, tags["role"]), value)
        )

    monkeypatch.setattr(autoscaling, "_gauge", gauge)
    return seen


def asked(
    deployment: str, said_at: float, target: int, reports: dict[str, dict[str, float]]
) -> Any:
    """Serve's question, with reports that were made at `said_at` by the clocks of the ingresses."""
    raw: dict[str, dict[str, list[Any]]] = {}
    for ingress, its in reports.items():
        for name, value in its.items():
            point = SimpleNamespace(timestamp=said_at, value=value)
            raw.setdefault(name, {})[ingress] = [point]
    return SimpleNamespace(
        app_name="app",
        deployment_name=deployment,
        target_num_replicas=target,
        raw_metrics=raw,
    )


class Ingresses:
    """Two of them, each with half of the requests."""

    def __init__(self) -> None:
        self.demands = [Demand(), Demand()]
        self.num_waiting_tokens = 0  # in each

    def ask(self, num: int) -> None:
        for number in range(num):
            self.demands[number % 2].arrived("toy", 1000, 50.0)

    def say(self) -> dict[str, dict[str, float]]:
        states = {
            ("toy", role): PoolState(1, TIMES, max_num_seqs=64, num_kv_tokens=1 << 20)
            for role in ("prefill", "decode")
        }
        return {
            f"ingress-{number}": report(demand, {"toy": self.num_waiting_tokens}, states)  # type: ignore[arg-type]
            for number, demand in enumerate(self.demands)
        }


@pytest.mark.parametrize("ahead_s", [0.0, 60.0, -60.0])
def test_load_that_ingresses_report_grows_the_pool_and_no_load_shrinks_it(
    gauges: dict[tuple[str, str], float], ahead_s: float
) -> None:
    """Also if the clocks of the ingresses' nodes are ahead of the controller's or behind it."""
    clock, ingresses = Clock(1000.0), Ingresses()
    scaler = Scaler([TIER], None, clock)
    size, seen = 1, []
    for second in range(60):
        ingresses.ask(30 if second < 20 else 0)
        clock.now_s += 1.0
        said = asked(INGRESS, clock.now_s + ahead_s, 2, ingresses.say())
        assert scaler.num_wanted(said) == 2
        size = scaler.num_wanted(asked("toy-prefill", 0.0, size, {}))
        assert scaler.num_wanted(asked("toy-decode", 0.0, 2, {})) == 2
        seen.append(size)
    assert max(seen[:5]) > 1  # within a few seconds
    assert seen[19] >= 3
    assert seen[-1] == 1
    assert gauges["wanted_replicas", "prefill"] == 1
    assert gauges["slo_seconds", "prefill"] == 0.5


def test_prompts_that_wait_in_ingresses_are_helped_although_nobody_asks_any_more() -> None:
    clock, ingresses, told = Clock(1000.0), Ingresses(), list[Sequence[ScalingDecision]]()
    scaler = Scaler([TIER], None, clock, told.append)
    sizes = []
    # 10 s of work in each ingress. Until help comes, one worker does 5 s of it, and four others do
    # the rest in as long.
    for num_tokens in (0, 100_000, 0):
        ingresses.num_waiting_tokens = num_tokens
        clock.now_s += 10.0
        scaler.num_wanted(asked(INGRESS, clock.now_s, 2, ingresses.say()))
        sizes.append(scaler.num_wanted(asked("toy-prefill", 0.0, 1, {})))
    assert sizes == [1, 5, 1]
    assert len(told) == 2, "only changes are told"
    assert [(each.role, each.num_before, each.num_workers) for each in told[-1]] == [
        ("prefill", 1, 5),
        ("prefill", 5, 1),
    ]
    assert all(each.slo_s == 0.5 for each in told[-1])


def test_reports_that_stop_change_nothing_and_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Serve goes on to show the last ones. When they go on, what was asked meanwhile is not taken
    for the load of one second."""
    clock, ingresses = Clock(1000.0), Ingresses()
    scaler = Scaler([TIER], None, clock)
    for _ in range(10):
        ingresses.ask(30)
        clock.now_s += 1.0
        scaler.num_wanted(asked(INGRESS, clock.now_s, 2, ingresses.say()))
    before = scaler.num_wanted(asked("toy-prefill", 0.0, 1, {}))
    assert before > 1
    last, said_at = ingresses.say(), clock.now_s
    for _ in range(120):
        ingresses.ask(30)
        clock.now_s += 1.0
        scaler.num_wanted(asked(INGRESS, said_at, 2, last))
        assert scaler.num_wanted(asked("toy-prefill", 0.0, before, {})) == before
    assert caplog.text.count("No ingress has reported") == 1
    for _ in range(20):
        ingresses.ask(30)
        clock.now_s += 1.0
        scaler.num_wanted(asked(INGRESS, clock.now_s, 2, ingresses.say()))
    assert abs(scaler.num_wanted(asked("toy-prefill", 0.0, before, {})) - before) <= 1


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_wall_clock_that_is_set_changes_no_size(by_s: float) -> None:
    clock, ingresses = Clock(1000.0), Ingresses()
    scaler = Scaler([TIER], None, clock)
    size, sizes = 1, []
    for second in range(60):
        ingresses.ask(30)
        clock.now_s += 1.0
        wall = clock.now_s + (by_s if second >= 30 else 0.0)
        scaler.num_wanted(asked(INGRESS, wall, 2, ingresses.say()))
        size = scaler.num_wanted(asked("toy-prefill", 0.0, size, {}))
        sizes.append(size)
    assert len(set(sizes[25:])) == 1 and size > 1
    for _ in range(60):  # and nothing is remembered from a time that never was
        clock.now_s += 1.0
        scaler.num_wanted(asked(INGRESS, clock.now_s + by_s, 2, ingresses.say()))
        size = scaler.num_wanted(asked("toy-prefill", 0.0, size, {}))
    assert size == 1


def test_the_past_of_a_new_ingress_is_not_taken_for_load() -> None:
    scaler, ingresses = Scaler([TIER], None), Ingresses()
    ingresses.ask(100_000)
    decided = scaler.decide(1000.0, ingresses.say())
    assert decided["toy", "prefill"].num_workers == 1


def test_an_slo_out_of_reach_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    hasty = msgspec.structs.replace(TIER, tpot_slo_s=0.001)
    scaler, ingresses = Scaler([hasty], None), Ingresses()
    for second in range(5):
        ingresses.ask(4)
        scaler.decide(1000.0 + second, ingresses.say())
    messages = [each.getMessage() for each in caplog.records]
    warnings = [each for each in messages if "can meet an SLO" in each]
    assert len(warnings) == 1 and "10.1 ms" in warnings[0]


def test_policies_of_one_application_share_their_knowledge() -> None:
    config = ServeConfig(tiers=(TIER,), cluster_key="key")
    options = serve_options(config, 1, 1, 9)
    assert (options.upscale_delay_s, options.downscale_delay_s) == (0.0, 0.0)
    kwargs = options.policy.policy_kwargs
    assert "key" not in str(kwargs)  # the cluster's key is nobody's business there
    first, second = PoolPolicy(**kwargs), PoolPolicy(**kwargs)
    number, state = first(asked("toy-prefill", 0.0, 4, {}))
    assert (number, state) == (4, {})  # nothing is known yet
    assert scaler_of("app", first._config) is scaler_of("app", second._config)
    renewed = {**kwargs["config"], "max_num_workers": 5}
    assert scaler_of("app", renewed) is not scaler_of("app", renewed | {"max_num_workers": 6})
