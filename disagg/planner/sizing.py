"""Sizes the cheapest fleets that meet the SLOs of a load: disaggregated, and colocated.

Disaggregated: the prefill workers are one queue; the decode workers hold as many sequences as
follow from rate, lengths and step time; KV is transferred between them. Colocated: every worker
does both, with a chunk of a prompt in each step while prompts wait (Sarathi-Serve, arXiv
2403.02310); the chunk is as large as the TPOT SLO allows.

All figures are predictions: rooflines (`roofline.py`) under the queueing approximations of
`queueing.py`. docs/planning.md has the formulas in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean

import msgspec

from disagg.planner.load import Slo, Workload
from disagg.planner.roofline import Placement
from disagg.queueing import MAX_WORKERS, smallest, under_way, wait_s
from disagg.time_model import StepFeatures, attended

# Sequences in one step: beyond it, engines spend more on bookkeeping than they gain by batching.
MAX_BATCH = 1024

# Of the time of workers that compute prompts. The queueing formulas would allow almost all of it
# in a large pool; the rest is for what they leave out: uneven minutes, a worker that restarts.
MAX_BUSY = 0.9

# Of a link's bandwidth, used on average; with more, pulls wait for each other.
MAX_LINK_SHARE = 0.5

# Of a pull: asking, posting descriptors, the notification. The router's own first guess.
TRANSFER_LATENCY_S = 2e-3

# Prompt tokens that one step of a worker that does both may carry.
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)


class Pool(msgspec.Struct, frozen=True):
    """Equal workers. `busy` is the share of the time in which they compute prompts (prefill,
    both) or of places in the batch that are taken (decode)."""

    placement: Placement
    num_workers: int
    usd_per_gpu_hour: float
    busy: float
    batch: int  # sequences that decode on one worker at once, at the SLO's quantile

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.placement.num_gpus

    @property
    def usd_per_hour(self) -> float:
        return self.num_gpus * self.usd_per_gpu_hour


class FleetPlan(msgspec.Struct, frozen=True):
    """Pools that hold the SLOs, and what `QUANTILE` of the requests are predicted to get.

    `chunk_tokens` and one pool where workers do both; else prefill and decode, in this order, and
    the seconds that the KV of a mean prompt takes between them.
    """

    pools: tuple[Pool, ...]
    ttft_s: float
    tpot_s: float
    transfer_s: float = 0.0
    chunk_tokens: int = 0

    @property
    def usd_per_hour(self) -> float:
        return sum(pool.usd_per_hour for pool in self.pools)

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)


Prices = Callable[[Placement], float]  # US dollars for a GPU and hour


def disaggregated(
    load: Workload,
    slo: Slo,
    placements: Iterable[Placement],
    link_bytes_per_s: float,
    prices: Prices,
) -> FleetPlan | None:
    """The cheapest prefill and decode pools that hold the SLOs; None where none do."""
    every = list(placements)
    fleets = (
        _apart(load, slo, prefill, decode, link_bytes_per_s, prices)
        for prefill in every
        for decode in every
    )
    return _cheapest(fleets)


def colocated(
    load: Workload, slo: Slo, placements: Iterable[Placement], prices: Prices
) -> FleetPlan | None:
    """The cheapest pool of workers that do both and hold the SLOs; None where none do."""
    every = (_together(load, slo, each, chunk, prices) for each in placements for chunk in CHUNKS)
    return _cheapest(every)


def transfer_s(
    load: Workload, prefill: Placement, decode: Placement, link_bytes_per_s: float
) -> float:
    """Seconds that the KV of a mean prompt takes. Every GPU of the smaller worker has a link.

    None of it is hidden behind prefill here; issuing tickets early hides all but the last chunk.
    """
    nbytes = load.mean_prompt_tokens * prefill.kv_nbytes_per_token
    return TRANSFER_LATENCY_S + nbytes / (link_bytes_per_s * num_links(prefill, decode))


def num_links(one: Placement, other: Placement) -> int:
    """That two workers have between them."""
    return min(one.num_gpus, other.num_gpus)


def _cheapest(fleets: Iterable[FleetPlan | None]) -> FleetPlan | None:
    """Of equally dear ones, that with the earlier tokens."""
    found = [fleet for fleet in fleets if fleet is not None]
    return min(found, key=lambda fleet: (fleet.usd_per_hour, fleet.ttft_s), default=None)


def _apart(
    load: Workload,
    slo: Slo,
    prefill: Placement,
    decode: Placement,
    link_bytes_per_s: float,
    prices: Prices,
) -> FleetPlan | None:
    moved_s = transfer_s(load, prefill, decode, link_bytes_per_s)
    num_gaps = max(1.0, load.mean_output_tokens - 1.0)
    spread_s = moved_s / num_gaps  # the first token does not wait for the transfer, the second does
    # Workers whose links carry the KV at no more than `MAX_LINK_SHARE`.
    num_for_links = math.ceil(load.requests_per_s * (moved_s - TRANSFER_LATENCY_S) / MAX_LINK_SHARE)
    first = _prefill_pool(load, slo, prefill, num_for_links, prices)
    second = _decode_pool(load, slo.tpot_s - spread_s, decode, num_for_links, prices)
    if first is None or second is None:
        return None
    ttft_s = _ttft_s(load, first.num_workers, prefill.prefill_s)
    tpot_s = decode.decode_step_s(second.batch, load.decode_tokens) + spread_s
    return FleetPlan((first, second), ttft_s, tpot_s, moved_s)


def _ttft_s(load: Workload, num_workers: int, prefill_s: Callable[[int], float]) -> float:
    """The wait and the prompt's own seconds, both at the quantile: as if the two came together."""
    each = [prefill_s(num_tokens) for num_tokens in load.prompt_sample]
    mean_s = fmean(each)
    variability = fmean([(seconds / mean_s - 1.0) ** 2 for seconds in each])
    waited_s = wait_s(num_workers, load.requests_per_s * mean_s, mean_s, variability)
    return waited_s + prefill_s(load.long_prompt_tokens)


