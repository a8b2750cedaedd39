"""Predict how many GPUs a load needs, and whether to separate prefill and decode.

Every figure is a prediction from datasheets and the assumptions in docs/planning.md; nothing is
measured. Without --requests-per-s or --trace it prints what one worker can do.
"""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from disagg.capacity.deployment import (
    KUBERAY_FILE,
    SERVE_FILE,
    Written,
    check_servable,
    files_of,
    not_served,
    served_model,
)
from disagg.capacity.efficiency import ENGINES
from disagg.capacity.gpus import (
    CPU_CORE,
    GPUS,
    LINKS,
    PRICES_AS_OF,
    link_of,
)
from disagg.capacity.planner import Wishes, make_plan
from disagg.capacity.shapes import FORMATS, KV_BITS, SHAPES, ModelShape, read_shape
from disagg.capacity.sizing import FleetPlan
from disagg.capacity.workload import Slo, Workload
from disagg.cli.engine_arguments import add_setting, number
from disagg.errors import StartupError
from disagg.tools.plan.play import play, why_not_played
from disagg.tools.plan.report import report, show
from disagg.tools.sim.loads import LOADS, make_load
from disagg.tools.sim.trace import read_trace
from disagg.tools.terminal import console, print_json

DEFAULTS = Wishes()
NUM_SAMPLES = 2000  # requests of a made-up load whose lengths are planned for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        help="a directory with a config.json, a Hugging Face model, a bundled model, or one of"
        f" {', '.join(SHAPES)}",
    )
    gpus = (
        f": {', '.join(GPUS)}, or {CPU_CORE.name} for workers with one CPU core each; repeat the"
        " flag to name several (default: h100)"
    )
    add_setting(parser, Wishes, "gpu", action="append", default=None, more=gpus)
    add_setting(parser, Wishes, "weights", choices=list(FORMATS))
    add_setting(parser, Wishes, "engine", choices=ENGINES)
    add_setting(
        parser,
        Wishes,
        "kv",
        flag="--kv-cache-dtype",
        type=lambda name: "bf16" if name == "bfloat16" else name,  # the name in `disagg serve`
        choices=list(KV_BITS),
    )
    add("--requests-per-s", type=float, metavar="RATE", help="plan a fleet for this request rate")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="plan a fleet for the lengths and the rate of this trace (in the format of Mooncake or"
        " Azure); --requests-per-s overrides the rate",
    )
    add(
        "--load",
        choices=LOADS,
        help="plan a fleet for the lengths of this load of `disagg sim`, at the rate of"
        " --requests-per-s, and simulate it with its own arrivals and shared prefixes",
    )
    for flag, default, what in (
        ("--input-tokens", 1024, "a prompt"),
        ("--output-tokens", 256, "an answer"),
    ):
        text = f"length of {what}, without --trace and --load (default: {default})"
        add(flag, type=number, default=default, metavar="TOKENS", help=text)
    add_setting(parser, Wishes, "tensor_parallel_size", metavar="GPUS")
    for name in ("enable_expert_parallel", "ttft", "tpot"):
        add_setting(parser, Wishes, name)
    add_setting(parser, Wishes, "link", more=f": {', '.join(LINKS)}")
    dollars: dict[str, Any] = {"metavar": "[GPU=]USD", "type": str, "action": "append"}
    add_setting(parser, Wishes, "price", more=f" of {PRICES_AS_OF}", default=None, **dollars)
    add(
        "--play",
        action=argparse.BooleanOptionalAction,
        help="check each planned fleet by serving the load in the simulator (default: if that takes"
        " a few seconds only)",
    )
    add(
        "--write",
        type=Path,
        metavar="DIR",
        help="write the advised fleet as a YAML file for Ray Serve and one for KubeRay",
    )
    add("--force", action="store_true", help="let --write overwrite files")
    add("--json", action="store_true", help="print one JSON object instead of tables")


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
        _check_directory(args.write, args.force)
    elif args.force:
        raise StartupError(
            "--force only lets --write overwrite files: add --write DIR, or leave out --force.",
            param="force",
        )
    wishes = _wishes(args)
    slo, link = wishes.slo, link_of(wishes.link)
    shape = read_shape(args.model)
    if args.write is not None:
        check_servable(shape, args.weights, args.kv)
    load, notes = _load(args)
    plan, played = make_plan(shape, load, wishes, with_fleet=is_asked), None
    advice = plan.advice
    if advice is not None:
        why_not = None if args.play else why_not_played(load, slo, args.play is None)
        if why_not is None:
            advice, played = play(advice, load, slo, link, args.load or "")
        else:
            notes.append(why_not)
        if args.write is not None:
            notes += _write(args, shape, advice.fleet, load, slo)
    notes += [*not_served(shape, args.weights, args.kv), *plan.notes]
    plan = msgspec.structs.replace(plan, advice=advice, notes=notes)
    if args.json:
        print_json(report(plan, played))
    else:
        show(console(), plan, played)
    return 0


def _wishes(args: argparse.Namespace) -> Wishes:
    given = {name: getattr(args, name) for name in Wishes.__struct_fields__}
    given["gpu"] = tuple(args.gpu or DEFAULTS.gpu)
    return Wishes(**{**given, "price": _read_prices(args.price or [])})


def _write(
    args: argparse.Namespace, shape: ModelShape, fleet: FleetPlan, load: Workload, slo: Slo
) -> list[str]:
    """Write the fleet; returns a note with the paths. Raises `StartupError` if it cannot."""
    model = served_model(args.model, shape.repository)
    command = shlex.join(["disagg", *args.words])
    files = files_of(Written(fleet, load, slo, link_of(args.link), model, command))
    try:
        args.write.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (args.write / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"Cannot write to {args.write}: {error}.", param="write") from error
    return [f"Written: {', '.join(str(args.write / name) for name in files)}."]


def _check_directory(directory: Path, force: bool) -> None:
    """Raises `StartupError` if the files cannot be written or exist already."""
    if directory.exists() and not directory.is_dir():
        raise StartupError(f"{directory} is a file; --write needs a directory.", param="write")
    there = [name for name in (SERVE_FILE, KUBERAY_FILE) if (directory / name).exists()]
    if there and not force:
        raise StartupError(
            f"{directory} already has {' and '.join(there)}; overwrite with --force, or give"
            " another directory.",
            param="write",
        )


def _load(args: argparse.Namespace) -> tuple[Workload, list[str]]:
    """The load, and notes on it. Without a rate or a trace the load is one request.

    Raises:
        RequestError: the trace cannot be read.
        StartupError: the trace has no rate, or a load has none.
    """
    rate: float | None = args.requests_per_s
    if args.load is not None:
        if rate is None or args.trace is not None:
            raise StartupError(
                "--load needs --requests-per-s, and no --trace beside it.", param="load"
            )
        requests = make_load(args.load, rate, NUM_SAMPLES, seed=1)
        lengths = [(each.num_prompt_tokens, each.num_output_tokens) for each in requests]
        return Workload(rate, lengths), ["The plan assumes random arrivals and no prefix hits."]
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


def _read_prices(given: Sequence[str]) -> dict[str, float]:
    """US dollars by GPU, "" for all. Raises `StartupError` for what is no number."""
    found = {}
    for text in given:
        name, _, amount = text.rpartition("=")
        try:
            price = float(amount)
        except ValueError:
            price = -1.0
        if not 0 < price < float("inf"):
            raise StartupError(f"{text!r} is not a price like 2.5 or h100=2.5.", param="price")
        found[name] = price
    return found
