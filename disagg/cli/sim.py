"""Play a trace on a simulated fleet: how fast it is served, how evenly, with how many prefix hits.

Router, scheduler, block pool, KV export and import are the real code; engines and network are
simulated and take the time that a time model predicts. Without --trace the load is synthetic. The
last line is JSON. Equal arguments print equal figures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from disagg.cli import sim_grid
from disagg.cli.chart import Chart, check_path, write_svg
from disagg.cli.serve_arguments import PoolSize, pool_size
from disagg.config import AutoscalingConfig, CascadeConfig
from disagg.errors import RequestError
from disagg.router.baselines import OURS, POLICIES
from disagg.sim.config import Fault, SimConfig, SmallTier
from disagg.sim.report import SimReport
from disagg.sim.simulation import simulate
from disagg.sim.trace import Sessions, TraceRequest, generate, read_trace
from disagg.time_model import NUM_STEP_FEATURES, StepTimeModel

SIMULATED = "Engines and network are simulated."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = SimConfig()
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's or Azure's format")
    parser.add_argument("--requests-per-s", type=float, default=4.0, help="rate of synthetic load")
    parser.add_argument("--num-requests", type=int, help="requests of the trace (default: all)")
    parser.add_argument(
        "--policy", action="append", choices=POLICIES, help=f"default: {OURS}; may be repeated"
    )
    parser.add_argument("--compare", action="store_true", help="run all policies")
    parser.add_argument(
        "--speed", type=float, action="append", help="factor of the trace's rate; may be repeated"
    )
    parser.add_argument(
        "--prefill",
        type=pool_size,
        default=PoolSize(default.num_prefill, default.num_prefill),
        metavar="WORKERS",
        help="prefill workers: 4, or 1..4 to scale with the load",
    )
    parser.add_argument(
        "--decode",
        type=pool_size,
        default=PoolSize(default.num_decode, default.num_decode),
        metavar="WORKERS",
        help="decode workers: 4, or 1..4; 0: prefill workers decode what they prefilled",
    )
    _add_scaling_arguments(parser)
    _add_cascade_arguments(parser)
    sim_grid.add_arguments(parser)
    parser.add_argument(
        "--num-blocks", type=int, default=default.num_blocks, help="KV blocks per worker"
    )
    parser.add_argument(
        "--num-ingress",
        type=int,
        default=default.num_ingress,
        help="ingresses, each with its own view of the workers (default: 1)",
    )
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
        help="seconds per step, prompt token, token it attends to, decoding sequence, token of"
        " context (default: a model of 8 billion parameters on one H100, by its roofline)",
    )
    parser.add_argument(
        "--kv-bytes", type=int, default=default.kv_nbytes, help="KV bytes per token"
    )
    parser.add_argument(
        "--link-bytes-per-s",
        type=float,
        default=default.bytes_per_s,
        help="KV bandwidth per worker",
    )
    parser.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="WORKER@SECOND+SECONDS",
        help="the worker dies at SECOND and is replaced SECONDS later, as decode-0@120+30; may be"
        " repeated",
    )
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument(
        "--plot", type=Path, help="write a plot of p95 TTFT by load to this SVG file"
    )


def _add_scaling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pools that follow the load")
    group.add_argument("--ttft-slo-s", type=float, default=math.inf)
    group.add_argument("--tpot-slo-s", type=float, default=math.inf)
    group.add_argument("--max-workers", type=int, help="limit of both pools together")
    group.add_argument(
        "--start-s", type=float, default=30.0, help="start-up time of a worker (default: 30)"
    )
    group.add_argument(
        "--look-back-s",
        type=float,
        default=900.0,
        help="95 %% of the requests of this time are to be in time (default: 900)",
    )
    group.add_argument(
        "--down-after-s",
        type=float,
        default=60.0,
        help="remove a worker that was not needed for this time (default: 60)",
    )
    group.add_argument(
        "--slo-fraction",
        type=float,
        default=1.0,
        help="pools are sized for this fraction of the SLOs (default: 1)",
    )


def _add_cascade_arguments(parser: argparse.ArgumentParser) -> None:
    default = SimConfig()
    group = parser.add_argument_group("small model first")
    group.add_argument(
        "--tier",
        type=_tier,
        action="append",
        default=[],
        metavar="NAME=PREFILL+DECODE@SIZE",
        help="a smaller model that answers first, its pools, and its size as a fraction of the"
        " model that all other flags describe: small=1+1@0.125, or small=1..2+1@0.125; may be"
        " repeated, the smallest first",
    )
    group.add_argument(
        "--unsure",
        type=_share,
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="share of its answers of which that model is unsure (simulated): small=0.2",
    )
    group.add_argument(
        "--num-judged-tokens",
        type=int,
        default=default.num_judged_tokens,
        help="tokens that are held back until the answer is judged",
    )
    group.add_argument(
        "--max-shift",
        type=float,
        default=default.max_shift,
        metavar="NATS",
        help="how far load may move the threshold of "
        f"{CascadeConfig().thresholds[0]:g}; needs --ttft-slo-s",
    )


def _first(size: PoolSize) -> int:
    """A pool that may be empty begins with one worker, which shows how fast it is."""
    return max(size.least, min(1, size.most))


def _limits(size: PoolSize, args: argparse.Namespace) -> AutoscalingConfig | None:
    """Raises `RequestError` for what the settings of a deployment would not take either."""
    if size.least == size.most:
        return None
    raw = {"min_replicas": size.least, "max_replicas": size.most}
    for name in ("start_s", "look_back_s", "down_after_s", "slo_fraction"):
        raw[name] = getattr(args, name)
    try:
        return msgspec.convert(raw, AutoscalingConfig)
    except msgspec.ValidationError as error:
        raise RequestError(f"Pools cannot follow the load so: {error}.") from error


def _smaller(args: argparse.Namespace) -> tuple[SmallTier, ...]:
    """Raises `RequestError` for tiers without a share, and shares without a tier."""
    shares = dict(args.unsure)
    names = [name for name, *_ in args.tier]
    for name in shares:
        if name not in names:
            known = f"the smaller tiers are {', '.join(names)}" if names else "there is none"
            raise RequestError(f"There is no smaller tier {name!r}; {known}.", param="unsure")
    for name in names:
        if name not in shares:
            raise RequestError(
                f"Of how many of its answers is {name!r} unsure? Say --unsure {name}=0.2.",
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
    """Raises `RequestError` for a trace or a fleet that cannot be."""
    if args.plot is not None:
        check_path(args.plot)
    trace = _trace(args)
    policies = POLICIES if args.compare else args.policy or [OURS]
    config = SimConfig(
        num_prefill=_first(args.prefill),
        num_decode=_first(args.decode),
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        scale_prefill=_limits(args.prefill, args),
        scale_decode=_limits(args.decode, args),
        max_num_workers=args.max_workers,
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
    if args.plot is not None:
        write_svg(args.plot, [_ttft_by_load(reports)])
    settings = json.loads(msgspec.json.encode(config))  # what is infinite is null
    del settings["policy"], settings["speed"]
    line = {"simulated": True, "config": settings}
    print(json.dumps(line | {"reports": msgspec.to_builtins(reports)}))
    return 0


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    if args.num_requests is not None and args.num_requests < 1:
        raise RequestError("At least one request is needed.", param="num_requests")
    if args.trace is not None:
        return read_trace(args.trace)[: args.num_requests]
    if not 0.0 < args.requests_per_s < math.inf:
        raise RequestError(
            f"The rate must be greater than 0, and is {args.requests_per_s:g}.",
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
    title = "Small model first. How sure models are is simulated."
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


def _ttft_by_load(reports: Sequence[SimReport]) -> Chart:
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in sorted(reports, key=lambda report: report.speed):
        lines.setdefault(each.policy, []).append((each.requests_per_s, each.ttft_p95_s))
    title = "p95 TTFT (s) by requests/s; engines and network are simulated"
    return Chart(title, lines, " s", "/s", is_logarithmic=True)


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


def _tier(text: str) -> tuple[str, PoolSize, PoolSize, float]:
    match = re.fullmatch(r"([^=]+)=([0-9.]+)\+([0-9.]+)@([0-9.e-]+)", text)
    try:
        if match is None:
            raise ValueError
        return match[1], pool_size(match[2]), pool_size(match[3]), float(match[4])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form small=1+1@0.125: a name, prefill and decode workers, the"
            " size of the model"
        ) from None


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form small=0.2: a tier, and a share of its answers"
        ) from None


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
