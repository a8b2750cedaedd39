"""Plays loads that change on pools that follow them, beside fleets of fixed sizes.

    python -m bench.autoscale [--loads two-peaks cliff herd] [--num-requests 6000] [--tiny]

Workers are L40S that prefill and decode, and take 30 s to start. SLOs are 1 s and 0.1 s. Columns:

- `in time %`, `worker h`: of the pool that follows the load, from one worker to eight.
- `affordable`, `its %`: the best fixed size that costs no more, and its percentage in time.
- `as good`, `its h`: the smallest fixed size that serves at least as many in time.
- `cost`: worker-hours over those of that fleet.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bench.report import finish, print_table
from bench.simulated import parse
from disagg.config import AutoscalingConfig
from disagg.tools.sim.config import L40S_8B, SimConfig
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.simulation import simulate_all

MOST, START_S, REQUESTS_PER_S = 8, 30.0, 12.0


def row_of(load: str, arguments: Any) -> dict[str, Any]:
    most = 2 if arguments.tiny else MOST
    requests = make_load(load, REQUESTS_PER_S, arguments.num_requests, arguments.seed)
    limits = AutoscalingConfig(min_replicas=1, max_replicas=most, start_s=START_S)
    config = SimConfig(
        num_prefill=1,
        num_decode=0,
        times=L40S_8B,
        fair_queue=True,
        ttft_slo_s=1.0,
        tpot_slo_s=0.1,
        seed=arguments.seed,
    )
    configs = [msgspec.structs.replace(config, scale_prefill=limits)]
    configs += [msgspec.structs.replace(config, num_prefill=n) for n in range(1, most + 1)]
    plays = [(config, requests) for config in configs]
    scaled, *fixed = simulate_all(plays, arguments.processes)
    sizes = dict(enumerate(fixed, start=1))
    percent, hours = scaled.in_time_percent, scaled.worker_hours
    affordable = [size for size, each in sizes.items() if each.worker_hours <= hours]
    best = max(affordable, key=lambda size: sizes[size].in_time_percent, default=None)
    as_good = next((n for n, each in sizes.items() if each.in_time_percent >= percent), None)
    its_hours = None if as_good is None else sizes[as_good].worker_hours
    return {
        "load": load,
        "in time %": percent,
        "worker h": hours,
        "affordable": best,
        "its %": None if best is None else sizes[best].in_time_percent,
        "as good": as_good,
        "its h": its_hours,
        "cost": None if its_hours is None else hours / its_hours,
    }


def main() -> None:
    loads = ("two-peaks", "cliff", "herd")
    arguments = parse("autoscale", __doc__, loads, num_requests=6000, tiny=60)
    rows = [row_of(load, arguments) for load in arguments.loads]
    print_table(rows)
    finish("autoscale", rows, simulated=True)


if __name__ == "__main__":
    main()
