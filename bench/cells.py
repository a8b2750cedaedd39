"""Measures the cost of dividing a fleet into cells: deployments behind one load balancer.

    python -m bench.cells [--trace TRACE --speed FACTOR] [--num-requests N] [--cells N ...] [--tiny]

64 prefill and 64 decode workers and four ingresses are simulated, as one fleet and divided evenly
into cells. The load balancer chooses the cell by a hash of the prompt's first blocks of 512 tokens
(`by` says how many), or gives requests to the cells in turn. Without a trace, the load is
synthetic: conversations of agents. `most` is the busiest cell's share of requests, times the number
of cells. Percentiles of TTFT are those of the slowest cell. Seconds are virtual.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import finish, print_table
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, Sessions, TraceRequest, generate, read_trace

NUM_WORKERS, NUM_INGRESS, NUM_BLOCKS = 64, 4, 6000  # workers of each pool
NUM_HASHED = (1, 2, 6)  # blocks of a prompt; 0: in turn
REQUESTS_PER_S = 48.0  # of conversations that are made up


def cell_of(number: int, request: TraceRequest, num_cells: int, num_hashed: int) -> int:
    """`number`: of the request; by which cells get requests in turn if nothing is hashed."""
    names = request.block_names[:num_hashed]
    if not names:
        return number % num_cells
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % num_cells


def divided(
    trace: Sequence[TraceRequest], num_cells: int, num_hashed: int
) -> list[list[TraceRequest]]:
    """The requests of each cell."""
    cells: list[list[TraceRequest]] = [[] for _ in range(num_cells)]
    for number, each in enumerate(trace):
        cells[cell_of(number, each, num_cells, num_hashed)].append(each)
    return cells


def row(
    trace: Sequence[TraceRequest], num_cells: int, num_hashed: int, num_workers: int, speed: float
) -> dict[str, Any]:
    config = SimConfig(
        num_prefill=num_workers // num_cells,
        num_decode=num_workers // num_cells,
        num_blocks=NUM_BLOCKS,
        num_ingress=max(1, NUM_INGRESS // num_cells),
        speed=speed,
    )
    cells = [each for each in divided(trace, num_cells, num_hashed) if each]
    reports = [simulate(config, each) for each in cells]
    num_blocks = [_num_blocks(each) for each in cells]
    num_hits = sum(r.hit_percent * n for r, n in zip(reports, num_blocks, strict=True))

    def slowest(name: str) -> float:
        return float(max(getattr(each, name) for each in reports))

    by = f"{num_hashed} blocks" if num_hashed else "in turn"
    return {
        "cells": num_cells,
        "by": by if num_cells > 1 else None,
        "hits %": num_hits / sum(num_blocks),
        "most": max(map(len, cells)) * num_cells / len(trace),
        **{f"TTFT {p} s": slowest(f"ttft_{p}_s") for p in ("p50", "p95", "p99")},
        "failed": sum(each.num_failed for each in reports),
    }


def _num_blocks(trace: Sequence[TraceRequest]) -> int:
    """As `SimReport.hit_percent` counts them."""
    return sum(-(-each.num_prompt_tokens // TRACE_BLOCK_TOKENS) for each in trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="trace file in the format of Mooncake or Azure")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--cells", type=int, nargs="+", default=[4])
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    num_requests, num_workers = arguments.num_requests, NUM_WORKERS
    if arguments.tiny:
        num_requests, num_workers = 40, 4
    if arguments.trace is not None:
        trace = read_trace(arguments.trace)[:num_requests]
    else:
        load = Sessions(requests_per_s=REQUESTS_PER_S, num_requests=num_requests)
        trace = generate(load, seed=0)
    ways = [(1, 0)] + [(cells, hashed) for cells in arguments.cells for hashed in (*NUM_HASHED, 0)]
    rows = [
        row(trace, num_cells, num_hashed, num_workers, arguments.speed)
        for num_cells, num_hashed in ways
    ]
    print_table(rows)
    finish("cells", rows, trace=str(arguments.trace), simulated=True)


if __name__ == "__main__":
    main()
