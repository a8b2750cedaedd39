"""`disagg sim --grid`: the goodput of each split of a few workers into pools, by load and policy.

A row is one load at one rate and TPOT SLO. Its columns are the splits of the same workers into
prefill and decode workers, with the current policy, and the best of these splits with each other
policy: `fixed`, where workers keep to their roles, with and without refusals; and `collocated`,
where each worker prefills and decodes its own requests, and prompts do not consider the streams
that decode there. TaiChi is played with several sizes of steps, of which the best counts. Rows of
unlike GPUs, 2 x H100 and 4 x L40S, have a column for each pool that has the faster GPUs.

Loads are made up (`loads.py`), or lengths and shared prefixes come from a window of a trace, and
arrivals are a Poisson process, so that the load is steady. Saturation is the rate at which all
workers would compute all the time if no prefix were computed twice and batches were full.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from disagg.errors import RequestError
from disagg.host import usable_cores
from disagg.tools.sim.baselines import FIXED_ROLES, NO_REFUSALS, OURS, PUBLISHED, TAICHI
from disagg.tools.sim.config import H100_8B, L40S_8B, SimConfig
from disagg.tools.sim.loads import USUAL_LOAD, make_load
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate, simulate_all
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest

NUM_WORKERS = 6
TPOT_SLOS_S = (0.01, 0.0125, 0.015, 0.02, 0.03, 0.05)
LOADS = (0.3, 0.5, 0.7, 0.9, 1.1)
UNLIKE_SPLITS = ((2, 4), (4, 2))  # 2 x H100 are the prefill workers, or the decode workers
NUM_REQUESTS = 600  # requests of a window
DECODE_CHUNKS = (64, 128, 256, 512)  # tokens in a step of TaiChi's decode workers
TTFT_PER_PREFILL = 10.0  # the TTFT SLO as a multiple of the time of a mean prompt alone

TITLE = (
    "Percentage of requests within both SLOs, by split into prefill + decode workers. fixed: the"
    " best split if workers keep their roles, with or without refusals; collocated: workers that"
    " each prefill and decode their own requests; worst: the lowest of the splits as a share of the"
    " highest of all; refused: of all requests, mean of the splits; long: which share of these are"
    " among the longest seventh of prompts, and their share of all prompts' work. Simulated."
)
UNLIKE_TITLE = (
    "The same for 2 x H100 and 4 x L40S, with a model of 8 billion parameters, with the H100s as"
    " prefill workers or as decode workers. fixed: the better of the two if workers keep their"
    " roles. Simulated."
)


class Window(NamedTuple):
    """The requests of a grid: of a trace, or of a made-up load.

    load: its name; "": `requests` are of a trace, and only their order counts.
    """

    requests: Sequence[TraceRequest]
    load: str = ""

    def at_rate(self, requests_per_s: float, seed: int) -> list[TraceRequest]:
        if self.load:
            return make_load(self.load, requests_per_s, len(self.requests), seed)
        return at_rate(self.requests, requests_per_s, seed)


class Cell(msgspec.Struct, frozen=True):
    """One simulation: a split of the workers under one load and one TPOT SLO.

    is_unlike: whether the pool of two workers has H100s and the pool of four has L40S.
    decode_chunk: tokens in a step of decode workers; None: as in one of prefill workers.
    """

    split: tuple[int, int]
    policy: str
    tpot_slo_s: float
    load: float  # as a fraction of saturation
    is_unlike: bool = False
    decode_chunk: int | None = None


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """The goodput of one load, rate and TPOT SLO: percent of the requests that met both SLOs.

    by_split: the goodput of each split.
    others: the same with each other policy; of TaiChi, of each split with each size of steps.
    refused_percent: of all requests, mean of the splits.
    long_refused_percent, long_work_percent: the share of the longest seventh of prompts in those
        that were refused, and in the work of all prompts.
    """

    tpot_slo_s: float
    load: float
    requests_per_s: float
    by_split: tuple[float, ...]
    others: Mapping[str, tuple[float, ...]]
    has_collocated: bool
    refused_percent: float
    long_refused_percent: float
    long_work_percent: float

    @property
    def best(self) -> float:
        return max(self.by_split)

    @property
    def collocated(self) -> float | None:
        """The goodput of workers that do both, each for its own requests; None: unlike GPUs."""
        return self.others[FIXED_ROLES][-1] if self.has_collocated else None

    @property
    def fixed(self) -> float:
        """The best goodput of splits whose workers keep to their roles."""
        end = -1 if self.has_collocated else None
        both = [self.others.get(name, ())[:end] for name in (FIXED_ROLES, NO_REFUSALS)]
        return max(percent for percents in both for percent in percents)

    @property
    def worst_share(self) -> float:
        """The goodput of the worst split as a fraction of the best goodput of the row."""
        most = max(self.best, *(max(percents) for percents in self.others.values()))
        return min(self.by_split) / most if most else 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grid of splits")
    group.add_argument(
        "--grid",
        action="store_true",
        help="run the load, or a window of the trace, on a few workers in every split, at several"
        " rates and TPOT SLOs, and print the percentage of requests that meet both SLOs; beside"
        " those of each --policy, or of all published ones with --compare",
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
        "--grid-workers",
        type=int,
        default=NUM_WORKERS,
        metavar="NUMBER",
        help=f"workers of the grid (default: {NUM_WORKERS}, and then unlike GPUs too)",
    )
    group.add_argument(
        "--processes",
        type=int,
        default=usable_cores(),
        help="number of simulations that run in parallel (default: the number of cores)",
    )


def run(args: argparse.Namespace, config: SimConfig, trace: Sequence[TraceRequest]) -> int:
    """Simulate the first requests of the load in each cell of the grid, and print the results."""
    num_workers = args.grid_workers
    if num_workers < 2:
        raise RequestError("A grid needs at least 2 workers.", param="grid_workers")
    # Later turns of the usual load come long after the first ones, so its order alone is taken.
    load = "" if args.trace is not None or args.load == USUAL_LOAD else args.load
    window = Window(trace[: args.num_requests or NUM_REQUESTS], load)
    others = PUBLISHED if args.compare else args.policy or ()
    policies = tuple(dict.fromkeys((OURS, FIXED_ROLES, NO_REFUSALS, *others)))
    axes = [each / 1e3 for each in args.grid_tpot_slo_ms], args.grid_load
    alike = list(cells(*axes, splits(num_workers), policies))
    unlike = list(cells(*axes, UNLIKE_SPLITS, is_unlike=True)) if num_workers == 6 else []
    config = with_ttft_slo(config, window.requests)
    rows = play_all(alike, config, window, args.processes)
    unlike_rows = play_all(unlike, config, window, args.processes)
    names = [f"{num_prefill}+{num_decode}" for num_prefill, num_decode in splits(num_workers)]
    _print(f"{TITLE} TTFT SLO {config.ttft_slo_s:.2f} s.", names, rows)
    if unlike:
        _print(UNLIKE_TITLE, ["H100 prefill", "H100 decode"], unlike_rows)
    line = {
        "simulated": True,
        "source": str(args.trace or args.load),
        "num_requests": len(window.requests),
        "ttft_slo_s": config.ttft_slo_s,
        "splits": splits(num_workers),
        "rows": msgspec.to_builtins(rows),
        "unlike_splits": UNLIKE_SPLITS,
        "unlike": msgspec.to_builtins(unlike_rows),
    }
    print(json.dumps(line))
    return 0


def splits(num_workers: int) -> tuple[tuple[int, int], ...]:
    """All splits into prefill and decode workers; in the last one, each worker does both."""
    return tuple((number, num_workers - number) for number in range(1, num_workers + 1))


def cells(
    tpot_slos_s: Sequence[float],
    loads: Sequence[float],
    splits: Sequence[tuple[int, int]],
    policies: Sequence[str] = (OURS, FIXED_ROLES),
    *,
    is_unlike: bool = False,
) -> Iterator[Cell]:
    """All simulations of a grid, row by row, and policy by policy in a row."""
    for tpot_slo_s, load in product(tpot_slos_s, loads):
        for policy, split in product(policies, splits):
            chunks = DECODE_CHUNKS if policy == TAICHI and split[1] else (None,)
            for chunk in chunks:
                yield Cell(split, policy, tpot_slo_s, load, is_unlike, chunk)


def with_ttft_slo(config: SimConfig, requests: Sequence[TraceRequest]) -> SimConfig:
    """`config` with a TTFT SLO, if it has none: a multiple of a mean prompt's time."""
    if math.isfinite(config.ttft_slo_s):
        return config
    times_s = [config.times.prefill_s(each.num_prompt_tokens) for each in requests]
    return msgspec.structs.replace(config, ttft_slo_s=TTFT_PER_PREFILL * fmean(times_s))


