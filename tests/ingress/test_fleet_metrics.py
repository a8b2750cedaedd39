from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from disagg.ingress.fleet_metrics import FleetMetrics
from disagg.messages import HostCounts, StepCosts, WorkerStatus
from tests.router.fakes import make_record


def test_the_series_of_a_worker_go_with_it() -> None:
    registry = CollectorRegistry()
    metrics = FleetMetrics(registry)
    for worker_id in ("p1", "d1"):
        record = make_record(worker_id, model="m", role="decode", num_blocks=100)
        status = WorkerStatus(
            num_running=3,
            num_waiting=1,
            num_free_blocks=50,
            num_holds=2,
            requests_nbytes=4000,
            step_costs=StepCosts((0.0,), 1, 0.07),
            num_drafted=9,
            num_accepted=6,
            num_preempted=5,
        )
        metrics.worker(record, status, 50)
        metrics.store("m", "decode", worker_id, {"hits": 5, "stored": 7})
        host = HostCounts(nbytes=8192, num_saved=4, num_torn=1, num_loaded=3, load_s=0.25)
        metrics.host_tier("m", "decode", worker_id, host)
    metrics.transfer("p1", "d1", latency_s=0.1, bytes_per_s=1e6, lane="tcp")
    metrics.transfer("p1", "d1", latency_s=0.001, bytes_per_s=1e9, lane="cuda_ipc")
    metrics.request_moved("m")
    for is_lent in (True, False, False):
        metrics.prefix_asked("m", is_lent)
    metrics.prefix_index(12345, 67)
    text = generate_latest(registry).decode()
    series = 'model_name="m",role="decode",worker_id="p1"'
    assert f"disagg_worker_num_requests_running{{{series}}} 3.0" in text
    assert f"disagg_worker_num_requests_waiting{{{series}}} 1.0" in text
    assert f"disagg_worker_kv_cache_usage_perc{{{series}}} 0.5" in text
    assert f"disagg_worker_kv_holds{{{series}}} 2.0" in text
    assert f"disagg_worker_requests_bytes{{{series}}} 4000.0" in text
    assert f"disagg_worker_link_buffer_bytes{{{series}}} 50.0" in text
    assert f"disagg_worker_step_time_error{{{series}}} 0.07" in text
    assert f"disagg_worker_draft_tokens{{{series}}} 9.0" in text
    assert f"disagg_worker_accepted_draft_tokens{{{series}}} 6.0" in text
    assert f"disagg_worker_preemptions{{{series}}} 5.0" in text
    assert "disagg_prefix_index_bytes 12345.0" in text
    assert "disagg_prefix_index_blocks 67.0" in text
    by_outcome = 'model_name="m",outcome="stored",role="decode",worker_id="p1"'
    assert f"disagg_worker_store_blocks{{{by_outcome}}} 7.0" in text
    assert f"disagg_worker_host_tier_bytes{{{series}}} 8192.0" in text
    assert f"disagg_worker_host_tier_load_seconds{{{series}}} 0.25" in text
    for outcome, count in {"saved": 4, "torn": 1, "dropped": 0, "loaded": 3}.items():
        by_outcome = f'model_name="m",outcome="{outcome}",role="decode",worker_id="p1"'
        assert f"disagg_worker_host_tier_blocks{{{by_outcome}}} {count}.0" in text
    assert 'kv_transfer_bytes_per_second{source_id="p1",worker_id="d1"} 1e+09' in text
    assert 'kv_transfer_latency_seconds{source_id="p1",worker_id="d1"} 0.001' in text
    assert 'kv_transfer_lane{lane="cuda_ipc",source_id="p1",worker_id="d1"} 1.0' in text
    assert 'lane="tcp"' not in text
    assert 'disagg_request_moves_total{model_name="m"} 1.0' in text
    assert 'disagg_prefix_loans_total{model_name="m",result="lent"} 1.0' in text
    assert 'disagg_prefix_loans_total{model_name="m",result="refused"} 2.0' in text
    metrics.keep_only({"d1"})
    text = generate_latest(registry).decode()
    assert '"p1"' not in text and '"d1"' in text
    metrics.keep_only({"d1"})
    metrics.transfer("p1", "d1", latency_s=0.002, bytes_per_s=1e9, lane="")
    metrics.keep_only(())
    assert '"d1"' not in generate_latest(registry).decode()
