"""The possible routes of a request as candidates with their costs.

A route is local (one worker computes the prompt and decodes) or remote (KV moves from the worker
that computes the prompt to the one that decodes). The worker that computes the prompt may first
pull its cached prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from disagg.router.costs import (
    DecodeCost,
    PrefillCost,
    prefill_cost,
    transfer_s,
    with_prefix_pull,
)
from disagg.router.pull_times import UNMEASURED_S_PER_BYTE
from disagg.router.route import Candidate
from disagg.router.slack import AddedStream
from disagg.router.worker_view import WorkerView

NUM_PER_SIDE = 4  # cheapest prefill and decode workers of which all pairs are compared
NUM_PREFIX_PULLERS = 2  # cheapest workers for which a prefix pull is considered
# Steps from the pull to the first decode step: the rest of a running step, and one during the pull.
NUM_STEPS_JOINING = 1.5

_total_s = attrgetter("total_s")


class Slos(NamedTuple):
    """The SLOs of a request.

    ttft_s: latest first token, in seconds; inf: no TTFT SLO.
    has_tpot: whether it has one of its own or its model's.
    miss_s: the price of a missed SLO: the seconds that a request is allowed, with the model's TPOT
        SLO where it has none itself.
    """

    ttft_s: float
    has_tpot: bool
    miss_s: float


class Prompt(NamedTuple):
    """The prompt as costs see it. num_at_source: leading tokens that `prefix_source` has cached."""

    num_tokens: int
    prefix_source: WorkerView | None
    num_at_source: int
    now: float
    slos: Slos


class ComputingPool(NamedTuple):
    """Workers that may compute a prompt. The fields are those of `shortlist.Side`, and from
    `num_behind` on arguments of `costs.prefill_cost`."""

    workers: Sequence[WorkerView]
    num_held: Sequence[int]  # by worker, as the next two
    num_in_host: Sequence[int]
    num_behind: Sequence[float]
    num_held_once: tuple[int, int]
    spares_decodes: bool


def prefill_costs(pool: ComputingPool, prompt: Prompt) -> list[PrefillCost]:
    num_tokens, now = prompt.num_tokens, prompt.now
    once, spares = pool.num_held_once, pool.spares_decodes
    each = zip(pool.workers, pool.num_held, pool.num_in_host, pool.num_behind, strict=True)
    return [
        prefill_cost(worker, num_tokens, num_held, num_behind, once, spares, num_in_host, now)
        for worker, num_held, num_in_host, num_behind in each
    ]


def local_routes(
    goals: Sequence[DecodeCost], prompt: Prompt, pool: ComputingPool, costs: Sequence[PrefillCost]
) -> list[Candidate]:
    ways = [local_route(prompt, cost, goal) for cost, goal in zip(costs, goals, strict=True)]
    if prompt.prefix_source is None:
        return ways
    for number in _worth_a_pull(costs, prompt, lambda n: ways[n].total_s):
        pulling = _with_prefix_pull(number, prompt.prefix_source, prompt, pool, costs)
        if pulling.total_s < costs[number].total_s:
            ways.append(local_route(prompt, pulling, goals[number]))
    return ways


def prefix_pull_costs(
    prompt: Prompt, pool: ComputingPool, costs: Sequence[PrefillCost]
) -> list[PrefillCost]:
    """The costs, with a prefix pull, of the workers that would then compute the rest of the prompt
    soonest.

    `costs`: of the same workers without a prefix pull.
    """
    if prompt.prefix_source is None:
        return []

    def about_s(number: int) -> float:
        cost = costs[number]
        share = (prompt.num_tokens - prompt.num_at_source) / (
            prompt.num_tokens - cost.num_cached_tokens
        )
        return cost.queue_s + (cost.own_s + cost.beside_s) * share

    numbers = _worth_a_pull(costs, prompt, about_s)
    found = [
        _with_prefix_pull(number, prompt.prefix_source, prompt, pool, costs) for number in numbers
    ]
    return [
        pulling
        for pulling, number in zip(found, numbers, strict=True)
        if pulling.total_s < costs[number].total_s
    ]


def _worth_a_pull(
    costs: Sequence[PrefillCost], prompt: Prompt, by_s: Callable[[int], float]
) -> list[int]:
    """The numbers of those workers for which a prefix pull is considered."""
    found = [n for n, cost in enumerate(costs) if cost.num_cached_tokens < prompt.num_at_source]
    return sorted(found, key=by_s)[:NUM_PREFIX_PULLERS]


def _with_prefix_pull(
    number: int,
    prefix_source: WorkerView,
    prompt: Prompt,
    pool: ComputingPool,
    costs: Sequence[PrefillCost],
) -> PrefillCost:
    return with_prefix_pull(
        costs[number],
        prefix_source,
        prompt.num_tokens,
        prompt.num_at_source,
        pool.num_behind[number],
        pool.spares_decodes,
        prompt.now,
    )


def remote_routes(
    goals: Sequence[DecodeCost], prompt: Prompt, costs: Sequence[PrefillCost]
) -> list[Candidate]:
    sources = sorted(costs, key=_total_s)[:NUM_PER_SIDE]
    best_goals = sorted(goals, key=_arrival_s)[:NUM_PER_SIDE]
    pairs = [
        _remote(prompt, source, goal)
        for source in sources
        for goal in best_goals
        if source.worker is not goal.worker
    ]
    return [pair for pair in pairs if pair.total_s < math.inf]


def _arrival_s(goal: DecodeCost) -> float:
    """Estimated arrival of the KV, to compare decode workers before its source is known."""
    record = goal.worker.record
    held_nbytes = goal.num_held_tokens // record.block_size * record.peer.block_nbytes
    return goal.place_s + goal.decode_s - held_nbytes * UNMEASURED_S_PER_BYTE


def local_route(
    prompt: Prompt, source: PrefillCost, goal: DecodeCost, pull_s: float = 0.0
) -> Candidate:
    """One engine does both; sequences that decode there end later while it computes queued
    prompts."""
    own_s = source.own_s + pull_s
    wait_s = source.queue_s + source.beside_s + goal.place_s
    total_s = own_s + wait_s + source.harm_s + goal.decode_s
    if goal.added is not None:
        total_s += _missed_s(prompt, goal.added, own_s + wait_s, 0.0)
    return Candidate(
        None,
        goal.worker.worker_id,
        own_s,
        wait_s,
        own_s + wait_s,
        total_s,
        source.num_cached_tokens,
        source.prefix_source,
        source.beside_s,
    )


def _missed_s(prompt: Prompt, added: AddedStream, first_token_s: float, gap_s: float) -> float:
    """The price of the SLOs that would be missed; and the time that a gap after the first token
    takes from prompts where the SLO is tight, because steps make up for it."""
    num_missed = added.num_others_missed + (first_token_s > prompt.slos.ttft_s)
    if not prompt.slos.has_tpot:
        return num_missed * prompt.slos.miss_s
    num_missed += added.is_missed(gap_s)
    lost_s = gap_s if added.is_tight else 0.0
    return lost_s + num_missed * prompt.slos.miss_s


def _remote(prompt: Prompt, source: PrefillCost, goal: DecodeCost) -> Candidate:
    """Remote prefill: the wait for a place in the decode batch overlaps with prefill and
    transfer."""
    num_moved = prompt.num_tokens - goal.num_held_tokens
    move_s = transfer_s(source.worker, goal.worker, num_moved if num_moved > 0 else 0)
    queue_s, place_s = source.queue_s, goal.place_s
    wait_s = queue_s + source.beside_s
    first_token_s = source.own_s + wait_s
    arrival_s = first_token_s + move_s
    if place_s > queue_s:
        queue_s = place_s
        wait_s = place_s if place_s > wait_s else wait_s
        arrival_s = place_s if place_s > arrival_s else arrival_s
    total_s = arrival_s + source.harm_s + goal.decode_s
    if goal.added is not None:
        # It waits for a step to end before its KV is pulled, and for another before it is part of
        # one.
        gap_s = move_s + NUM_STEPS_JOINING * goal.worker.backlog.under_way_s
        total_s += _missed_s(prompt, goal.added, first_token_s, gap_s)
    return Candidate(
        source.worker.worker_id,
        goal.worker.worker_id,
        source.own_s,
        wait_s,
        first_token_s,
        total_s,
        source.num_cached_tokens,
        source.prefix_source,
        wait_s - queue_s,
    )
