"""Measures the simulator's speed, and compares our policy with others on a real trace.

    python -m bench.sim --trace TRACE [--load FRACTION...] [--num-requests N] [--tiny]

`size` is the whole trace at its own rate on 64 prefill and 64 decode workers; its seconds are CPU
time of this machine. The seconds of the other rows are virtual. They have 4 workers that do both,
and 4 prefill beside 4 decode workers, with caches of 1,777 and 6,000 blocks of 512 tokens. Loads
are fractions of the speed beyond which our policy's queues grow without end. Without a trace, the
load is synthetic.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

from bench.report import finish, print_table
from disagg.router.baselines import OURS, POLICIES
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import Sessions, TraceRequest, generate, read_trace

FLEETS = {"4": (4, 0), "4 + 4": (4, 4)}
NUM_BLOCKS = (1777, 6000)
# Times the rate of the Mooncake conversation trace; beyond it p95 TTFT goes past a minute.
SATURATION = {"4": 1.5, "4 + 4": 2.7}
LOADS = (0.3, 0.5, 0.7, 0.8, 0.95)


def row(fleet: str, num_blocks: int, load: float, policy: str, trace: list[TraceRequest]) -> Any:
    num_prefill, num_decode = FLEETS[fleet]
    config = SimConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_blocks=num_blocks,
        speed=load * SATURATION[fleet],
        policy=policy,
    )
    report = simulate(config, trace)
    return {
        "workers": fleet,
        "blocks": num_blocks,
        "load": load,
        "policy": policy,
        "TTFT p50": report.ttft_p50_s,
        "TTFT p95": report.ttft_p95_s,
        "TTFT p99": report.ttft_p99_s,
        "TPOT p95": report.tpot_p95_s,
        "requests/s": report.requests_per_s,
        "hits %": report.hit_percent,
        "imbalance": report.imbalance,
        "failed": report.num_failed,
    }


def size(trace: list[TraceRequest], num_workers: int) -> dict[str, Any]:
    config = SimConfig(num_prefill=num_workers, num_decode=num_workers, num_blocks=1777)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    report = simulate(config, trace)
    return {
        "workers": f"{num_workers} + {num_workers}",
        "requests": report.num_requests,
        "CPU s": time.process_time() - cpu_s,
        "wall s": time.perf_counter() - began_s,
        "virtual s": report.duration_s,
        "TTFT p95": report.ttft_p95_s,
        "hits %": report.hit_percent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--load", type=float, nargs="*", default=LOADS)
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    args = parser.parse_args()
    loads, num_requests = args.load, args.num_requests
    if args.tiny:
        loads, num_requests = (0.5,), 40
    if args.trace is None:
        load = Sessions(requests_per_s=3.4, num_requests=num_requests or 2000)
        trace = generate(load, seed=0)
    else:
        trace = read_trace(args.trace)[:num_requests]
    sizes = [size(trace, 2 if args.tiny else 64)]
    print_table(sizes)
    cases = [
        (fleet, num_blocks, load, policy, trace)
        for fleet in FLEETS
        for num_blocks in NUM_BLOCKS
        for load in loads
        for policy in (POLICIES if num_blocks == NUM_BLOCKS[-1] else (OURS,))
    ]
    with multiprocessing.Pool() as pool:
        rows = pool.starmap(row, cases, chunksize=1)
    print_table(rows)
    finish("sim", rows, size=sizes, goal_wall_s=120)


if __name__ == "__main__":
    main()
