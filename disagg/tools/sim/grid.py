"""`disagg sim --grid`: the goodput of each split of a few workers into pools, by load.

A row is one load and one TPOT SLO. Its columns are the splits of the same workers into prefill and
decode workers, with the current policy, and `collocated`: each worker prefills and decodes its own
requests, and prompts do not consider the streams that decode there. Rows of unlike GPUs, 2 x H100
and 4 x L40S, have a column for each pool that has the faster GPUs.

Arrivals are a Poisson process, so that the load is steady. Lengths and shared prefixes come from a
window of a trace. Saturation is the rate at which all workers would compute all the time if no
prefix were computed twice and batches were full.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import msgspec
from rich.console import Console
from rich.table import Table

from disagg.host import usable_cores
from disagg.tools.sim.baselines import FIXED_ROLES, OURS
from disagg.tools.sim.config import H100_8B, L40S_8B, SimConfig
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest

NUM_WORKERS = 6
SPLITS = ((1, 5), (2, 4), (3, 3), (4, 2), (5, 1), (6, 0))
TPOT_SLOS_S = (0.01, 0.0125, 0.015, 0.02, 0.03, 0.05)
LOADS = (0.3, 0.5, 0.7, 0.9, 1.1)
UNLIKE_SPLITS = ((2, 4), (4, 2))  # 2 x H100 are the prefill workers, or the decode workers
NUM_REQUESTS = 600  # requests of a window
TTFT_PER_PREFILL = 10.0  # the TTFT SLO as a multiple of the time of a mean prompt alone

TITLE = (
    "Percentage of requests within both SLOs, by split into prefill + decode workers. fixed: the"
    " best split if workers keep their roles; collocated: 6 workers that each prefill and decode"
    " their own requests; worst: the lowest of the splits as a share of the highest. Simulated."
)
UNLIKE_TITLE = (
    "The same for 2 x H100 and 4 x L40S, with a model of 8 billion parameters, with the H100s as"
    " prefill workers or as decode workers. fixed: the better of the two if workers keep their"
    " roles. Simulated."
)


class Cell(msgspec.Struct, frozen=True):
    """One simulation: a split of the workers under one load and one TPOT SLO.

    is_unlike: whether the pool of two workers has H100s and the pool of four has L40S.
    """

    split: tuple[int, int]
    policy: str
    tpot_slo_s: float
    load: float  # as a fraction of saturation
    is_unlike: bool = False


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """The goodput of one load and TPOT SLO: percent of the requests that met both SLOs.

    by_split: the goodput of each split, in the order of `SPLITS` or `UNLIKE_SPLITS`.
    fixed: the best goodput of splits whose workers keep to their roles.
    collocated: the goodput of workers that do both, each for its own requests; None: unlike GPUs.
    """

    tpot_slo_s: float
    load: float
    requests_per_s: float
    by_split: tuple[float, ...]
    fixed: float
    collocated: float | None = None

    @property
    def best(self) -> float:
        return max(self.by_split)

    @property
    def worst_share(self) -> float:
        """The goodput of the worst split as a fraction of the best goodput of the row."""
        most = max(self.best, self.fixed, self.collocated or 0.0)
        return min(self.by_split) / most if most else 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grid of splits")
    group.add_argument(
        "--grid",
        action="store_true",
        help="run a window of the trace on 6 workers, in every split, at several loads and TPOT"
        " SLOs, and print the percentage of requests that meet both SLOs",
    )
    slos_ms = [1e3 * each for each in TPOT_SLOS_S]
    group.add_argument(
        "--grid-tpot-slo-ms",
        type=_positive,
        nargs="+",
        default=slos_ms,
        metavar="MS",
        help="TPOT SLOs of the grid in milliseconds (default:"
        f" {' '.join(f'{each:g}' for each in slos_ms)})",
    )
    group.add_argument(
        "--grid-load",
        type=_positive,
        nargs="+",
        default=LOADS,
        metavar="SHARE",
        help="loads of the grid, as shares of the rate at which all workers are always busy"
        f" (default: {' '.join(f'{each:g}' for each in LOADS)})",
    )
    group.add_argument(
        "--processes",
        type=int,
        default=usable_cores(),
        help="number of simulations that run in parallel (default: the number of cores)",
    )


def run(args: argparse.Namespace, config: SimConfig, trace: Sequence[TraceRequest]) -> int:
    """Simulate the first requests of `trace` in each cell of the grid, and print the results."""
    window = trace[: args.num_requests or NUM_REQUESTS]
    if math.isinf(config.ttft_slo_s):
        mean_s = sum(config.times.prefill_s(e.num_prompt_tokens) for e in window) / len(window)
        config = msgspec.structs.replace(config, ttft_slo_s=TTFT_PER_PREFILL * mean_s)
    tpot_slos_s = [each / 1e3 for each in args.grid_tpot_slo_ms]
    alike = list(cells(tpot_slos_s, args.grid_load))
    unlike = list(cells(tpot_slos_s, args.grid_load, is_unlike=True))
    simulated = partial(play, config=config, window=window)
    if args.processes > 1:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            percents = pool.map(simulated, alike + unlike, chunksize=1)
    else:
        percents = list(map(simulated, alike + unlike))
    rows = make_rows(config, window, alike, percents[: len(alike)])
    unlike_rows = make_rows(config, window, unlike, percents[len(alike) :])
    splits = tuple(f"{num_prefill}+{num_decode}" for num_prefill, num_decode in SPLITS)
    columns = (*splits, "best", "fixed", "collocated", "worst")
    _print(f"{TITLE} TTFT SLO {config.ttft_slo_s:.2f} s.", columns, rows)
    _print(UNLIKE_TITLE, ("H100 prefill", "H100 decode", "fixed"), unlike_rows)
    line = {
        "simulated": True,
        "num_requests": len(window),
        "ttft_slo_s": config.ttft_slo_s,
        "splits": SPLITS,
        "rows": msgspec.to_builtins(rows),
        "unlike_splits": UNLIKE_SPLITS,
        "unlike": msgspec.to_builtins(unlike_rows),
    }
    print(json.dumps(line))
    return 0


def cells(
    tpot_slos_s: Sequence[float], loads: Sequence[float], *, is_unlike: bool = False
) -> Iterator[Cell]:
    """All simulations of a grid, row by row."""
    splits = UNLIKE_SPLITS if is_unlike else SPLITS
    for tpot_slo_s, load in product(tpot_slos_s, loads):
        for policy, split in product((OURS, FIXED_ROLES), splits):
            yield Cell(split, policy, tpot_slo_s, load, is_unlike)


def play(cell: Cell, config: SimConfig, window: Sequence[TraceRequest]) -> float:
    """Simulate one cell; returns its goodput in percent.

    Args:
        config: everything but split, policy and load.
    """
    num_prefill, num_decode = cell.split
    config = msgspec.structs.replace(
        config,
        num_prefill=num_prefill,
        num_decode=num_decode,
        policy=cell.policy,
        tpot_slo_s=cell.tpot_slo_s,
        fair_queue=True,
    )
    rate = requests_per_s(cell, config, window)
    if cell.is_unlike:
        times = (H100_8B, L40S_8B) if num_prefill == 2 else (L40S_8B, H100_8B)
        config = msgspec.structs.replace(config, times=times[0], decode_times=times[1])
    return simulate(config, at_rate(window, rate, config.seed)).in_time_percent


def make_rows(
    config: SimConfig,
    window: Sequence[TraceRequest],
    cells: Sequence[Cell],
    percents: Sequence[float],
) -> list[Row]:
    """The rows of a grid.

    Args:
        cells, percents: all cells of a grid in their order, and their goodput.
    """
    rows = []
    num_splits = len({cell.split for cell in cells})
    for begin in range(0, len(cells), 2 * num_splits):
        cell, middle = cells[begin], begin + num_splits
        fixed = {cells[at].split: percents[at] for at in range(middle, middle + num_splits)}
        rows.append(
            Row(
                cell.tpot_slo_s,
                cell.load,
                requests_per_s(cell, config, window),
                tuple(percents[begin:middle]),
                max(percent for (_, num_decode), percent in fixed.items() if num_decode),
                fixed.get((NUM_WORKERS, 0)),
            )
        )
    return rows


def at_rate(window: Sequence[TraceRequest], requests_per_s: float, seed: int) -> list[TraceRequest]:
    """The requests of a window in the same order, arriving as a Poisson process."""
    rng = random.Random(seed)
    now = 0.0
    requests = []
    for each in window:
        requests.append(msgspec.structs.replace(each, arrival_s=now))
        now += rng.expovariate(requests_per_s)
    return requests


def requests_per_s(cell: Cell, config: SimConfig, window: Sequence[TraceRequest]) -> float:
    """The rate of a cell: its share of the most that its workers could compute."""
    if not cell.is_unlike:
        return cell.load * saturation(config, window)
    h100, l40s = (
        saturation(msgspec.structs.replace(config, times=times), window) / NUM_WORKERS
        for times in (H100_8B, L40S_8B)
    )
    return cell.load * (2 * h100 + 4 * l40s)


def saturation(config: SimConfig, window: Sequence[TraceRequest]) -> float:
    """The most requests per second that `NUM_WORKERS` workers could compute."""
    times = config.times
    known: set[int] = set()
    work_s = 0.0
    for each in window:
        num_cached = TRACE_BLOCK_TOKENS * sum(name in known for name in each.block_names)
        known.update(each.block_names)
        num_new = max(1, each.num_prompt_tokens - num_cached)
        work_s += times.prefill_s(num_new, num_cached)
        num_steps = each.num_output_tokens - 1
        num_context = each.num_prompt_tokens + 0.5 * num_steps
        share_s = times.per_step_s / config.max_num_seqs
        work_s += num_steps * (share_s + times.per_sequence_s + times.per_context_s * num_context)
    return NUM_WORKERS * len(window) / work_s


def _print(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("TPOT ms", "load", "req/s", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{1e3 * row.tpot_slo_s:g}", f"{row.load:g}", f"{row.requests_per_s:.1f}"]
        if row.collocated is None:
            cells += (f"{percent:.1f}" for percent in (*row.by_split, row.fixed))
        else:
            percents = (*row.by_split, row.best, row.fixed, row.collocated)
            cells += (f"{percent:.1f}" for percent in percents)
            cells.append(f"{row.worst_share:.3f}")
        table.add_row(*cells)
    Console(width=160).print(table)


def _positive(text: str) -> float:
    try:
        number = float(text)
        if not 0.0 < number < math.inf:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0") from None
    return number
