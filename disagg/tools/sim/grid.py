"""A grid of simulations: the goodput of each split of a few workers into pools, by load.

A row is one load and one TPOT SLO. Its columns are the splits of the same workers into prefill and
decode workers, with the current policy, and `collocated`: each worker prefills and decodes its own
requests, and prompts do not consider the streams that decode there. Rows of unlike GPUs have a
column for each pool that has the faster GPUs.

Arrivals are a Poisson process, so that the load is steady. Lengths and shared prefixes come from a
window of a trace. Saturation is the rate at which all workers would compute all the time if no
prefix were computed twice and batches were full.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from disagg.router.baselines import FIXED_ROLES, OURS
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


class Cell(msgspec.Struct, frozen=True):
    """One simulation: a split of the workers under one load and one TPOT SLO.

    is_unlike: whether the pool of two workers has H100s and the pool of four has L40S.
    """

    split: tuple[int, int]
    policy: str
    tpot_slo_s: float
    load: float  # as a fraction of saturation
    is_unlike: bool = False


class Row(msgspec.Struct, frozen=True):
    """The goodput of one load and TPOT SLO: percent of the requests that met both SLOs.

    by_split: the goodput of each split, in the order of `SPLITS`.
    fixed: the best goodput of splits whose workers keep to their roles.
    collocated: the goodput of workers that do both, each for its own requests.
    """

    tpot_slo_s: float
    load: float
    requests_per_s: float
    by_split: tuple[float, ...]
    fixed: float
    collocated: float

    @property
    def best(self) -> float:
        return max(self.by_split)

    @property
    def worst_share(self) -> float:
        """The goodput of the worst split as a fraction of the best goodput of the row."""
        most = max(self.best, self.fixed, self.collocated)
        return min(self.by_split) / most if most else 1.0


class UnlikeRow(msgspec.Struct, frozen=True):
    """The goodput, in percent, of 2 x H100 and 4 x L40S under one load and TPOT SLO.

    by_split: the goodput of each split, in the order of `UNLIKE_SPLITS`.
    fixed: the better goodput of these splits if workers keep to their roles.
    """

    tpot_slo_s: float
    load: float
    requests_per_s: float
    by_split: tuple[float, ...]
    fixed: float


def cells(tpot_slos_s: Sequence[float], loads: Sequence[float]) -> Iterator[Cell]:
    """All simulations of a grid, row by row."""
    for tpot_slo_s, load in product(tpot_slos_s, loads):
        for policy, split in product((OURS, FIXED_ROLES), SPLITS):
            yield Cell(split, policy, tpot_slo_s, load)


def unlike_cells(tpot_slos_s: Sequence[float], loads: Sequence[float]) -> Iterator[Cell]:
    """All simulations of unlike GPUs, row by row."""
    for tpot_slo_s, load in product(tpot_slos_s, loads):
        for policy, split in product((OURS, FIXED_ROLES), UNLIKE_SPLITS):
            yield Cell(split, policy, tpot_slo_s, load, is_unlike=True)


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
    rate = cell.load * saturation(config, window)
    if cell.is_unlike:
        rate = cell.load * unlike_saturation(config, window)
        times = (H100_8B, L40S_8B) if num_prefill == 2 else (L40S_8B, H100_8B)
        config = msgspec.structs.replace(config, times=times[0], decode_times=times[1])
    return simulate(config, at_rate(window, rate, config.seed)).in_time_percent


def rows(
    config: SimConfig,
    window: Sequence[TraceRequest],
    played: Sequence[tuple[Cell, float]],
) -> list[Row]:
    """The rows of a grid. `played`: all cells with their goodput, in the order of `cells`."""
    found: list[Row] = []
    num_splits = len(SPLITS)
    for begin in range(0, len(played), 2 * num_splits):
        ours = played[begin : begin + num_splits]
        fixed = played[begin + num_splits : begin + 2 * num_splits]
        cell = ours[0][0]
        found.append(
            Row(
                cell.tpot_slo_s,
                cell.load,
                cell.load * saturation(config, window),
                tuple(percent for _, percent in ours),
                max(percent for each, percent in fixed if each.split[1]),
                next(percent for each, percent in fixed if not each.split[1]),
            )
        )
    return found


def unlike_rows(
    config: SimConfig, window: Sequence[TraceRequest], played: Sequence[tuple[Cell, float]]
) -> list[UnlikeRow]:
    """The rows of unlike GPUs. `played`: all `unlike_cells` with their goodput, in that order."""
    found = []
    num_splits = len(UNLIKE_SPLITS)
    for begin in range(0, len(played), 2 * num_splits):
        cell = played[begin][0]
        percents = [percent for _, percent in played[begin : begin + 2 * num_splits]]
        rate = cell.load * unlike_saturation(config, window)
        ours, fixed = tuple(percents[:num_splits]), max(percents[num_splits:])
        found.append(UnlikeRow(cell.tpot_slo_s, cell.load, rate, ours, fixed))
    return found


def at_rate(window: Sequence[TraceRequest], requests_per_s: float, seed: int) -> list[TraceRequest]:
    """The requests of a window in the same order, arriving as a Poisson process."""
    rng = random.Random(seed)
    now = 0.0
    requests = []
    for each in window:
        requests.append(msgspec.structs.replace(each, arrival_s=now))
        now += rng.expovariate(requests_per_s)
    return requests


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


def unlike_saturation(config: SimConfig, window: Sequence[TraceRequest]) -> float:
    """The most requests per second that 2 x H100 and 4 x L40S could compute."""
    each = [
        saturation(msgspec.structs.replace(config, times=times), window) / NUM_WORKERS
        for times in (H100_8B, L40S_8B)
    ]
    return 2 * each[0] + 4 * each[1]


def usual_ttft_slo_s(config: SimConfig, window: Sequence[TraceRequest]) -> float:
    """The default TTFT SLO."""
    mean_s = sum(config.times.prefill_s(each.num_prompt_tokens) for each in window) / len(window)
    return TTFT_PER_PREFILL * mean_s
