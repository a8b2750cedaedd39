"""Predict how many GPUs a load needs, and whether to separate prefill and decode.

Every figure is a prediction from datasheets and the assumptions in docs/planning.md; nothing is
measured. Without --requests-per-s or --trace it prints what one worker can do.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from disagg.capacity.efficiency import ENGINES, MATMUL, PLANNED
from disagg.capacity.gpus import (
    CPU_CORE,
    GPUS,
    LINKS,
    PRICES_AS_OF,
    USD_PER_GPU_HOUR,
    gpu_of,
    link_of,
)
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.shapes import FORMATS, KV_BITS, SHAPES, ModelShape, read_shape
from disagg.cli.engine_arguments import number
from disagg.errors import NotEnoughMemory, StartupError
from disagg.tools.plan.advice import advise
from disagg.tools.plan.load import Slo, Workload
from disagg.tools.plan.play import play, why_not_played
from disagg.tools.plan.report import report, show
from disagg.tools.plan.sizing import FleetPlan, Prices
from disagg.tools.plan.write import (
    Written,
    check_directory,
    check_servable,
    not_served,
    served_model,
    write,
)
from disagg.tools.sim.trace import read_trace

NOT_RUN_YET = (
    "Workers with several GPUs split the model by tensor parallelism (`disagg serve"
    " --tensor-parallel-size`). This has been measured on CPUs only; its times on GPUs are"
    " computed. Use --tensor-parallel-size 1 to plan without it."
)
DEFAULT_TTFT_S = 1.0
DEFAULT_TPOT_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a directory with a config.json, a Hugging Face model, a bundled model, or one of"
        f" {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--gpu",
        action="append",
        help=f"GPU of the workers: {', '.join(GPUS)}, or {CPU_CORE.name} for workers with one CPU"
        " core each; repeat the flag to choose the best of several (default: h100)",
    )
    parser.add_argument(
        "--weights",
        choices=list(FORMATS),
        default="bf16",
        help="data type of the weights (default: bf16)",
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="",
        help="plan with the share of the GPU's peak that published benchmarks of this engine"
        " reached (default: assumptions of docs/planning.md)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        dest="kv",
        type=lambda name: "bf16" if name == "bfloat16" else name,  # the name in `disagg serve`
        choices=list(KV_BITS),
        default="bf16",
        help="data type of the KV cache (default: bf16)",
    )
    parser.add_argument(
        "--requests-per-s", type=float, metavar="RATE", help="plan a fleet for this request rate"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="plan a fleet for the lengths and the rate of this trace (in the format of Mooncake or"
        " Azure); --requests-per-s overrides the rate",
    )
    parser.add_argument(
        "--input-tokens",
        type=number,
        default=1024,
        metavar="TOKENS",
        help="length of a prompt, without --trace (default: 1024)",
    )
    parser.add_argument(
        "--output-tokens",
        type=number,
        default=256,
        metavar="TOKENS",
        help="length of an answer, without --trace (default: 256)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="GPUS",
        help="number of GPUs per worker (default: the best)",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="use expert parallelism in workers with several GPUs, as in `disagg serve`",
    )
    parser.add_argument(
        "--ttft",
        type=float,
        default=DEFAULT_TTFT_S,
        help=f"TTFT SLO in seconds, for 95 %% of the requests (default: {DEFAULT_TTFT_S:g})",
    )
    parser.add_argument(
        "--tpot",
        type=float,
        default=DEFAULT_TPOT_S,
        help=f"TPOT SLO in seconds, for 95 %% of the requests (default: {DEFAULT_TPOT_S:g})",
    )
    parser.add_argument(
        "--link", default="400g", help=f"network per GPU: {', '.join(LINKS)} (default: 400g)"
    )
    parser.add_argument(
        "--price",
        action="append",
        metavar="[GPU=]USD",
        help=f"price of one GPU per hour (default: list prices of {PRICES_AS_OF})",
    )
    parser.add_argument(
        "--play",
        action=argparse.BooleanOptionalAction,
        help="check each planned fleet by serving the load in the simulator (default: if that takes"
        " a few seconds only)",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DIR",
        help="write the advised fleet as a YAML file for Ray Serve and one for KubeRay",
    )
    parser.add_argument("--force", action="store_true", help="let --write overwrite files")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )


def run(args: argparse.Namespace) -> int:
    """Raises `DisaggError` for an unknown name, a model that does not fit, or an unmet SLO."""
    is_asked = args.requests_per_s is not None or args.trace is not None
    for name in ("play", "write"):
        if getattr(args, name) and not is_asked:
            raise StartupError(
                f"--{name} needs a load to plan a fleet for: give --requests-per-s or --trace.",
                param=name,
            )
    if args.write is not None:
        check_directory(args.write, args.force)
    elif args.force:
        raise StartupError(
            "--force only lets --write overwrite files: add --write DIR, or leave out --force.",
            param="force",
        )
    slo, link = Slo(args.ttft, args.tpot), link_of(args.link)
    shape = read_shape(args.model)
    if args.write is not None:
        check_servable(shape, args.weights, args.kv)
    load, notes = _load(args)
    load.check_fits(shape)
    every, left_out = _placements(args, shape, load)
    advice, played = None, None
    if is_asked:
        prices = _prices_of(args, every)
        advice = advise(load, slo, every, link, prices)
        why_not = None if args.play else why_not_played(load, slo, args.play is None)
        if why_not is None:
            advice, played = play(advice, load, slo, link)
        else:
            notes.append(why_not)
        if args.write is not None:
            notes += _write(args, shape, advice.fleet, load, slo)
    notes += left_out
    if shape.quantized:
        notes += dict.fromkeys(_how_quantized(each.shape, args.weights) for each in every)
    notes += not_served(shape, args.weights, args.kv)
    if not args.engine:
        notes += _assumed(shape, every)
    if max(each.num_gpus for each in every) > 1:
        notes.append(NOT_RUN_YET)
    if args.json:
        json.dump(report(shape, load, every, advice, played, notes), sys.stdout, indent=2)
        print()
    else:
        show(Console(highlight=False), shape, load, every, advice, played, notes)
    return 0


def _write(
    args: argparse.Namespace, shape: ModelShape, fleet: FleetPlan, load: Workload, slo: Slo
) -> list[str]:
    """Write the fleet; returns a note with the paths."""
    model = served_model(args.model, shape.repository)
    command = shlex.join(["disagg", *args.words])
    plan = Written(fleet, load, slo, link_of(args.link), model, command)
    return [f"Written: {', '.join(map(str, write(args.write, plan)))}."]


def _assumed(shape: ModelShape, every: Sequence[Placement]) -> list[str]:
    """Notes for GPUs whose prefill speed is assumed, with the speed of published benchmarks."""
    notes = []
    for gpu, weights in dict.fromkeys((each.gpu, each.weights) for each in every):
        kind = shape.products_in(weights)
        shares = {
            engine: share for (engine, *key), share in MATMUL.items() if key == [kind, gpu.family]
        }
        if kind == "bf16" and shares:
            reached = " and ".join(f"{share} with {name}" for name, share in shares.items())
            notes.append(
                f"Prefill on {gpu.name} is planned at {PLANNED.matmul} of its peak FLOP/s, which is"
                f" an assumption. Published benchmarks reached {reached}; --engine plans with that"
                " value."
            )
    return notes


def _how_quantized(shape: ModelShape, weights: str) -> str:
    begin = f"The weights of this checkpoint are quantised ({shape.quantized})."
    if weights != "bf16":
        return f"{begin} The plan uses their size in {weights} instead (--weights)."
    if not shape.is_packed:
        return f"{begin} They are converted to bf16 when loaded; the plan uses that size."
    but = ", except for experts, which are converted to bf16" if shape.has_widened_experts else ""
    return f"{begin} GPUs keep them so and multiply in bf16; the plan uses that size{but}."


def _load(args: argparse.Namespace) -> tuple[Workload, list[str]]:
    """The load, and notes on it. Without a rate or a trace the load is one request.

    Raises:
        RequestError: the trace cannot be read.
        StartupError: the trace has no rate.
    """
    rate: float | None = args.requests_per_s
    if args.trace is None:
        lengths = [(args.input_tokens, args.output_tokens)]
        return Workload(1.0 if rate is None else rate, lengths), []
    requests = read_trace(args.trace)
    last_s = requests[-1].arrival_s
    if rate is None:
        if last_s <= 0:
            raise StartupError(
                f"All requests of {args.trace} arrive at the same time; give a rate with"
                " --requests-per-s.",
                param="requests_per_s",
            )
        rate = len(requests) / last_s
    lengths = [(each.num_prompt_tokens, each.num_output_tokens) for each in requests]
    busiest = max(Counter(int(each.arrival_s) for each in requests).values())
    note = (
        f"{args.trace} has {len(requests):,} requests in {last_s:,.0f} s, {busiest} of them in its"
        f" busiest second. The plan assumes {rate:,.2f} random arrivals per second and no prefix"
        " cache hits."
    )
    return Workload(rate, lengths), [note]


def _placements(
    args: argparse.Namespace, shape: ModelShape, load: Workload
) -> tuple[list[Placement], list[str]]:
    """The possible workers on all chosen GPUs, and notes on GPUs that are left out."""
    if args.enable_expert_parallel and not shape.num_experts:
        raise StartupError(
            f"{shape.name} is not a mixture of experts; leave out --enable-expert-parallel.",
            param="enable_expert_parallel",
        )
    every: list[Placement] = []
    notes: list[str] = []
    for name in args.gpu or ["h100"]:
        try:
            gpu = gpu_of(name)
            every += placements(
                shape,
                gpu,
                args.weights,
                args.kv,
                load.longest_tokens,
                args.engine,
                expert_parallel=args.enable_expert_parallel,
            )
        except NotEnoughMemory as error:
            notes.append(f"Left out: {error.message}")
    if not every:
        raise NotEnoughMemory(" ".join(notes), param="gpu")
    size = args.tensor_parallel_size
    if size is None:
        return every, notes
    kept = [each for each in every if each.num_gpus == size]
    if not kept:
        raise StartupError(_why_not_over(size, shape, every), param="tensor_parallel_size")
    return kept, notes


def _why_not_over(size: int, shape: ModelShape, every: Sequence[Placement]) -> str:
    """Why no worker of `size` GPUs is among the possible placements."""
    choices = ", ".join(f"{each.num_gpus} x {each.gpu.name}" for each in every)
    if size < 1:
        return f"A worker needs at least 1 GPU, not {size}; choose from {choices}."
    num_heads, num_kv_heads = shape.config.num_heads, shape.config.num_kv_heads
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        return (
            f"{shape.name} has {num_heads} heads and {num_kv_heads} KV heads, which {size} GPUs"
            f" cannot share evenly; choose from {choices}."
        )
    most = max(each.gpu.gpus_per_node for each in every)
    if size > most:
        return f"{size} GPUs are more than the {most} of one node; choose from {choices}."
    return f"{size} GPUs cannot hold {shape.name} and its longest request; choose from {choices}."


def _prices_of(args: argparse.Namespace, every: Sequence[Placement]) -> Prices:
    usd = _prices(args.price or [], {each.gpu.name for each in every})
    return lambda each: usd[each.gpu.name]


def _prices(given: Sequence[str], names: set[str]) -> dict[str, float]:
    """US dollars per hour for each GPU of `names`."""
    usd = {name: USD_PER_GPU_HOUR[name] for name in names if name in USD_PER_GPU_HOUR}
    for text in given:
        name, _, amount = text.rpartition("=")
        try:
            price = float(amount)
        except ValueError:
            price = -1.0
        if not 0 < price < float("inf"):
            raise StartupError(f"{text!r} is not a price like 2.5 or h100=2.5.", param="price")
        usd.update(dict.fromkeys([gpu_of(name).name] if name else names, price))
    unknown = sorted(names - usd.keys())
    if unknown:
        raise StartupError(
            f"No price is known for {', '.join(unknown)}; give one with --price {unknown[0]}=2.5.",
            param="price",
        )
    return usd
