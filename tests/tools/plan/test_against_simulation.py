"""A planned fleet, played by the product's own router and scheduler, holds what was planned.

The simulator's steps take what the planner's rooflines say; what is compared is the queueing and
the batches.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from disagg.capacity.gpus import GPUS, LINKS
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import SHAPES
from disagg.capacity.sizing import TRANSFER_LATENCY_S, Goal, plan_disaggregated
from disagg.capacity.workload import Slo, Workload
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest

LENGTHS = [(1024, 128), (3000, 200), (200, 50)]
BLOCK = 64


def arrivals(load: Workload, num_requests: int, seed: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    now, requests = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(load.requests_per_s)
        requests.append(TraceRequest(now, *rng.choice(LENGTHS)))
    return requests


def test_a_planned_fleet_holds_its_slos_in_the_simulator() -> None:
    worker = Placement(SHAPES["llama-3-8b"], GPUS["h100"])
    load, slo = Workload(60.0, LENGTHS), Slo(0.3, 0.02)
    fleet = plan_disaggregated(Goal(load, slo, LINKS["400g"], lambda _: 3.0), [worker])
    assert fleet is not None
    prefill, decode = fleet.pools
    config = SimConfig(
        num_prefill=prefill.num_workers,
        num_decode=decode.num_workers,
        num_blocks=worker.num_kv_tokens // BLOCK,
        block_size=BLOCK,
        max_num_seqs=2 * decode.batch,
        times=worker.time_model(decode.batch),
        steps=worker,
        kv_nbytes=worker.kv_nbytes_per_token,
        bytes_per_s=LINKS["400g"],
        latency_s=TRANSFER_LATENCY_S,
    )
    played = simulate(config, arrivals(load, 800, seed=5))
    assert played.num_failed == 0
    assert played.ttft_p95_s <= slo.ttft_s and played.tpot_p95_s <= slo.tpot_s
    assert played.ttft_p95_s == pytest.approx(fleet.ttft_s, rel=0.4)
    assert played.tpot_p95_s == pytest.approx(fleet.tpot_s, rel=0.2)
    assert played.utilisation == pytest.approx(prefill.busy, rel=0.2)


def test_simulated_steps_are_those_of_the_roofline() -> None:
    """A chunk of 256 tokens takes less than the lines say that workers begin with."""
    fast, slow = (Placement(SHAPES["llama-3-8b"], GPUS[name]) for name in ("h100", "l40s"))
    config = SimConfig(
        num_prefill=1,
        num_decode=0,
        max_num_batched_tokens=1024,
        times=fast.time_model(),
        decode_times=slow.time_model(),
        steps=fast,
        decode_steps=slow,
    )
    request = [TraceRequest(0.0, 256, 3)]
    alone = simulate(config, request)
    assert alone.ttft_p50_s == pytest.approx(fast.prefill_s(256))
    assert fast.time_model().prefill_s(256) > 1.4 * fast.prefill_s(256)
    assert alone.tpot_p50_s == pytest.approx(fast.decode_step_s(1, 257.5), rel=1e-3)
    apart = simulate(msgspec.structs.replace(config, num_decode=1), request)
    assert apart.ttft_p50_s == pytest.approx(alone.ttft_p50_s)
    assert apart.tpot_p50_s > slow.decode_step_s(1, 257.5)  # and the transfer
