"""Play a trace on a simulated fleet: how fast it is served, how evenly, with how many prefix hits.

The router, the scheduler, the block pool and the doors are the product's own; engines and network
are simulated, they take the time that a time model says. Without --trace load is made up. The last
line is JSON. Equal arguments print equal figures.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from disagg.errors import RequestError
from disagg.router.baselines import OURS, POLICIES
from disagg.sim.plot import ttft_by_load
from disagg.sim.report import Report
from disagg.sim.simulation import Fault, SimConfig, simulate
from disagg.sim.trace import Sessions, TraceRequest, generate, read_trace
from disagg.time_model import NUM_STEP_FEATURES, StepTimeModel

SIMULATED = "Engines and network are simulated."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = SimConfig()
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's or Azure's format")
    parser.add_argument("--requests-per-s", type=float, default=4.0, help="of load that is made up")
    parser.add_argument("--num-requests", type=int, help="how many of the trace; default: all")
    parser.add_argument(
        "--policy", action="append", choices=POLICIES, help=f"default: {OURS}; may be repeated"
    )
    parser.add_argument("--compare", action="store_true", help="all policies")
    parser.add_argument(
        "--speed", type=float, action="append", help="times the trace's own rate; may be repeated"
    )
    parser.add_argument("--prefill", type=int, default=default.num_prefill, metavar="WORKERS")
    parser.add_argument(
        "--decode",
        type=int,
        default=default.num_decode,
        metavar="WORKERS",
        help="0: prefill workers decode what they prefilled",
    )
    parser.add_argument("--num-blocks", type=int, default=default.num_blocks, help="of each worker")
    parser.add_argument("--block-size", type=int, default=default.block_size, metavar="TOKENS")
    parser.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs)
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens
    )
    parser.add_argument(
        "--step-times",
        type=_step_times,
        default=default.times,
        metavar="S,S,S,S,S",
        help="seconds a step, prompt token, token it attends to, decoding sequence, token of"
        " context; default: a model of 8 billion parameters on one H100, by its roofline",
    )
    parser.add_argument("--kv-bytes", type=int, default=default.kv_nbytes, help="of one token")
    parser.add_argument(
        "--link-bytes-per-s", type=float, default=default.bytes_per_s, help="of each worker, for KV"
    )
    parser.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="WORKER@SECOND+SECONDS",
        help="it dies then, and is replaced after that: decode-0@120+30; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--plot", type=Path, help="write p95 TTFT by load here, as SVG")


def run(args: argparse.Namespace) -> int:
    """Raises `RequestError` for a trace or a fleet that cannot be."""
    trace = _trace(args)
    policies = POLICIES if args.compare else args.policy or [OURS]
    config = SimConfig(
        num_prefill=args.prefill,
        num_decode=args.decode,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        times=args.step_times,
        kv_nbytes=args.kv_bytes,
        bytes_per_s=args.link_bytes_per_s,
        faults=tuple(args.fault),
        seed=args.seed,
    )
    reports = [
        simulate(msgspec.structs.replace(config, policy=policy, speed=speed), trace)
        for speed in args.speed or [1.0]
        for policy in policies
    ]
    _print(reports)
    if args.plot is not None:
        args.plot.write_text(ttft_by_load(reports), encoding="utf-8")
    line = {"simulated": True, "config": msgspec.to_builtins(config)}
    del line["config"]["policy"], line["config"]["speed"]
    print(json.dumps(line | {"reports": msgspec.to_builtins(reports)}))
    return 0


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    if args.num_requests is not None and args.num_requests < 1:
        raise RequestError("At least one request is needed.", param="num_requests")
    if args.trace is not None:
        return read_trace(args.trace)[: args.num_requests]
    if args.requests_per_s <= 0:
        raise RequestError("A rate is greater than 0.", param="requests_per_s")
    num_requests = args.num_requests or 1000
    return generate(
        Sessions(requests_per_s=args.requests_per_s, num_requests=num_requests), args.seed
    )


def _print(reports: list[Report]) -> None:
    table = Table(title=SIMULATED, title_justify="left")
    columns = (
        *("policy", "speed", "req/s", "out tok/s", "TTFT p50", "p95", "p99 s"),
        *("TPOT p50", "p95", "p99 ms", "hits %", "imbalance", "busy", "failed"),
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for each in reports:
        ttft = (each.ttft_p50_s, each.ttft_p95_s, each.ttft_p99_s)
        tpot = (each.tpot_p50_s, each.tpot_p95_s, each.tpot_p99_s)
        table.add_row(
            each.policy,
            f"{each.speed:g}",
            f"{each.requests_per_s:.2f}",
            f"{each.output_tokens_per_s:,.0f}",
            *(f"{seconds:.3f}" for seconds in ttft),
            *(f"{1e3 * seconds:.1f}" for seconds in tpot),
            f"{each.hit_percent:.2f}",
            f"{each.imbalance:.3f}",
            f"{each.utilisation:.2f}",
            str(each.num_failed),
        )
    Console(width=140).print(table)


def _step_times(text: str) -> StepTimeModel:
    try:
        coefficients = tuple(float(each) for each in text.split(","))
        if len(coefficients) != NUM_STEP_FEATURES or min(coefficients) <= 0.0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {NUM_STEP_FEATURES} numbers of seconds greater than 0"
        ) from None
    return StepTimeModel(coefficients)


def _fault(text: str) -> Fault:
    match = re.fullmatch(r"(.+)@([0-9.]+)\+([0-9.]+)", text)
    try:
        if match is None:
            raise ValueError
        return Fault(match[1], float(match[2]), float(match[3]))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form decode-0@120+30: a worker, when it dies, for how long"
        ) from None