def play_all(
    cells: Sequence[Cell], config: SimConfig, window: Window, num_processes: int
) -> list[Row]:
    """Simulate all cells of a grid, in their order."""
    plays = [to_play(cell, config, window) for cell in cells]
    return make_rows(config, window, cells, simulate_all(plays, num_processes))


def play(cell: Cell, config: SimConfig, window: Window) -> SimReport:
    return simulate(*to_play(cell, config, window))


def to_play(cell: Cell, config: SimConfig, window: Window) -> tuple[SimConfig, list[TraceRequest]]:
    """What to simulate for one cell.

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
        decode_max_num_batched_tokens=cell.decode_chunk,
        fair_queue=True,
    )
    rate = requests_per_s(cell, config, window.requests)
    if cell.is_unlike:
        times = (H100_8B, L40S_8B) if num_prefill == 2 else (L40S_8B, H100_8B)
        config = msgspec.structs.replace(config, times=times[0], decode_times=times[1])
    return config, window.at_rate(rate, config.seed)


def make_rows(
    config: SimConfig, window: Window, cells: Sequence[Cell], reports: Sequence[SimReport]
) -> list[Row]:
    """The rows of a grid.

    Args:
        cells, reports: all cells of a grid in their order, and what came out.
    """
    by_row: dict[tuple[float, float], dict[str, list[SimReport]]] = {}
    firsts: dict[tuple[float, float], Cell] = {}
    for cell, report in zip(cells, reports, strict=True):
        key = cell.tpot_slo_s, cell.load
        firsts.setdefault(key, cell)
        by_row.setdefault(key, {}).setdefault(cell.policy, []).append(report)
    rows = []
    for (tpot_slo_s, load), by_policy in by_row.items():
        ours = by_policy.pop(OURS)
        cell = firsts[tpot_slo_s, load]
        rows.append(
            Row(
                tpot_slo_s,
                load,
                requests_per_s(cell, config, window.requests),
                tuple(each.in_time_percent for each in ours),
                {name: tuple(e.in_time_percent for e in its) for name, its in by_policy.items()},
                not cell.is_unlike,
                fmean(each.refused_percent for each in ours),
                fmean(each.long_refused_percent for each in ours),
                ours[0].long_work_percent,
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
    num_workers = sum(cell.split)
    if not cell.is_unlike:
        return cell.load * num_workers * saturation(config, window)
    h100, l40s = (
        saturation(msgspec.structs.replace(config, times=times), window)
        for times in (H100_8B, L40S_8B)
    )
    return cell.load * (2 * h100 + 4 * l40s)


def saturation(config: SimConfig, window: Sequence[TraceRequest]) -> float:
    """The most requests per second that a worker could compute."""
    times = config.times
    num_context = sum(e.num_prompt_tokens + 0.5 * e.num_output_tokens for e in window) / len(window)
    num_streams = config.num_blocks * config.block_size / num_context  # whose KV fits
    num_streams = max(1.0, min(config.max_num_seqs, num_streams))
    known: set[int] = set()
    work_s = 0.0
    for each in window:
        num_cached = TRACE_BLOCK_TOKENS * sum(name in known for name in each.block_names)
        known.update(each.block_names)
        num_new = max(1, each.num_prompt_tokens - num_cached)
        work_s += times.prefill_s(num_new, num_cached)
        num_steps = each.num_output_tokens - 1
        num_context = each.num_prompt_tokens + 0.5 * num_steps
        share_s = times.per_step_s / num_streams
        work_s += num_steps * (share_s + times.per_sequence_s + times.per_context_s * num_context)
    return len(window) / work_s


def _print(title: str, splits: Sequence[str], rows: Sequence[Row]) -> None:
    others = [name for name in rows[0].others if name not in (FIXED_ROLES, NO_REFUSALS)]
    columns = [*splits, "fixed", "collocated", *others, "worst", "refused", "long"]
    table = Table(title=title, title_justify="left")
    for column in ("TPOT ms", "load", "req/s", *columns):
        table.add_column(column, justify="right")
    for row in rows:
        best = [max(row.others[name]) for name in others]
        percents = [*row.by_split, row.fixed, row.collocated, *best]
        table.add_row(
            f"{1e3 * row.tpot_slo_s:g}",
            f"{row.load:g}",
            f"{row.requests_per_s:.1f}",
            *("" if percent is None else f"{percent:.1f}" for percent in percents),
            f"{row.worst_share:.3f}",
            f"{row.refused_percent:.1f}",
            f"{row.long_refused_percent:.0f} of {row.long_work_percent:.0f}",
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
