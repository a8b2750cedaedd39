"""Compares autoscaled pools with default settings with fixed fleets, by goodput and worker-hours.

    python -m bench.autoscale [--trace FILE...] [--speed X...] [--num-requests N...] [--start-s S]

For each load the bench finds two fixed fleets. One is the best that costs no more. The other is the
smallest that is as good, which means at most `AS_GOOD_POINTS` behind. A request is in time if it
meets both SLOs. A request that would miss its TTFT SLO is refused, as in production, and counts as
late. Cost is in worker-hours, from the decision to start a worker until it has drained.

The cost of the smallest fixed fleet as good goes in steps of a worker, so a difference of 0.1
points may move it by a third. The cost of a mixture does not: that is the mean of this fleet and of
the one with a worker less, weighted so that both together serve the same share in time.

With `--passes 2` a load comes twice in a row, and only its second time counts. Then the autoscaler
knows the load, as the choice of a fixed fleet does.

Loads: three synthetic ones (`bench/autoscale_loads.py`) and the given traces. Engines, network and
clock are simulated (`disagg sim`). Step times are those that the planner predicts for Llama-3-70B
on four H100 (docs/planning.md).
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from bench.autoscale_loads import Load, made_up, of_trace
from bench.report import finish, print_table
from disagg.config import AutoscalingConfig
from disagg.host import usable_cores
from disagg.time_model import StepTimeModel
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate

# What `disagg plan llama-3-70b --gpu h100 --json` says of a worker of four: step times, KV tokens.
TIMES = StepTimeModel(
    0.01462598912636816,
    5.3639619981229217e-05,
    1.1039687352604272e-09,
    2.2483047619047602e-05,
    2.7170812603648424e-08,
    0.0,
)
NUM_BLOCKS, BLOCK_TOKENS, KV_NBYTES = 875, 512, 320 << 10


TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.1
MOST_WORKERS = 16  # of each pool that follows
GOAL_POINTS = 2.0  # behind the best fixed fleet that costs as much
GOAL_COST = 0.88  # of the smallest fixed fleet as good
AS_GOOD_POINTS = 0.1

Split = tuple[int, int]  # prefill and decode workers


def fleet(split: Split, **others: Any) -> SimConfig:
    num_prefill, num_decode = split
    return SimConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        times=TIMES,
        kv_nbytes=KV_NBYTES,
        fair_queue=True,
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        **others,
    )


class Followed(msgspec.Struct, frozen=True):
    """What pools that follow a load achieve on it."""

    in_time_percent: float
    worker_hours: float
    num_failed: int


def followed(load: Load, start_s: float, passes: int) -> Followed:
    """The last of `passes` of the load, on two pools that follow it, from one worker each or from
    none."""
    least = 0 if load.from_zero else 1
    limits = AutoscalingConfig(min_replicas=least, max_replicas=MOST_WORKERS, start_s=start_s)
    pools = fleet((1, 1), speed=load.speed, scale_prefill=limits, scale_decode=limits)
    every = simulate(pools, load.repeated(passes))
    if passes == 1:
        return Followed(every.in_time_percent, every.worker_hours, every.num_failed)
    before = simulate(pools, load.repeated(passes - 1))
    return Followed(
        passes * every.in_time_percent - (passes - 1) * before.in_time_percent,
        every.worker_hours - before.worker_hours,
        every.num_failed - before.num_failed,
    )


def fixed(load: Load, split: Split) -> SimReport:
    return simulate(fleet(split, speed=load.speed), load.requests)


def splits(num_workers: int) -> Iterator[Split]:
    """All workers in one pool, one of them for decode, and half of them."""
    for num_decode in sorted({0, min(1, num_workers - 1), num_workers // 2}):
        yield num_workers - num_decode, num_decode


def mixture_hours(in_time_percent: float, fewer: SimReport, more: SimReport) -> float:
    """The worker-hours of two fixed fleets, mixed so that this share is in time."""
    points = more.in_time_percent - fewer.in_time_percent
    share = (in_time_percent - fewer.in_time_percent) / points if points else 1.0
    return fewer.worker_hours + min(1.0, share) * (more.worker_hours - fewer.worker_hours)


def row(
    load: Load,
    start_s: float,
    passes: int,
    best_of: Callable[[int], tuple[Split, SimReport]],
) -> Any:
    """`best_of`: the best fixed fleet of a number of workers, and its report."""
    report = followed(load, start_s, passes)
    one_hours = best_of(1)[1].worker_hours
    num_paid = max(1, int(report.worker_hours / one_hours))
    as_dear, beside = best_of(num_paid)
    for number in count(num_paid):
        as_good, good = best_of(number)
        if good.in_time_percent >= min(100.0, report.in_time_percent) - AS_GOOD_POINTS:
            break
    behind = beside.in_time_percent - report.in_time_percent
    share = report.worker_hours / good.worker_hours
    mixed_hours = good.worker_hours
    if number > 1:
        mixed_hours = mixture_hours(report.in_time_percent, best_of(number - 1)[1], good)
    return {
        "load": load.name,
        "start s": start_s,
        "in time %": report.in_time_percent,
        "worker hours": report.worker_hours,
        "fixed, as dear": f"{as_dear[0]} + {as_dear[1]}",
        "its in time %": beside.in_time_percent,
        "fixed, as good": f"{as_good[0]} + {as_good[1]}",
        "cost, of it": share,
        "cost, of a mixture": report.worker_hours / mixed_hours,
        "held": behind <= GOAL_POINTS and share <= GOAL_COST,
        "failed": report.num_failed,
    }


def compare(load: Load, start_s: list[float], passes: int, processes: int) -> list[Any]:
    """A row for each start-up time. Fixed fleets are simulated once."""
    known: dict[int, tuple[Split, SimReport]] = {}

    def best_of(num_workers: int) -> tuple[Split, SimReport]:
        if num_workers not in known:
            every = list(splits(num_workers))
            with multiprocessing.Pool(processes) as pool:
                reports = pool.starmap(fixed, [(load, split) for split in every], chunksize=1)
            best = max(range(len(every)), key=lambda number: reports[number].in_time_percent)
            known[num_workers] = every[best], reports[best]
        return known[num_workers]

    return [row(load, each, passes, best_of) for each in start_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--speed", type=float, action="append", help="of each trace; default 1")
    parser.add_argument("--num-requests", type=int, help="of each trace; default: all")
    parser.add_argument("--start-s", type=float, nargs="*", default=[30.0])
    parser.add_argument("--passes", type=int, default=1, help="of each load; the last one counts")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--only", nargs="*", help="names of loads")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    args = parser.parse_args()
    loads = made_up(speed=20.0 if args.tiny else 1.0)
    speeds = args.speed or [1.0] * len(args.trace)
    for path, speed in zip(args.trace, speeds, strict=True):
        loads.append(of_trace(path, speed, args.num_requests))
    rows: list[Any] = []
    for load in loads:
        if args.only is None or load.name in args.only:
            rows += compare(load, args.start_s, args.passes, args.processes)
    print_table(rows)
    finish(
        "autoscale",
        rows,
        slo={"ttft_s": TTFT_SLO_S, "tpot_s": TPOT_SLO_S},
        goal={"points behind": GOAL_POINTS, "cost": GOAL_COST},
    )


if __name__ == "__main__":
    main()
