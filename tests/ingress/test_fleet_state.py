"""`GET /debug/fleet`: workers as they last reported, and a history of rates and pools."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from disagg.api.http.metrics import ApiMetrics
from disagg.config import ServeConfig, TierConfig
from disagg.ingress import fleet_state
from disagg.ingress.fleet_state import FleetState, ModelSample, PoolSample, ShownFleet
from disagg.messages import PullCounts, StepCosts, TransferFigure, WorkerRecord, WorkerStatus
from disagg.router.load_report import Demand
from tests.router.fakes import make_record


class Fleet:
    """What a `FleetState` asks for."""

    def __init__(self, model: Path) -> None:
        self.metrics, self.demand, self.now_s = ApiMetrics(), Demand(), 1000.0
        self.reports: list[tuple[WorkerRecord, WorkerStatus]] = []
        tier = TierConfig(model=str(model), served_model_name="m")
        self.state = FleetState(
            ServeConfig(tiers=(tier,), cluster_key="key"),
            "ingress-0",
            self.metrics,
            self.demand,
            reports=lambda: self.reports,
            num_queued=lambda: {"m": 3},
            now=lambda: self.now_s,
        )

    def reported(self, worker_id: str, **status: object) -> None:
        role = "prefill" if worker_id.startswith("p") else "decode"
        record = make_record(worker_id, model="m", role=role, num_blocks=100)
        said = WorkerStatus(num_blocks=100, **{"num_free_blocks": 100, **status})  # type: ignore[arg-type]
        self.reports.append((record, said))

    def shown(self, since: float | None = None) -> ShownFleet:
        return msgspec.json.decode(self.state.show(since), type=ShownFleet)


def test_workers_and_transfers_are_those_of_the_last_reports(model: Path) -> None:
    fleet = Fleet(model)
    costs = StepCosts((0.002, 0.0, 0.0, 0.001, 0.0, 0.0), num_observed=9, median_error=0.1)
    pulls = (PullCounts("cma", num_ok=2, nbytes=640, seconds=0.5),)
    figures = (TransferFigure("p1", 0.001, 1e9, "cma"), TransferFigure("gone", 1.0, 1.0))
    fleet.reported("p1")
    fleet.reported(
        "d1", num_running=4, num_free_blocks=75, step_costs=costs, pulls=pulls, transfers=figures
    )
    fleet.reported("d2", accepting=False)
    fleet.metrics.of("request_refused", "/v1/completions", "no_room", "default").inc(2)
    fleet.metrics.of("request_refused", "/v1/responses", "no_room", "default").inc()
    shown = fleet.shown()
    assert [each.state for each in shown.workers] == ["serving", "serving", "draining"]
    busy = shown.workers[1]
    assert (busy.num_running, busy.kv_usage, busy.step_s) == (4, 0.25, 0.006)
    assert busy.pulls[0]["lane"] == "cma" and busy.pulls[0]["nbytes"] == 640
    assert shown.workers[0].step_s is None, "it has run no step"
    (arrow,) = shown.transfers
    assert (arrow.source, arrow.destination, arrow.bytes_per_s) == ("p1", "d1", 1e9)
    assert shown.models[0].num_queued == 3 and shown.refused["no_room"] == 3


def test_a_sample_has_the_rates_since_the_one_before(model: Path) -> None:
    fleet = Fleet(model)
    fleet.reported("d1", pulls=(PullCounts("cma", nbytes=1000),))
    fleet.state.sample()
    fleet.now_s += 10
    fleet.reports.clear()
    fleet.reported("p1", num_waiting=2)
    fleet.reported("d1", num_running=3, num_free_blocks=50, pulls=(PullCounts("cma", nbytes=6000),))
    fleet.reported("d2", num_running=1, pulls=(PullCounts("cma", nbytes=7000),))
    fleet.demand.arrived("m", 100, 10)
    fleet.metrics.of("time_to_first_token_seconds", "m").observe(0.5)
    for _ in range(19):
        fleet.metrics.itl.of("m").observe(0.02)
    fleet.state.sample()
    (sample,) = fleet.shown(1000).history
    assert sample.models == {"m": ModelSample(0.1, 2.0, 0.5, sum([0.02] * 19) / 19)}
    assert sample.pools == {
        "m-prefill": PoolSample(1, 0, 2, 0.0),
        "m-decode": PoolSample(2, 4, 0, 0.25),
    }
    assert sample.workers == {"p1": (0, 0.0), "d1": (3, 0.5), "d2": (1, 0.0)}
    assert sample.kv_bytes_per_s == 500, "a worker that is new has pulled before, somewhere else"


def test_the_history_is_bounded_and_shown_only_if_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_state, "MAX_WORKERS", 3)
    fleet = Fleet(model)
    for number in range(fleet_state.MAX_WORKERS + 1):
        fleet.reported(f"d{number}")
    for _ in range(fleet_state.NUM_SAMPLES + 2):
        fleet.now_s += fleet_state.PERIOD_S
        fleet.state.sample()
    assert fleet.shown().history == []
    assert len(fleet.shown(0).history) == fleet_state.NUM_SAMPLES
    (last,) = fleet.shown(fleet.now_s - fleet_state.PERIOD_S).history
    assert len(last.workers) == fleet_state.MAX_WORKERS
    assert last.pools["m-decode"].num_workers == fleet_state.MAX_WORKERS + 1
