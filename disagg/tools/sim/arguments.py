"""The flags of `disagg sim`."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from disagg.cli.engine_arguments import number
from disagg.cli.serve_arguments import PoolSize, pool_size
from disagg.config import CascadeConfig
from disagg.router.baselines import OURS, POLICIES
from disagg.time_model import NUM_STEP_FEATURES, StepTimeModel
from disagg.tools.sim import grid_command as sim_grid
from disagg.tools.sim.config import Fault, SimConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = SimConfig()
    parser.add_argument("--trace", type=Path, help="trace file in the format of Mooncake or Azure")
    parser.add_argument(
        "--requests-per-s",
        type=float,
        default=4.0,
        help="request rate of the synthetic load (default: 4)",
    )
    parser.add_argument(
        "--num-requests",
        type=number,
        help="number of requests to simulate (default: the whole trace, or 1000 synthetic ones)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        help=f"routing policy; repeat the flag to compare several (default: {OURS})",
    )
    parser.add_argument("--compare", action="store_true", help="simulate all routing policies")
    parser.add_argument(
        "--speed",
        type=float,
        action="append",
        help="factor on the request rate; repeat the flag to simulate several (default: 1)",
    )
    parser.add_argument(
        "--prefill",
        type=pool_size,
        default=PoolSize(default.num_prefill, default.num_prefill),
        metavar="WORKERS",
        help="number of prefill workers: 4, or 1..4 to scale with the load (default:"
        f" {default.num_prefill})",
    )
    parser.add_argument(
        "--decode",
        type=pool_size,
        default=PoolSize(default.num_decode, default.num_decode),
        metavar="WORKERS",
        help="number of decode workers: 4, or 1..4 to scale with the load; with 0, prefill workers"
        f" also decode (default: {default.num_decode})",
    )
    _add_scaling_arguments(parser)
    _add_cascade_arguments(parser)
    sim_grid.add_arguments(parser)
    parser.add_argument(
        "--num-blocks",
        type=number,
        default=default.num_blocks,
        help=f"number of KV blocks per worker (default: {default.num_blocks})",
    )
    parser.add_argument(
        "--num-ingress",
        type=int,
        default=default.num_ingress,
        help="number of ingresses, each with its own view of the workers (default: 1)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=default.block_size,
        metavar="TOKENS",
        help=f"number of tokens in a KV block (default: {default.block_size})",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=default.max_num_seqs,
        help=f"largest number of sequences in one step (default: {default.max_num_seqs})",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=number,
        default=default.max_num_batched_tokens,
        help=f"largest number of tokens in one step (default: {default.max_num_batched_tokens})",
    )
    parser.add_argument(
        "--step-times",
        type=_step_times,
        default=default.times,
        metavar="S,S,S,S,S[,S]",
        help="coefficients of the step time, in seconds: per step, per prompt token, per pair of a"
        " prompt token and a token that it attends to, per decoding sequence, per token of its"
        " context, and per step with prompt tokens (0 if left out; default: predicted for a model"
        " of 8 billion parameters on one H100)",
    )
    parser.add_argument(
        "--kv-bytes",
        type=number,
        default=default.kv_nbytes,
        help=f"bytes of KV per token (default: {default.kv_nbytes})",
    )
    parser.add_argument(
        "--link-bytes-per-s",
        type=float,
        default=default.bytes_per_s,
        help=f"bandwidth of KV transfers per worker (default: {default.bytes_per_s:g})",
    )
    parser.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="WORKER@SECOND+SECONDS",
        help="the worker dies at SECOND and is replaced SECONDS later, for example"
        " decode-0@120+30; may be repeated",
    )
    parser.add_argument(
        "--seed", type=int, default=default.seed, help=f"random seed (default: {default.seed})"
    )


def _add_scaling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SLOs and autoscaling")
    group.add_argument(
        "--ttft-slo-s", type=float, default=math.inf, help="TTFT SLO in seconds (default: none)"
    )
    group.add_argument(
        "--tpot-slo-s", type=float, default=math.inf, help="TPOT SLO in seconds (default: none)"
    )
    group.add_argument(
        "--max-workers",
        dest="max_num_workers",
        type=int,
        metavar="MAX_WORKERS",
        help="largest number of workers in both pools together",
    )
    group.add_argument(
        "--start-s",
        type=float,
        default=30.0,
        help="seconds until a new worker is ready (default: 30)",
    )
    group.add_argument(
        "--look-back-s",
        type=float,
        default=900.0,
        help="seconds of past load for which pools are sized, so that 95 %% of its requests would"
        " meet the SLOs (default: 900)",
    )
    group.add_argument(
        "--down-after-s",
        type=float,
        default=60.0,
        help="remove a worker that was not needed for this many seconds (default: 60)",
    )
    group.add_argument(
        "--slo-fraction",
        type=float,
        default=1.0,
        help="size pools for this fraction of the SLOs (default: 1)",
    )


def _add_cascade_arguments(parser: argparse.ArgumentParser) -> None:
    default = SimConfig()
    group = parser.add_argument_group("cascade: a small model answers first")
    group.add_argument(
        "--tier",
        type=_tier,
        action="append",
        default=[],
        metavar="NAME=PREFILL+DECODE@SIZE",
        help="a smaller model that answers first: its name, its pools, and its size as a fraction"
        " of the main model, for example small=1+1@0.125 or small=1..2+1@0.125; may be repeated,"
        " smallest first",
    )
    group.add_argument(
        "--unsure",
        type=_share,
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="share of its answers that this smaller model escalates (simulated), for example"
        " small=0.2",
    )
    group.add_argument(
        "--num-judged-tokens",
        type=int,
        default=default.num_judged_tokens,
        help="number of tokens that are held back until an answer is judged (default:"
        f" {default.num_judged_tokens})",
    )
    group.add_argument(
        "--max-shift",
        type=float,
        default=default.max_shift,
        metavar="NATS",
        help="how far load may move the confidence threshold of"
        f" {CascadeConfig().thresholds[0]:g} (default: {default.max_shift:g}); needs --ttft-slo-s",
    )


def _step_times(text: str) -> StepTimeModel:
    try:
        coefficients = tuple(float(each) for each in text.split(","))
        *others, per_prompt_step_s = (*coefficients, 0.0)[:NUM_STEP_FEATURES]
        num_needed = NUM_STEP_FEATURES - 1
        if not num_needed <= len(coefficients) <= NUM_STEP_FEATURES:
            raise ValueError
        if min(others) <= 0.0 or per_prompt_step_s < 0.0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be five numbers greater than 0, separated by commas, and may have a"
            " sixth one, which may be 0"
        ) from None
    return StepTimeModel.of((*others, per_prompt_step_s))


def _tier(text: str) -> tuple[str, PoolSize, PoolSize, float]:
    match = re.fullmatch(r"([^=]+)=([0-9.]+)\+([0-9.]+)@([0-9.e-]+)", text)
    try:
        if match is None:
            raise ValueError
        return match[1], pool_size(match[2]), pool_size(match[3]), float(match[4])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must look like small=1+1@0.125: name, prefill workers, decode workers, size"
            " of the model"
        ) from None


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must look like small=0.2: a tier and a share of its answers"
        ) from None


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
