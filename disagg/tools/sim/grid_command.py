"""`disagg sim --grid`: goodput of every split of six workers by load and TPOT SLO."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from disagg.host import usable_cores
from disagg.tools.sim import grid
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.trace import TraceRequest

UNLIKE_TITLE = (
    "The same for 2 x H100 and 4 x L40S, with a model of 8 billion parameters, with the H100s as"
    " prefill workers or as decode workers. fixed: the better of the two if workers keep their"
    " roles. Simulated."
)
TITLE = (
    "Percentage of requests within both SLOs, by split into prefill + decode workers. fixed: the"
    " best split if workers keep their roles; collocated: 6 workers that each prefill and decode"
    " their own requests; worst: the lowest of the splits as a share of the highest. Simulated."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grid of splits")
    group.add_argument(
        "--grid",
        action="store_true",
        help="run a window of the trace on 6 workers, in every split, at several loads and TPOT"
        " SLOs, and print the percentage of requests that meet both SLOs",
    )
    group.add_argument(
        "--grid-tpot-slo-ms",
        type=_positive,
        nargs="+",
        default=[1e3 * each for each in grid.TPOT_SLOS_S],
        metavar="MS",
        help="TPOT SLOs of the grid in milliseconds (default:"
        f" {' '.join(f'{1e3 * each:g}' for each in grid.TPOT_SLOS_S)})",
    )
    group.add_argument(
        "--grid-load",
        type=_positive,
        nargs="+",
        default=grid.LOADS,
        metavar="SHARE",
        help="loads of the grid, as shares of the rate at which all workers are always busy"
        f" (default: {' '.join(f'{each:g}' for each in grid.LOADS)})",
    )
    group.add_argument(
        "--processes",
        type=int,
        default=usable_cores(),
        help="number of simulations that run in parallel (default: the number of cores)",
    )


def run(args: argparse.Namespace, config: SimConfig, trace: Sequence[TraceRequest]) -> int:
    """Simulate the first requests of `trace` in each cell of the grid, and print the results."""
    window = trace[: args.num_requests or grid.NUM_REQUESTS]
    if math.isinf(config.ttft_slo_s):
        ttft_slo_s = grid.usual_ttft_slo_s(config, window)
        config = msgspec.structs.replace(config, ttft_slo_s=ttft_slo_s)
    tpot_slos_s = [each / 1e3 for each in args.grid_tpot_slo_ms]
    cells = list(grid.cells(tpot_slos_s, args.grid_load))
    num_alike = len(cells)
    cells += grid.unlike_cells(tpot_slos_s, args.grid_load)
    play = partial(grid.play, config=config, window=window)
    if args.processes > 1:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            percents = pool.map(play, cells, chunksize=1)
    else:
        percents = list(map(play, cells))
    played = list(zip(cells, percents, strict=True))
    rows = grid.rows(config, window, played[:num_alike])
    unlike = grid.unlike_rows(config, window, played[num_alike:])
    _print(rows, config.ttft_slo_s)
    _print_unlike(unlike)
    line: dict[str, Any] = {
        "simulated": True,
        "num_requests": len(window),
        "ttft_slo_s": config.ttft_slo_s,
    }
    line |= {"splits": grid.SPLITS, "rows": msgspec.to_builtins(rows)}
    line |= {"unlike_splits": grid.UNLIKE_SPLITS, "unlike": msgspec.to_builtins(unlike)}
    print(json.dumps(line))
    return 0


def _print(rows: Sequence[grid.Row], ttft_slo_s: float) -> None:
    table = Table(title=f"{TITLE} TTFT SLO {ttft_slo_s:.2f} s.", title_justify="left")
    splits = (f"{num_prefill}+{num_decode}" for num_prefill, num_decode in grid.SPLITS)
    for column in ("TPOT ms", "load", "req/s", *splits, "best", "fixed", "collocated", "worst"):
        table.add_column(column, justify="right")
    for row in rows:
        percents = (*row.by_split, row.best, row.fixed, row.collocated)
        table.add_row(
            f"{1e3 * row.tpot_slo_s:g}",
            f"{row.load:g}",
            f"{row.requests_per_s:.1f}",
            *(f"{percent:.1f}" for percent in percents),
            f"{row.worst_share:.3f}",
        )
    Console(width=160).print(table)


def _print_unlike(rows: Sequence[grid.UnlikeRow]) -> None:
    table = Table(title=UNLIKE_TITLE, title_justify="left")
    for column in ("TPOT ms", "load", "req/s", "H100 prefill", "H100 decode", "fixed"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{1e3 * row.tpot_slo_s:g}",
            f"{row.load:g}",
            f"{row.requests_per_s:.1f}",
            *(f"{percent:.1f}" for percent in (*row.by_split, row.fixed)),
        )
    Console(width=160).print(table)


def _positive(text: str) -> float:
    try:
        number = float(text)
        if not 0.0 < number < math.inf:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0") from None
    return number
