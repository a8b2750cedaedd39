"""Simulate a fleet that serves a trace: latency, throughput, prefix hits and balance of load.

Router, scheduler, block pool, KV export and KV import are the real code. Engines and network are
simulated and take the time that a time model predicts. Without --trace the load is synthetic. The
last line of the output is JSON. The same arguments always give the same figures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from disagg.cli.serve_arguments import PoolSize
from disagg.config import AutoscalingConfig
from disagg.errors import RequestError
from disagg.router.baselines import OURS, POLICIES
from disagg.tools.sim import grid_command as sim_grid
from disagg.tools.sim.arguments import add_arguments
from disagg.tools.sim.config import SimConfig, SmallTier
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import Sessions, TraceRequest, generate, read_trace

__all__ = ["add_arguments", "run"]

SIMULATED = "Engines and network are simulated."


def _first(size: PoolSize) -> int:
    """Initial size of a pool. An autoscaled pool starts with one worker at least."""
    return max(size.least, min(1, size.most))


def _limits(size: PoolSize, args: argparse.Namespace) -> AutoscalingConfig | None:
    """Autoscaling limits of a pool. Raises `RequestError` if a value is out of range."""
    if size.least == size.most:
        return None
    raw = {"min_replicas": size.least, "max_replicas": size.most}
    for name in ("start_s", "look_back_s", "down_after_s", "slo_fraction"):
        raw[name] = getattr(args, name)
    try:
        return msgspec.convert(raw, AutoscalingConfig)
    except msgspec.ValidationError as error:
        raise RequestError(f"The autoscaling settings are invalid: {error}.") from error


def _smaller(args: argparse.Namespace) -> tuple[SmallTier, ...]:
    """The smaller tiers. Raises `RequestError` if --tier and --unsure do not match."""
    shares = dict(args.unsure)
    names = [name for name, *_ in args.tier]
    for name in shares:
        if name not in names:
            known = f"the tiers are {', '.join(names)}" if names else "add it with --tier"
            raise RequestError(f"There is no smaller tier {name!r}; {known}.", param="unsure")
    for name in names:
        if name not in shares:
            raise RequestError(
                f"The share of answers that {name!r} escalates is missing; give it, for example"
                f" with --unsure {name}=0.2.",
                param="unsure",
            )
    return tuple(
        SmallTier(
            name=name,
            size=size,
            unsure=shares[name],
            num_prefill=_first(prefill),
            num_decode=_first(decode),
            scale_prefill=_limits(prefill, args),
            scale_decode=_limits(decode, args),
        )
        for name, prefill, decode, size in args.tier
    )


def run(args: argparse.Namespace) -> int:
    """Raises `RequestError` for an invalid trace or fleet."""
    trace = _trace(args)
    policies = POLICIES if args.compare else args.policy or [OURS]
    config = SimConfig(
        num_prefill=_first(args.prefill),
        num_decode=_first(args.decode),
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        scale_prefill=_limits(args.prefill, args),
        scale_decode=_limits(args.decode, args),
        max_num_workers=args.max_num_workers,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        times=args.step_times,
        kv_nbytes=args.kv_bytes,
        bytes_per_s=args.link_bytes_per_s,
        faults=tuple(args.fault),
        num_ingress=args.num_ingress,
        smaller=_smaller(args),
        num_judged_tokens=args.num_judged_tokens,
        max_shift=args.max_shift,
        seed=args.seed,
    )
    if args.grid:
        return sim_grid.run(args, config, trace)
    reports = [
        simulate(msgspec.structs.replace(config, policy=policy, speed=speed), trace)
        for speed in args.speed or [1.0]
        for policy in policies
    ]
    _print(reports)
    settings = json.loads(msgspec.json.encode(config))  # infinite values become null
    del settings["policy"], settings["speed"]
    line = {"simulated": True, "config": settings}
    print(json.dumps(line | {"reports": msgspec.to_builtins(reports)}))
    return 0


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
    return generate(
        Sessions(requests_per_s=args.requests_per_s, num_requests=num_requests), args.seed
    )


def _print(reports: list[SimReport]) -> None:
    table = Table(title=SIMULATED, title_justify="left")
    columns = (
        *("policy", "speed", "req/s", "out tok/s", "TTFT p50", "p95", "p99 s"),
        *("TPOT p50", "p95", "p99 ms", "hits %", "imbalance", "busy", "failed"),
        *("worker h", "in time %"),
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
            f"{each.worker_hours:.2f}",
            f"{each.in_time_percent:.1f}",
        )
    Console(width=160).print(table)
    if any(each.tiers for each in reports):
        Console(width=160).print(_tiers(reports))


def _tiers(reports: Sequence[SimReport]) -> Table:
    title = "Cascade. The confidence of the models is simulated."
    table = Table(title=title, title_justify="left")
    columns = (
        *("policy", "speed", "tier", "asked", "answered", "escalated %", "TTFT p50", "p95 s"),
        *("TPOT p50", "p95 ms", "busy h", "worker h", "cost %"),
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "tier") else "right")
    for each in reports:
        for tier in each.tiers:
            table.add_row(
                each.policy,
                f"{each.speed:g}",
                tier.model,
                str(tier.num_asked),
                str(tier.num_answered),
                f"{tier.escalated_percent:.1f}",
                *(f"{seconds:.3f}" for seconds in (tier.ttft_p50_s, tier.ttft_p95_s)),
                *(f"{1e3 * seconds:.1f}" for seconds in (tier.tpot_p50_s, tier.tpot_p95_s)),
                f"{tier.busy_hours:.3f}",
                f"{tier.worker_hours:.2f}",
                f"{each.cost_percent:.1f}" if tier is each.tiers[-1] else "",
            )
    return table