def _prefill_pool(
    load: Workload, slo: Slo, placement: Placement, at_least: int, prices: Prices
) -> Pool | None:
    if placement.prefill_s(load.long_prompt_tokens) > slo.ttft_s:
        return None
    mean_s = fmean([placement.prefill_s(num_tokens) for num_tokens in load.prompt_sample])
    offered = load.requests_per_s * mean_s
    num_workers = smallest(
        max(1, at_least, math.ceil(offered / MAX_BUSY)),
        lambda num: _ttft_s(load, num, placement.prefill_s) <= slo.ttft_s,
    )
    if num_workers is None:
        return None
    return Pool(placement, num_workers, prices(placement), offered / num_workers, 0)


def _decode_pool(
    load: Workload, tpot_s: float, placement: Placement, at_least: int, prices: Prices
) -> Pool | None:
    limit = min(MAX_BATCH, int(placement.num_kv_tokens / load.decode_tokens))
    rate = load.requests_per_s * max(0.0, load.mean_output_tokens - 1.0)

    def gap_s(batch: int) -> float:
        return placement.decode_step_s(batch, load.decode_tokens)

    def batch(num_workers: int) -> int | None:
        return _full_batch(rate, num_workers, gap_s, limit)

    def suffices(num_workers: int) -> bool:
        full = batch(num_workers)
        return full is not None and gap_s(full) <= tpot_s

    num_workers = smallest(max(1, at_least), suffices) if gap_s(1) <= tpot_s else None
    if num_workers is None:
        return None
    full = batch(num_workers)
    assert full is not None
    return Pool(placement, num_workers, prices(placement), full / limit, full)


