"""Simulate a fleet that serves a trace: latency, throughput, prefix hits and balance of load.

Router, scheduler, block pool, KV export and KV import are the real code. Engines and network are
simulated and take the time that a time model predicts. Without --trace the load is made up. The
last line of the output is JSON. The same arguments always give the same figures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import msgspec
from rich.console import Console

from disagg.cli.engine_arguments import add_setting, number
from disagg.cli.serve_arguments import PoolSize, pool_size
from disagg.config import AutoscalingConfig
from disagg.errors import RequestError
from disagg.time_model import NUM_STEP_FEATURES, StepTimeModel
from disagg.tools.sim import grid
from disagg.tools.sim.baselines import OURS, POLICIES
from disagg.tools.sim.config import Fault, SimConfig
from disagg.tools.sim.loads import LOADS, USUAL_LOAD, Load, make_load
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest, read_trace
from disagg.tools.terminal import table

SIMULATED = "Engines and network are simulated."
SCALING = ("start_s", "look_back_s", "down_after_s", "slo_fraction")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, help="trace file in the format of Mooncake or Azure")
    add(
        "--load",
        choices=LOADS,
        default=USUAL_LOAD,
        help="the made-up load, if there is no trace: " + "; ".join(map(_line, LOADS.items())),
    )
    add(
        "--requests-per-s",
        type=float,
        default=4.0,
        help="request rate of the made-up load (default: 4)",
    )
    add(
        "--num-requests",
        type=number,
        help="number of requests to simulate (default: the whole trace, or 1000 made-up ones)",
    )
    add(
        "--policy",
        action="append",
        choices=POLICIES,
        help=f"routing policy; repeat the flag to compare several (default: {OURS})",
    )
    add("--compare", action="store_true", help="simulate all routing policies")
    add(
        "--speed",
        type=float,
        action="append",
        help="factor on the request rate; repeat the flag to simulate several (default: 1)",
    )
    for role, also in (("prefill", ""), ("decode", "; with 0, prefill workers also decode")):
        add(
            f"--{role}",
            type=pool_size,
            default=PoolSize(4, 4),
            metavar="WORKERS",
            help=f"number of {role} workers: 4, or 1..4 to scale with the load{also} (default: 4)",
        )
    for name in ("num_blocks", "num_ingress", "block_size", "max_num_seqs", "num_retries"):
        add_setting(parser, SimConfig, name)
    add_setting(parser, SimConfig, "max_num_batched_tokens")
    add_setting(
        parser,
        SimConfig,
        "times",
        flag="--step-times",
        type=_step_times,
        metavar="S,S,S,S,S[,S]",
    )
    add_setting(parser, SimConfig, "kv_nbytes", flag="--kv-bytes")
    add_setting(parser, SimConfig, "bytes_per_s", flag="--link-bytes-per-s")
    add_setting(
        parser,
        SimConfig,
        "faults",
        flag="--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="WORKER@SECOND+SECONDS",
    )
    add_setting(parser, SimConfig, "seed")
    group = parser.add_argument_group("SLOs and autoscaling")
    for name in ("ttft_slo_s", "tpot_slo_s"):
        add_setting(group, SimConfig, name)
    add_setting(group, SimConfig, "max_num_workers", flag="--max-workers")
    for name in SCALING:
        add_setting(group, AutoscalingConfig, name)
    grid.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Raises `RequestError` for an invalid trace or fleet."""
    trace = _trace(args)
    flags = vars(args).keys() & set(SimConfig.__struct_fields__) - {"policy", "speed", "faults"}
    settings = {name: getattr(args, name) for name in flags}
    for role in ("prefill", "decode"):
        size = getattr(args, role)
        settings |= {f"num_{role}": _first(size), f"scale_{role}": _limits(size, args)}
    config = SimConfig(**settings, faults=tuple(args.faults))
    if args.grid:
        return grid.run(args, config, trace)
    reports = [
        simulate(msgspec.structs.replace(config, policy=policy, speed=speed), trace)
        for speed in args.speed or [1.0]
        for policy in (POLICIES if args.compare else args.policy or [OURS])
    ]
    _print(reports)
    simulated = json.loads(msgspec.json.encode(config))  # infinite values become null
    del simulated["policy"], simulated["speed"]
    line = {"simulated": True, "config": simulated}
    print(json.dumps(line | {"reports": msgspec.to_builtins(reports)}))
    return 0


def _step_times(text: str) -> StepTimeModel:
    try:
        coefficients = tuple(float(each) for each in text.split(","))
        *others, per_prompt_step_s = (*coefficients, 0.0)[:NUM_STEP_FEATURES]
        num_needed = NUM_STEP_FEATURES - 1
        if not num_needed <= len(coefficients) <= NUM_STEP_FEATURES:
            raise ValueError
        if min(others) <= 0.0:
            raise ValueError
        return StepTimeModel.of((*others, per_prompt_step_s))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be five numbers greater than 0, separated by commas, and may have a"
            " sixth one, which may be 0"
        ) from None


def _line(load: tuple[str, Load]) -> str:
    """A load in a line of help."""
    name, make = load
    kind = re.split(r"[:;.]", make.__doc__ or "", maxsplit=1)[0]
    return f"{name}, {' '.join(kind.split())}"


def _fault(text: str) -> Fault:
    match = re.fullmatch(r"(.+)@([0-9.]+)\+([0-9.]+)", text)
    try:
        if match is None:
            raise ValueError
        return Fault(match[1], float(match[2]), float(match[3]))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must look like decode-0@120+30: worker, second of its death, seconds until"
            " it is replaced"
        ) from None


def _first(size: PoolSize) -> int:
    """Initial size of a pool. An autoscaled pool starts with one worker at least."""
    return max(size.least, min(1, size.most))


def _limits(size: PoolSize, args: argparse.Namespace) -> AutoscalingConfig | None:
    """Autoscaling limits of a pool. Raises `RequestError` if a value is out of range."""
    if size.least == size.most:
        return None
    raw = {"min_replicas": size.least, "max_replicas": size.most}
    for name in SCALING:
        raw[name] = getattr(args, name)
    try:
        return msgspec.convert(raw, AutoscalingConfig)
    except msgspec.ValidationError as error:
        raise RequestError(f"The autoscaling settings are invalid: {error}.") from error


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    if args.num_requests is not None and args.num_requests < 1:
        raise RequestError(
            f"The number of requests must be at least 1, not {args.num_requests}.",
            param="num_requests",
        )
    if args.trace is not None:
        return read_trace(args.trace)[: args.num_requests]
    if not 0.0 < args.requests_per_s < math.inf:
        raise RequestError(
            f"The rate must be finite and greater than 0, not {args.requests_per_s:g}.",
            param="requests_per_s",
        )
    num_requests = args.num_requests or 1000
    return make_load(args.load, args.requests_per_s, num_requests, args.seed)


def _print(reports: list[SimReport]) -> None:
    columns = (
        *("<policy", "speed", "req/s", "out tok/s", "TTFT p50", "p95", "p99 s"),
        *("TPOT p50", "p95", "p99 ms", "hits %", "imbalance", "busy", "failed"),
        *("worker h", "in time %"),
    )
    rows = table(*columns, title=SIMULATED)
    for each in reports:
        ttft = (each.ttft_p50_s, each.ttft_p95_s, each.ttft_p99_s)
        tpot = (each.tpot_p50_s, each.tpot_p95_s, each.tpot_p99_s)
        rows.add_row(
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
            f"{each.worker_hours:.2f}",
            f"{each.in_time_percent:.1f}",
        )
    Console(width=160).print(rows)
