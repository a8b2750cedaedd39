"""Send load to a server with OpenAI's API, and measure TTFT, TPOT, ITL, E2E latency and goodput.

Closed loop: --max-concurrency requests at a time. Open loop: --request-rate or --trace says when
each is sent, whatever the server does. Names follow `vllm bench serve`. `disagg bench compare A B`
compares two results of --output.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from pathlib import Path

import msgspec

from disagg.cli.engine_arguments import add_setting, json_object, number
from disagg.errors import RequestError
from disagg.tools.bench.prompts import RandomPrompts
from disagg.tools.bench.report import page
from disagg.tools.bench.result import METRICS, BenchResult, compare, read_result
from disagg.tools.bench.run import CHAT, COMPLETIONS, Bench
from disagg.tools.bench.tables import print_differences, print_result, print_search
from disagg.tools.server import add_server_arguments
from disagg.tools.terminal import console, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", metavar="[compare A B]")
    other = verbs.add_parser("compare", help="compare two results of --output")
    other.add_argument("before", type=Path)
    other.add_argument("after", type=Path)
    for each in (parser, other):
        each.add_argument("--html", type=Path, metavar="FILE", help="write a report with charts")
        each.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_server_arguments(parser)
    add = parser.add_argument
    add("--model", help="name of the model (default: the first model that the server lists)")
    add("--endpoint", choices=(CHAT, COMPLETIONS), default=CHAT, help=f"(default: {CHAT})")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="fields of each request")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers have exactly the length that is asked for; some servers refuse this field"
        " (default: enabled)",
    )
    add("--output", type=Path, metavar="FILE", help="save the result with all times as JSON")
    _add_load(parser.add_argument_group("when requests are sent"))
    _add_prompts(parser.add_argument_group("what is asked"))
    slos = parser.add_argument_group("SLOs")
    slos.add_argument(
        "--goodput",
        nargs="+",
        type=_slo,
        default=[],
        metavar="METRIC:MS",
        help="most milliseconds of ttft, tpot or e2el, such as ttft:500 tpot:50; goodput counts the"
        " requests that meet all of them",
    )
    slos.add_argument(
        "--slo-search",
        action="store_true",
        help="find the highest request rate at which --slo-share of the requests meet --goodput;"
        " begins with --request-rate",
    )
    slos.add_argument("--slo-share", type=float, default=0.95, help="(default: 0.95)")
    slos.add_argument(
        "--precision", type=float, default=0.1, help="of the rate that is found (default: 0.1)"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-prompts", type=number, help="number of requests (default: 100; a trace's: all)")
    add("--request-rate", type=float, metavar="PER_S", help="requests a second, in an open loop")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma distribution of pauses: 1 is a Poisson process, less is burstier"
        " (default: 1)",
    )
    add(
        "--max-concurrency",
        type=number,
        help="most requests at a time (default: 8 in a closed loop, no limit in an open one)",
    )
    add("--trace", type=Path, help="send the requests of a trace (Mooncake JSONL or Azure CSV)")
    add("--speed", type=float, default=1.0, help="of the trace's clock (default: 1)")
    add("--num-warmups", type=number, default=2, help="requests before it begins (default: 2)")
    # No prompt of an earlier run, which the server may have cached.
    add("--seed", type=int, default=time.time_ns(), help="of prompts and times (default: the time)")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    for name in RandomPrompts.__struct_fields__:
        add_setting(group, RandomPrompts, name)
    group.add_argument(
        "--dataset",
        type=Path,
        help="JSONL file instead of random words; a line has a prompt, or messages, and may have"
        " output_tokens",
    )


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in METRICS and float(limit) > 0:
            return name, float(limit)
    raise argparse.ArgumentTypeError(
        f"{text!r} must look like ttft:500: one of {', '.join(METRICS)}, and milliseconds"
    )


def run(args: argparse.Namespace) -> int:
    to = console()
    if args.action == "compare":
        before, after = read_result(args.before), read_result(args.after)
        rows = compare(before, after)
        if args.json:
            print_json([{**row._asdict(), "percent": row.percent} for row in rows])
        else:
            print_differences(to, (args.before.name, args.after.name), rows)
        _write_html(args.html, {str(args.before): before, str(args.after): after})
        return 0
    _check(args)
    bench = Bench(args)
    if args.slo_search:
        found = bench.search()
        if args.json:
            print_json(found._asdict())
        else:
            print_search(to, args.slo_share, found)
        return 0 if found.holds is not None else 1
    result = bench.measure(args.request_rate)
    if args.output is not None:
        args.output.write_bytes(msgspec.json.encode(result))
    if args.json:
        print_json({name: getattr(result, name) for name in result.__struct_fields__[:-1]})
    else:
        print_result(to, result)
    _write_html(args.html, {args.output.name if args.output else result.model: result})
    return 0 if result.figures["completed"] else 1


def _check(args: argparse.Namespace) -> None:
    """Raises `RequestError` if flags contradict each other, or a value is out of range."""
    for name in ("request_rate", "burstiness", "speed", "max_concurrency", "num_prompts", "turns"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise RequestError(f"It must be greater than 0, not {value:g}.", param=name)
    if args.trace is not None and (args.request_rate or args.dataset):
        raise RequestError(
            "A trace says when each request is sent and how long it is; leave out --request-rate"
            " and --dataset, or change --speed.",
            param="trace",
        )
    if args.slo_search and not args.goodput:
        raise RequestError("A search needs SLOs; add --goodput ttft:500 tpot:50.", param="goodput")
    if args.slo_search and args.trace is not None:
        raise RequestError("A search sets the rate itself; leave out --trace.", param="trace")


def _write_html(path: Path | None, results: dict[str, BenchResult]) -> None:
    if path is not None:
        path.write_text(page(results), encoding="utf-8")