def _full_batch(
    rate: float, num_workers: int, gap_s: Callable[[int], float], limit: int
) -> int | None:
    """Sequences on one worker at the quantile, where the pool makes `rate` tokens/s.

    The batch decides how long a step takes, and that decides how many sequences are there at once
    (Little's law): the least batch that agrees with itself. None where it would exceed `limit`.
    """
    batch = 1
    while True:
        if batch > limit:
            return None
        needed = rate / num_workers * gap_s(batch)
        if needed <= batch:
            break
        batch = math.ceil(needed) if needed <= limit else limit + 1
    mean = rate * gap_s(batch)  # in the whole pool
    full = max(1, math.ceil(under_way(mean) / num_workers))
    return full if full <= limit else None


def _together(
    load: Workload, slo: Slo, placement: Placement, chunk_tokens: int, prices: Prices
) -> FleetPlan | None:
    both = _Both(load, placement, chunk_tokens)

    def holds(batch: int | None, num_workers: int) -> bool:
        return batch is not None and (
            both.busy(batch, num_workers) <= MAX_BUSY
            and both.step_s(batch) <= slo.tpot_s
            and both.ttft_s(batch, num_workers) <= slo.ttft_s
        )

    if both.max_batch < 1 or not holds(1, MAX_WORKERS):
        return None
    num_workers = smallest(1, lambda num: holds(both.batch(num), num))
    batch = both.batch(num_workers) if num_workers else None
    if num_workers is None or batch is None:
        return None
    busy = both.busy(batch, num_workers)
    pool = Pool(placement, num_workers, prices(placement), busy, batch)
    ttft_s = both.ttft_s(batch, num_workers)
    return FleetPlan((pool,), ttft_s, both.step_s(batch), chunk_tokens=chunk_tokens)


class _Both(msgspec.Struct, frozen=True):
    """Workers that decode and compute prompts, `chunk_tokens` of them in each step while some wait.

    A worker that carries a load has prompts in more than one step in twenty, so the gap between
    tokens that 95 % do not exceed is a step with a chunk in it.
    """

    load: Workload
    placement: Placement
    chunk_tokens: int

    @property
    def max_batch(self) -> int:
        room = self.placement.num_kv_tokens - self.load.mean_prompt_tokens  # one being computed
        return min(MAX_BATCH, int(room / self.load.decode_tokens))

    def step_s(self, batch: int, num_attended: float | None = None) -> float:
        """With a full chunk; `num_attended` defaults to what its tokens attend to on average."""
        if num_attended is None:
            num_attended = self.chunk_tokens * self.load.reach
        num_context = int(batch * self.load.decode_tokens)
        step = StepFeatures(self.chunk_tokens, num_attended, batch, num_context)
        return self.placement.step_s(step)

    def busy(self, batch: int, num_workers: int) -> float:
        """Share of the time in which there are prompts."""
        num_chunks = self.load.requests_per_s * self.load.mean_prompt_tokens / self.chunk_tokens
        return num_chunks / num_workers * self.step_s(batch)

    def batch(self, num_workers: int) -> int | None:
        """Sequences that decode on a worker at the quantile; None where these are too few."""

        def gap_s(batch: int) -> float:
            """The mean one: with a chunk while there are prompts, without one otherwise."""
            busy = self.busy(batch, num_workers)
            if busy > MAX_BUSY:
                return math.inf
            plain_s = self.placement.decode_step_s(batch, self.load.decode_tokens)
            return 1.0 / (busy / self.step_s(batch) + (1.0 - busy) / plain_s)

        rate = self.load.requests_per_s * self.load.mean_output_tokens
        return _full_batch(rate, num_workers, gap_s, self.max_batch)

    def ttft_s(self, batch: int, num_workers: int) -> float:
        without_attention_s = self.step_s(batch, 0.0)

        def prefill_s(num_tokens: int) -> float:
            steps_s = num_tokens / self.chunk_tokens * without_attention_s
            return steps_s + attended(num_tokens, 0) * self.placement.attended_s

        return max(self.step_s(batch), _ttft_s(self.load, num_workers, prefill_s))
