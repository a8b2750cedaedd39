"""Sizes the cheapest fleets that meet the SLOs of a load: disaggregated, and colocated.

In a disaggregated fleet, the prefill workers are one queue, the decode workers hold as many
sequences as follow from rate, lengths and step time, and KV is transferred between them. In a
colocated fleet, every worker does both, with a chunk of a prompt in each step while prompts wait
(Sarathi-Serve, arXiv 2403.02310). The chunk is as large as the TPOT SLO allows.

All figures are predictions: rooflines (`roofline.py`) under the queueing approximations of
`queueing.py`. docs/planning.md has the formulas in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product
from statistics import fmean

import msgspec

from disagg.capacity.roofline import Placement
from disagg.capacity.workload import Slo, Workload
from disagg.queueing import MAX_WORKERS, smallest, under_way, wait_s
from disagg.time_model import StepFeatures, attended

# Most sequences in one step. With more, engines spend more on bookkeeping than batching gains.
MAX_BATCH = 1024

# The largest share of their time in which workers compute prompts. The queueing formulas would
# allow almost all of it in a large pool. The rest is for effects that they ignore: an uneven load,
# and workers that restart.
MAX_BUSY = 0.9

# The largest share of a link's bandwidth that is used on average. With more, pulls wait for each
# other.
MAX_LINK_SHARE = 0.5

# Fixed seconds of a pull: the request, posting descriptors, the notification. The router has the
# same prior.
TRANSFER_LATENCY_S = 2e-3

# The numbers of prompt tokens that one step of a worker that does both may have.
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)


class Pool(msgspec.Struct, frozen=True):
    """A pool of equal workers.

    busy: the share of the time in which they compute prompts (prefill workers, and workers that do
        both), or the share of places in the batch that are taken (decode workers).
    """

    placement: Placement
    num_workers: int
    usd_per_gpu_hour: float
    busy: float
    batch: int  # sequences that decode on one worker at the same time, at the SLO's quantile

    def __str__(self) -> str:
        return f"{self.num_workers} x ({self.placement.num_gpus} {self.placement.gpu.name})"

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.placement.num_gpus

    @property
    def usd_per_hour(self) -> float:
        return self.num_gpus * self.usd_per_gpu_hour


class FleetPlan(msgspec.Struct, frozen=True):
    """Pools that meet the SLOs, and the predicted TTFT and TPOT at `QUANTILE`.

    If workers do both, there is one pool, and `chunk_tokens`. Otherwise there are prefill and
    decode, in this order, and `transfer_s`, the time to move the KV of a mean prompt.
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


class Goal(msgspec.Struct, frozen=True):
    """What fleets are sized for.

    link_bytes_per_s: rate at which a GPU sends KV to another worker.
    price: US dollars per GPU and hour of a worker.
    """

    load: Workload
    slo: Slo
    link_bytes_per_s: float
    price: Callable[[Placement], float]


def plan_disaggregated(goal: Goal, placements: Iterable[Placement]) -> FleetPlan | None:
    """The cheapest prefill and decode pools that meet the SLOs; None if none do."""
    return _cheapest(_apart(goal, *pair) for pair in product(placements, repeat=2))


def plan_colocated(goal: Goal, placements: Iterable[Placement]) -> FleetPlan | None:
    """The cheapest pool of workers that do both and meet the SLOs; None if none do."""
    return _cheapest(_together(goal, *each) for each in product(placements, CHUNKS))


def transfer_s(goal: Goal, prefill: Placement, decode: Placement) -> float:
    """Seconds to move the KV of a mean prompt. Every GPU of the smaller worker has a link.

    This time is not overlapped with prefill here; early tickets overlap all but the last chunk.
    """
    nbytes = goal.load.mean_prompt_tokens * prefill.kv_nbytes_per_token
    return TRANSFER_LATENCY_S + nbytes / (goal.link_bytes_per_s * num_links(prefill, decode))


def num_links(one: Placement, other: Placement) -> int:
    """The number of links between two workers."""
    return min(one.num_gpus, other.num_gpus)


def _cheapest(fleets: Iterable[FleetPlan | None]) -> FleetPlan | None:
    """The cheapest fleet; of equally cheap ones the fastest."""
    found = [fleet for fleet in fleets if fleet is not None]
    return min(found, key=lambda fleet: (fleet.usd_per_hour, fleet.ttft_s), default=None)


