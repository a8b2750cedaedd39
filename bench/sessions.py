"""Plays agents that come back after a tool's pause: what a larger cache would bring.

    python -m bench.sessions [--loads agents chat] [--num-requests 4000] [--tiny]

Four H100 workers that do both, 0.8 of saturation, a TPOT SLO of 30 ms. Workers evict the least
recently used blocks. Columns:

- `blocks`: of 512 tokens, in each worker. With `all`, nothing is ever evicted: no order of
  eviction, no hint when a session returns and no tie to a worker can bring more hits.
- `hits %`: of the prompts' tokens. `hits prefix %` and `in time prefix %` are those of a router
  that always takes the worker with most of the prompt, whatever its load.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec

from bench.report import finish, print_table
from bench.simulated import parse
from disagg.tools.sim import grid
from disagg.tools.sim.baselines import OURS
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.simulation import simulate_all
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS

NUM_BLOCKS = (256, 512, 1024)
SPLIT, TPOT_SLO_S, SHARE = (4, 0), 0.03, 0.8
POLICIES = (OURS, "prefix-only")


def rows_of(load: str, arguments: Any) -> list[dict[str, Any]]:
    window = grid.Window(make_load(load, 4.0, arguments.num_requests, arguments.seed), load)
    num_tokens = sum(e.num_prompt_tokens + e.num_output_tokens for e in window.requests)
    num_all = num_tokens // TRACE_BLOCK_TOKENS + 2 * len(window.requests)
    sizes = NUM_BLOCKS[:1] if arguments.tiny else (*NUM_BLOCKS, num_all)
    config = grid.with_ttft_slo(SimConfig(seed=arguments.seed), window.requests)
    cells = [grid.Cell(SPLIT, policy, TPOT_SLO_S, SHARE) for policy in POLICIES]
    usual = [grid.to_play(cell, config, window) for cell in cells]
    plays = [
        (msgspec.structs.replace(config, num_blocks=num_blocks), requests)
        for num_blocks, (config, requests) in product(sizes, usual)
    ]
    reports = simulate_all(plays, arguments.processes)
    return [
        {
            "load": load,
            "blocks": "all" if num_blocks == num_all else num_blocks,
            "hits %": ours.hit_percent,
            "TTFT p50 s": ours.ttft_p50_s,
            "TTFT p95 s": ours.ttft_p95_s,
            "in time %": ours.in_time_percent,
            "hits prefix %": prefix.hit_percent,
            "in time prefix %": prefix.in_time_percent,
        }
        for num_blocks, ours, prefix in zip(sizes, reports[::2], reports[1::2], strict=True)
    ]


def main() -> None:
    arguments = parse("sessions", __doc__, ("agents", "chat"), num_requests=4000, tiny=60)
    rows = [row for load in arguments.loads for row in rows_of(load, arguments)]
    print_table(rows)
    finish("sessions", rows, simulated=True)


if __name__ == "__main__":
    main()
