"""Worker-hours of pools that follow a trace's load, and of the smallest fixed fleet as good.

    python -m bench.autoscale --trace TRACE [--start-s S...] [--speed X] [--tiny]

As good: at least 95 % of the requests hold both SLOs. Hours count every worker from the decision
to start it until it has drained. Engines, network and clock are simulated (`disagg sim`), and take
the times that the planner predicts of Llama-3-70B on four H100 (docs/planning.md). Of fixed fleets,
all with up to `MOST_DECODE` decode workers are tried, from small to large. Without a trace, load is
made up.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from pathlib import Path
from typing import Any

from bench.report import finish, print_table
from disagg.config import AutoscalingConfig
from disagg.sim.config import SimConfig
from disagg.sim.report import SimReport
from disagg.sim.simulation import simulate
from disagg.sim.trace import Sessions, TraceRequest, generate, read_trace
from disagg.time_model import StepTimeModel

# What `disagg plan llama-3-70b --gpu h100 --json` says of a worker of four: step times, KV tokens.
TIMES = StepTimeModel(
    (
        0.01462598912636816,
        5.3639619981229217e-05,
        1.1039687352604272e-09,
        2.2483047619047602e-05,
        2.7170812603648424e-08,
    )
)
NUM_BLOCKS, BLOCK_TOKENS, KV_NBYTES = 875, 512, 320 << 10

TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.1
GOAL_PERCENT, GOAL_SHARE = 95.0, 0.85
MOST_DECODE = 3
START_S = (30.0, 10.0, 60.0)

# How pools follow: look back, hold, and which part of the SLO is to be used.
WAYS = {
    "4 minutes, all of the SLO": (240.0, 60.0, 1.0),
    "1 minute, half of the SLO": (60.0, 5.0, 0.5),
    "30 seconds, half of the SLO": (30.0, 5.0, 0.5),
}


def fleet(num_prefill: int, num_decode: int, **others: Any) -> SimConfig:
    return SimConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        times=TIMES,
        kv_nbytes=KV_NBYTES,
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        **others,
    )


def figures(name: str, config: SimConfig, report: SimReport) -> dict[str, Any]:
    scaled = config.scale_prefill
    return {
        "pools": name,
        "prefill": f"{scaled.min_replicas}..{scaled.max_replicas}"
        if scaled
        else config.num_prefill,
        "decode": config.num_decode,
        "start s": scaled.start_s if scaled else None,
        "in time %": report.in_time_percent,
        "worker hours": report.worker_hours,
        "TTFT p95": report.ttft_p95_s,
        "TPOT p95": report.tpot_p95_s,
        "failed": report.num_failed,
    }


def smallest_fixed(trace: list[TraceRequest], speed: float) -> list[dict[str, Any]]:
    """Rows of all fixed fleets that were tried; the last one, or the best of its size, suffices."""
    rows: list[dict[str, Any]] = []
    for num_workers in range(2, 65):
        cases = [
            ("fixed", fleet(num_workers - num_decode, num_decode, speed=speed), trace)
            for num_decode in range(1, min(MOST_DECODE, num_workers - 1) + 1)
        ]
        with multiprocessing.Pool() as pool:
            rows += pool.starmap(row, cases, chunksize=1)
        if max(each["in time %"] for each in rows[-len(cases) :]) >= GOAL_PERCENT:
            return rows
    raise SystemExit(f"No fixed fleet of up to 64 workers serves {GOAL_PERCENT} % in time.")


def row(name: str, config: SimConfig, trace: list[TraceRequest]) -> dict[str, Any]:
    return figures(name, config, simulate(config, trace))


def following(best: dict[str, Any], start_s: float, speed: float) -> list[tuple[str, SimConfig]]:
    """Prefill pools from half of the fixed fleet's, or one less, to as many or twice as many."""
    num_prefill, num_decode = best["prefill"], best["decode"]
    cases = []
    for name, (look_back_s, down_after_s, slo_fraction) in WAYS.items():
        bounds = {max(1, num_prefill // 2), max(1, num_prefill - 1)}
        for least, most in itertools.product(sorted(bounds), (num_prefill, 2 * num_prefill)):
            limits = AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                start_s=start_s,
                look_back_s=look_back_s,
                down_after_s=down_after_s,
                slo_fraction=slo_fraction,
            )
            config = fleet(least, num_decode, speed=speed, scale_prefill=limits)
            cases.append((name, config))
    return cases


def beside(
    best: dict[str, Any], start_s: float, speed: float, trace: list[TraceRequest]
) -> list[dict[str, Any]]:
    """Rows of pools that follow the load, with what they cost of the best fixed fleet."""
    cases = [(name, config, trace) for name, config in following(best, start_s, speed)]
    with multiprocessing.Pool() as pool:
        rows = pool.starmap(row, cases, chunksize=1)
    for each in rows:
        each["of fixed"] = each["worker hours"] / best["worker hours"]
        each["held"] = each["in time %"] >= GOAL_PERCENT and each["of fixed"] <= GOAL_SHARE
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--start-s", type=float, nargs="*", default=START_S)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    args = parser.parse_args()
    if args.trace is not None:
        trace = read_trace(args.trace)
    else:
        num_requests = 120 if args.tiny else 4000
        trace = generate(Sessions(requests_per_s=8.0, num_requests=num_requests), seed=0)
    fixed = smallest_fixed(trace, args.speed)
    print_table(fixed)
    enough = [each for each in fixed if each["in time %"] >= GOAL_PERCENT]
    best = max(enough, key=lambda each: each["in time %"])
    rows: list[dict[str, Any]] = []
    for start_s in args.start_s[:1] if args.tiny else args.start_s:
        found = beside(best, start_s, args.speed, trace)
        print_table(found)
        rows += found
    finish(
        "autoscale",
        rows,
        fixed=fixed,
        smallest=best,
        slo={"ttft_s": TTFT_SLO_S, "tpot_s": TPOT_SLO_S},
        goal={"in time %": GOAL_PERCENT, "of fixed": GOAL_SHARE},
    )


if __name__ == "__main__":
    main()
