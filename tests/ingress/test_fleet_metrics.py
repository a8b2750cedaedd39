"""What workers say becomes series: each figure once, and none of a worker that has left."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from disagg.ingress import fleet_metrics
from disagg.ingress.fleet_metrics import MAX_PAIRS, FleetMetrics, LinkBuffers, fields_of
from disagg.messages import (
    HoldCounts,
    HostCounts,
    PullCounts,
    StepCosts,
    StoreCounts,
    TransferFigure,
    WorkerRecord,
    WorkerStatus,
)
from disagg.metric import counter, gauge
from tests.router.fakes import make_record

STATUS = WorkerStatus(
    num_running=3,
    num_waiting=1,
    num_uncomputed_tokens=70,
    num_context_tokens=900,
    num_free_blocks=50,
    num_blocks=100,
    num_holds=2,
    requests_nbytes=4000,
    step_costs=StepCosts((0.0,), 1, 0.07),
    transfers=(TransferFigure("p1", 0.001, 1e9, "cuda_ipc"), TransferFigure("old", 1.0, 1.0)),
    store=StoreCounts(num_hits=5, num_stored=7, num_damaged=1),
    num_drafted=9,
    num_accepted=6,
    num_drafts=4,
    num_accepted_at=(4, 2),
    host=HostCounts(nbytes=8192, num_saved=4, num_torn=1, num_loaded=3, load_s=0.25),
    num_preempted=5,
    num_corrupted=2,
    holds=HoldCounts(num_released=11, num_expired=12, num_broken=13, num_unknown=14),
    pulls=(PullCounts("cuda_ipc", num_ok=2, nbytes=640, seconds=0.5), PullCounts("", num_torn=3)),
)


def record_of(worker_id: str) -> WorkerRecord:
    role = "prefill" if worker_id.startswith("p") else "decode"
    return make_record(worker_id, model="m", role=role, num_blocks=100)


def shown(*reports: tuple[WorkerRecord, WorkerStatus]) -> list[str]:
    registry = CollectorRegistry()
    registry.register(FleetMetrics(lambda: list(reports)))
    registry.register(LinkBuffers(lambda: list(reports), lambda name: 50))
    return generate_latest(registry).decode().splitlines()


def test_a_worker_is_shown_with_all_that_it_says() -> None:
    lines = shown((record_of("p1"), STATUS), (record_of("d1"), STATUS))
    series = 'model_name="m",role="decode",worker_id="d1"'
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 1,
        "uncomputed_tokens": 70,
        "context_tokens": 900,
        "kv_cache_usage_perc": 0.5,
        "kv_blocks": 100,
        "kv_holds": 2,
        "requests_bytes": 4000,
        "link_buffer_bytes": 50,
        "step_time_error_ratio": 0.07,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 9,
        "spec_decode_num_accepted_tokens_total": 6,
        "preemptions_total": 5,
        "corrupted_requests_total": 2,
        "host_tier_bytes": 8192,
        "host_tier_load_seconds_total": 0.25,
    }
    for name, value in expected.items():
        assert f"disagg_worker_{name}{{{series}}} {float(value)}" in lines
    of_outcomes = {
        "store_blocks": {"hit": 5, "stored": 7, "miss": 0, "damaged": 1},
        "host_tier_blocks": {"saved": 4, "torn": 1, "dropped": 0, "loaded": 3},
        "kv_holds_ended": {"released": 11, "expired": 12, "broken": 13, "unknown": 14},
    }
    for name, outcomes in of_outcomes.items():
        for outcome, count in outcomes.items():
            labels = f'model_name="m",outcome="{outcome}",role="decode",worker_id="d1"'
            assert f"disagg_worker_{name}_total{{{labels}}} {count}.0" in lines
    at = 'model_name="m",position="1",role="decode",worker_id="d1"'
    assert f"disagg_worker_spec_decode_num_accepted_tokens_per_pos_total{{{at}}} 2.0" in lines
    lane = 'lane="cuda_ipc",model_name="m"'
    pulls = f'disagg_worker_kv_pulls_total{{{lane},outcome="ok",role="decode",worker_id="d1"}} 2.0'
    assert pulls in lines
    torn = 'lane="",model_name="m",outcome="torn",role="decode",worker_id="d1"'
    assert f"disagg_worker_kv_pulls_total{{{torn}}} 3.0" in lines
    series = f'{lane},role="decode",worker_id="d1"'
    assert f"disagg_worker_kv_pull_bytes_total{{{series}}} 640.0" in lines
    assert f"disagg_worker_kv_pull_seconds_total{{{series}}} 0.5" in lines
    pair = 'source_id="p1",worker_id="d1"'
    assert f"disagg_kv_transfer_bytes_per_second{{{pair}}} 1e+09" in lines
    assert f"disagg_kv_transfer_latency_seconds{{{pair}}} 0.001" in lines
    assert f'disagg_kv_transfer_lane{{lane="cuda_ipc",{pair}}} 1.0' in lines


def test_series_go_with_their_worker() -> None:
    before = "\n".join(shown((record_of("p1"), STATUS), (record_of("d1"), STATUS)))
    assert '"p1"' in before and '"old"' not in before, "a source that has left is not shown"
    after = "\n".join(shown((record_of("d1"), STATUS)))
    assert '"p1"' not in after and '"d1"' in after


def test_a_worker_without_tiers_or_figures_shows_none() -> None:
    text = "\n".join(shown((record_of("d1"), WorkerStatus())))
    for name in ("store_blocks", "host_tier", "step_time_error", "kv_pulls", "kv_holds_ended"):
        assert f"disagg_worker_{name}_total{{" not in text and f"disagg_worker_{name}{{" not in text


def test_workers_are_counted_by_state() -> None:
    leaving = msgspec.structs.replace(STATUS, accepting=False)
    lines = shown((record_of("d1"), STATUS), (record_of("d2"), leaving))
    for state in ("serving", "draining"):
        assert f'disagg_workers{{model_name="m",role="decode",state="{state}"}} 1.0' in lines


def test_a_pool_that_lost_all_workers_is_still_shown() -> None:
    registry = CollectorRegistry()
    registry.register(FleetMetrics(list, pools=[("m", "decode")]))
    lines = generate_latest(registry).decode().splitlines()
    assert 'disagg_workers{model_name="m",role="decode",state="serving"} 0.0' in lines


def test_pairs_are_bounded() -> None:
    names = [f"d{i}" for i in range(40)]
    status = WorkerStatus(transfers=tuple(TransferFigure(name, 0.1, 1.0) for name in names))
    lines = shown(*((record_of(name), status) for name in names))
    assert sum("disagg_kv_transfer_latency_seconds{" in line for line in lines) == MAX_PAIRS < 1600


class Part(msgspec.Struct, frozen=True, array_like=True):
    num_hot: Annotated[int, counter("hot", "Hot ones", outcome="hot")] = 0


class Larger(WorkerStatus, frozen=True, array_like=True):
    """What a status looks like once somebody has added two figures: two lines."""

    temperature: Annotated[float, gauge("temperature_celsius", "Of the device")] = 0.0
    part: Part | None = None


def test_a_figure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared where it is carried, it is shown: nothing else has to be told of it."""
    monkeypatch.setattr(fleet_metrics, "FIELDS", tuple(fields_of(Larger)))
    lines = shown((record_of("d1"), Larger(temperature=71.5, part=Part(3))))
    series = 'role="decode",worker_id="d1"'
    assert f'disagg_worker_temperature_celsius{{model_name="m",{series}}} 71.5' in lines
    assert f'disagg_worker_hot_total{{model_name="m",outcome="hot",{series}}} 3.0' in lines