def _apart(goal: Goal, prefill: Placement, decode: Placement) -> FleetPlan | None:
    load, moved_s = goal.load, transfer_s(goal, prefill, decode)
    num_gaps = max(1.0, load.mean_output_tokens - 1.0)
    spread_s = moved_s / num_gaps  # the first token does not wait for the transfer, the second does
    # So many workers that KV uses no more than `MAX_LINK_SHARE` of their links.
    num_for_links = math.ceil(load.requests_per_s * (moved_s - TRANSFER_LATENCY_S) / MAX_LINK_SHARE)
    first = _prefill_pool(goal, prefill, num_for_links)
    second = _decode_pool(goal, goal.slo.tpot_s - spread_s, decode, num_for_links)
    if first is None or second is None:
        return None
    ttft_s = _ttft_s(load, first.num_workers, prefill.prefill_s)
    tpot_s = decode.decode_step_s(second.batch, load.decode_tokens) + spread_s
    return FleetPlan((first, second), ttft_s, tpot_s, moved_s)


def _ttft_s(load: Workload, num_workers: int, prefill_s: Callable[[int], float]) -> float:
    """Seconds of waiting plus computing, both at the quantile, as if both were worst together."""
    each = [prefill_s(num_tokens) for num_tokens in load.prompt_sample]
    mean_s = fmean(each)
    variability = fmean([(seconds / mean_s - 1.0) ** 2 for seconds in each])
    waited_s = wait_s(num_workers, load.requests_per_s * mean_s, mean_s, variability)
    return waited_s + prefill_s(load.long_prompt_tokens)


def _prefill_pool(goal: Goal, placement: Placement, at_least: int) -> Pool | None:
    load, slo = goal.load, goal.slo
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
    return Pool(placement, num_workers, goal.price(placement), offered / num_workers, 0)


def _decode_pool(goal: Goal, tpot_s: float, placement: Placement, at_least: int) -> Pool | None:
    load = goal.load
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
    return Pool(placement, num_workers, goal.price(placement), full / limit, full)


def _full_batch(
    rate: float, num_workers: int, gap_s: Callable[[int], float], limit: int
) -> int | None:
    """Sequences on one worker at the quantile, if the pool makes `rate` tokens/s.

    The batch determines the time of a step, and that determines how many sequences decode at the
    same time (Little's law). The result is the least batch for which both agree; None if it would
    exceed `limit`.
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


def _together(goal: Goal, placement: Placement, chunk_tokens: int) -> FleetPlan | None:
    slo, both = goal.slo, _Both(goal.load, placement, chunk_tokens)

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
    pool = Pool(placement, num_workers, goal.price(placement), busy, batch)
    ttft_s = both.ttft_s(batch, num_workers)
    return FleetPlan((pool,), ttft_s, both.step_s(batch), chunk_tokens=chunk_tokens)


class _Both(msgspec.Struct, frozen=True):
    """Workers that do both: while prompts wait, each step has `chunk_tokens` prompt tokens.

    A loaded worker has prompt tokens in more than one of twenty steps, so the 95 % quantile of the
    gap between tokens is a step with a chunk.
    """

    load: Workload
    placement: Placement
    chunk_tokens: int

    @property
    def max_batch(self) -> int:
        room = self.placement.num_kv_tokens - self.load.mean_prompt_tokens  # one prompt is computed
        return min(MAX_BATCH, int(room / self.load.decode_tokens))

    def step_s(self, batch: int, num_attended: float | None = None) -> float:
        """Seconds of a step with a full chunk.

        num_attended: tokens to which each prompt token attends; None: the average.
        """
        if num_attended is None:
            num_attended = self.chunk_tokens * self.load.reach
        num_context = int(batch * self.load.decode_tokens)
        step = StepFeatures(self.chunk_tokens, num_attended, batch, num_context)
        return self.placement.step_s(step)

    def busy(self, batch: int, num_workers: int) -> float:
        """The share of the time in which there are prompts."""
        num_chunks = self.load.requests_per_s * self.load.mean_prompt_tokens / self.chunk_tokens
        return num_chunks / num_workers * self.step_s(batch)

    def batch(self, num_workers: int) -> int | None:
        """Sequences that decode on a worker at the quantile; None if there are too few workers."""

        def gap_s(batch: int) -> float:
            """The mean gap: steps have a chunk while there are prompts, and none otherwise."""
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
            return steps_s + self.placement.attention_s(num_tokens, attended(num_tokens, 0))

        return max(self.step_s(batch), _ttft_s(self.load, num_workers, prefill_s))
