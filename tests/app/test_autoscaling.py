"""What Serve is told, given what ingresses report. Serve's own part is in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from disagg.app import autoscaling
from disagg.app.autoscaling import INGRESS, Scaler, scaler_of, serve_options
from disagg.app.pool_policy import PoolPolicy
from disagg.config import AutoscalingConfig, PoolConfig, ServeConfig, TierConfig
from disagg.router.demand import Demand
from disagg.router.load_report import report
from disagg.router.pool_state import PoolState
from disagg.time_model import StepTimeModel

TIMES = StepTimeModel((1e-2, 1e-4, 1e-9, 1e-4, 1e-8, 0.0))
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


def asked(deployment: str, now: float, target: int, reports: dict[str, dict[str, float]]) -> Any:
    """Serve's question, with reports that are as old as their names say."""
    raw: dict[str, dict[str, list[Any]]] = {}
    for ingress, its in reports.items():
        timestamp = now - float(ingress.partition("@")[2] or 0.0)
        for name, value in its.items():
            point = SimpleNamespace(timestamp=timestamp, value=value)
            raw.setdefault(name, {})[ingress] = [point]
    return SimpleNamespace(
        app_name="app",
        deployment_name=deployment,
        current_time=now,
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


def test_load_that_ingresses_report_grows_the_pool_and_no_load_shrinks_it(
    gauges: dict[tuple[str, str], float],
) -> None:
    scaler, ingresses, now = Scaler([TIER], None), Ingresses(), 1000.0
    size, seen = 1, []
    for second in range(60):
        ingresses.ask(30 if second < 20 else 0)
        now += 1.0
        assert scaler.num_wanted(asked(INGRESS, now, 2, ingresses.say())) == 2
        size = scaler.num_wanted(asked("toy-prefill", now, size, {}))
        assert scaler.num_wanted(asked("toy-decode", now, 2, {})) == 2
        seen.append(size)
    assert max(seen[:5]) > 1  # within a few seconds
    assert seen[19] >= 3
    assert seen[-1] == 1
    assert gauges["wanted_replicas", "prefill"] == 1
    assert gauges["slo_seconds", "prefill"] == 0.5


def test_prompts_that_wait_in_ingresses_are_helped_although_nobody_asks_any_more() -> None:
    scaler, ingresses, now = Scaler([TIER], None), Ingresses(), 1000.0
    sizes = []
    # 10 s of work in each ingress. Until help comes, one worker does 5 s of it, and four others do
    # the rest in as long.
    for num_tokens in (0, 100_000, 0):
        ingresses.num_waiting_tokens = num_tokens
        now += 10.0
        scaler.num_wanted(asked(INGRESS, now, 2, ingresses.say()))
        sizes.append(scaler.num_wanted(asked("toy-prefill", now, 1, {})))
    assert sizes == [1, 5, 1]


def test_old_reports_change_nothing() -> None:
    scaler, ingresses, now = Scaler([TIER], None), Ingresses(), 1000.0
    for _ in range(10):
        ingresses.ask(30)
        now += 1.0
        scaler.num_wanted(asked(INGRESS, now, 2, ingresses.say()))
    before = scaler.num_wanted(asked("toy-prefill", now, 1, {}))
    assert before > 1
    old = {f"{name}@60": its for name, its in ingresses.say().items()}
    for _ in range(120):
        now += 1.0
        scaler.num_wanted(asked(INGRESS, now, 2, old))
        assert scaler.num_wanted(asked("toy-prefill", now, before, {})) == before


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
    number, state = first(asked("toy-prefill", 1000.0, 4, {}))
    assert (number, state) == (4, {})  # nothing is known yet
    assert scaler_of("app", first._config) is scaler_of("app", second._config)
    renewed = {**kwargs["config"], "max_num_workers": 5}
    assert scaler_of("app", renewed) is not scaler_of("app", renewed | {"max_num_workers": 6})
