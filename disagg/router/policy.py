"""The routing policy: one function of request, fleet view, prefix index, time and rng.

A route is local (one worker computes the prompt and decodes) or remote (KV moves from the worker
that computes the prompt to the one that decodes).

Roles are preferences: prefill workers are preferred for prefill, decode workers for decode, and any
worker can do both. Where requests have a TPOT SLO, only costs decide: equal workers get the same
work in whatever pools they are. Remote prefill is chosen only if it is predicted to be cheaper than
prefill on the decode worker, transfer included. Without decode workers, prefill workers decode. A
worker that prefills for itself may first pull a cached prefix from another worker, if that
is cheaper than computing the prefix and cheaper than waiting for the worker that has it. With a
TPOT SLO, a worker that prefills for another worker may do so too: prompts and streams may then be
best on different workers, and the cached prefixes are where the streams are.

Not all pairs are compared: the cost of a pair is its prefill side, its decode side and the
transfer, so the few cheapest workers of each side are enough. Nor are all workers of a large fleet
(`router/worker_pools.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from disagg.errors import DeadlineExceeded
from disagg.messages import GenerateRequest
from disagg.router.admission import in_time, lateness_s
from disagg.router.costs import (
    AddedStream,
    DecodeCost,
    PrefillCost,
    decode_cost,
    prefill_cost,
    requests_behind,
    transfer_s,
    with_prefix_pull,
)
from disagg.router.fleet import FleetView
from disagg.router.prefix_index import PrefixIndex
from disagg.router.route import Candidate, Cause, Route
from disagg.router.worker_pools import NUM_RANDOM, Compared, Side, sample_workers
from disagg.router.worker_view import UNMEASURED_S_PER_BYTE, WorkerView

NUM_PER_SIDE = 4  # cheapest prefill and decode workers of which all pairs are compared
NUM_PREFIX_PULLERS = 2  # cheapest workers for which a prefix pull is considered
# Steps from the pull to the first decode step: the rest of a running step, and one during the pull.
NUM_STEPS_JOINING = 1.5
CAUSE_SHARE = 0.25  # share of a route's advantage from which the queue is named as its cause
NUM_CANDIDATES_KEPT = 6
TIE = 1e-3  # costs of one kind this close, as a fraction, are decided by the rng

_total_s = attrgetter("total_s")


class ChooseRoute(Protocol):
    """A routing policy for a request without a ticket: `choose_route`, or one of `baselines`."""

    def __call__(
        self,
        request: GenerateRequest,
        fleet: FleetView,
        index: PrefixIndex,
        now: float,
        rng: random.Random,
        exclude: Collection[str] = (),
        ttft_slo_s: float | None = math.inf,
    ) -> Route: ...


def choose_route(
    request: GenerateRequest,
    fleet: FleetView,
    index: PrefixIndex,
    now: float,
    rng: random.Random,
    exclude: Collection[str] = (),
    ttft_slo_s: float | None = math.inf,
    *,
    num_random: int = NUM_RANDOM,
) -> Route:
    """The cheapest route for `request` among those that are fast enough.

    Args:
        now: Unix time in seconds.
        exclude: workers that must not get the request (again).
        ttft_slo_s: latest first token; see `admission.in_time`. None: no limit, for a request that
            was admitted before.
        num_random: how many random workers of each pool are compared.

    Raises:
        Unavailable: no worker of the request's model takes requests.
        Overloaded: no route is predicted to meet the request's deadline or the SLO.
        DeadlineExceeded: the request's deadline has passed.
    """
    compared = _compared(request, fleet, index, now, rng, exclude, num_random)
    candidates = _candidates(request, fleet, compared, now)
    candidates.sort(key=_total_s)
    left_s = request.deadline_unix_s - now
    delay = fleet.delays.factor(request.model)
    if ttft_slo_s is not None and lateness_s(candidates[0], ttft_slo_s, left_s, delay) > 0.0:
        candidates = in_time(candidates, ttft_slo_s, left_s, delay)
    return _choose(candidates, rng)


def _compared(
    request: GenerateRequest,
    fleet: FleetView,
    index: PrefixIndex,
    now: float,
    rng: random.Random,
    exclude: Collection[str],
    num_random: int = NUM_RANDOM,
) -> Compared:
    check_deadline(request, now)
    return sample_workers(request, fleet.pools.get(request.model), index, rng, exclude, num_random)


def check_deadline(request: GenerateRequest, now: float) -> None:
    """Raises `DeadlineExceeded`."""
    if now >= request.deadline_unix_s:
        raise DeadlineExceeded("The request's deadline passed before a worker was chosen.")


def _candidates(
    request: GenerateRequest, fleet: FleetView, compared: Compared, now: float
) -> list[Candidate]:
    prefills, decodes = compared
    num_tokens = len(request.token_ids)
    usual = fleet.answers.usual(request.model)
    num_output = expected_output(request, usual)
    slos = _slos(request, decodes.workers[0].tpot_slo_s, num_output)
    prefix_source = _prefix_source(*compared.holder(), num_tokens)
    prompt = Prompt(num_tokens, *prefix_source, now, slos)
    goals = [
        decode_cost(worker, num_tokens, num_held, num_output, usual)
        for worker, num_held in zip(decodes.workers, decodes.num_held, strict=True)
    ]
    num_queued = fleet.queued.get(request.model, 0) / compared.num_workers
    # Decode workers hold the KV of what they decode in any case, so copies there cost nothing.
    has_once = prefills is None or compared.is_shared
    pool = ComputingPool.of(decodes, num_queued, has_once, spares_decodes=prefills is not None)
    costs = prefill_costs(pool, prompt)
    candidates = local_routes(goals, prompt, pool, costs)
    if prefills is None:
        return candidates
    if not compared.is_shared:
        pool = ComputingPool.of(prefills, num_queued, has_once=True, spares_decodes=True)
        costs = prefill_costs(pool, prompt)
    else:
        costs += prefix_pull_costs(prompt, pool, costs)
    return candidates + remote_routes(goals, prompt, costs)


def choose_decode(
    request: GenerateRequest,
    source_id: str,
    num_kv_tokens: int,
    fleet: FleetView,
    index: PrefixIndex,
    now: float,
    rng: random.Random,
    exclude: Collection[str] = (),
) -> Route:
    """The decode worker for a request whose first `num_kv_tokens` tokens have KV on `source_id`.

    Raises what `choose_route` raises.
    """
    decodes = _compared(request, fleet, index, now, rng, exclude).decodes
    source = fleet.workers.get(source_id)
    num_tokens = len(request.token_ids)
    usual = fleet.answers.usual(request.model)
    num_output = expected_output(request, usual)
    slos = _slos(request, decodes.workers[0].tpot_slo_s, num_output)._replace(ttft_s=math.inf)
    prompt = Prompt(num_tokens, None, 0, now, slos)
    candidates = []
    each = zip(decodes.workers, decodes.num_held, decodes.num_in_host, strict=True)
    for worker, num_held, num_in_host in each:
        goal = decode_cost(worker, num_tokens, num_held, num_output, usual)
        own = prefill_cost(worker, num_tokens, num_held, num_in_host=num_in_host, now=now)
        local = local_route(prompt, own, goal)
        if source is not None and num_kv_tokens > num_held:
            rest = prefill_cost(worker, num_tokens, num_kv_tokens, now=now)
            pull_s = transfer_s(source, worker, num_kv_tokens - num_held)
            pulled = local_route(prompt, rest, goal, pull_s)
            local = min(local, pulled, key=_total_s)
        candidates.append(local)
    candidates.sort(key=_total_s)
    return _choose(candidates, rng)


def _slos(request: GenerateRequest, usual_tpot_slo_s: float, num_output_tokens: int) -> Slos:
    """`usual_tpot_slo_s`: the model's. If it has none, roles are fixed, and the request's own SLO
    adds no cost."""
    tpot_slo_s = request.tpot_slo_s or usual_tpot_slo_s
    has_tpot_slo = math.inf not in (tpot_slo_s, usual_tpot_slo_s)
    ttft_slo_s = request.ttft_slo_s or math.inf
    first_s = ttft_slo_s if ttft_slo_s != math.inf else 0.0
    each_s = tpot_slo_s if has_tpot_slo else usual_tpot_slo_s
    return Slos(ttft_slo_s, has_tpot_slo, first_s + num_output_tokens * each_s)


def _prefix_source(
    holder: WorkerView | None, num_at_holder: int, num_tokens: int
) -> tuple[WorkerView | None, int]:
    """The worker with the longest cached prefix, and the prefix's usable length.

    The last token is always computed, since its logits are needed.
    """
    if holder is None:
        return None, 0
    block_size = holder.record.block_size
    most = (num_tokens - 1) // block_size * block_size
    num_at_source = min(num_at_holder, most)
    return (holder, num_at_source) if num_at_source else (None, 0)


def expected_output(request: GenerateRequest, usual: float) -> int:
    """How many tokens the request will probably generate; `usual` is the mean answer length."""
    num_generated = len(request.token_ids) - request.num_prompt_tokens
    return max(1, min(request.sampling.max_tokens - num_generated, round(usual)))


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
    """Workers that may compute a prompt. The fields are those of `worker_pools.Side`, and from
    `num_behind` on arguments of `costs.prefill_cost`."""

    workers: Sequence[WorkerView]
    num_held: Sequence[int]  # by worker, as the next two
    num_in_host: Sequence[int]
    num_behind: Sequence[float]
    num_held_once: tuple[int, int]
    spares_decodes: bool

    @classmethod
    def of(
        cls, side: Side, num_queued: float, has_once: bool, spares_decodes: bool
    ) -> ComputingPool:
        """The workers of one side.

        Args:
            num_queued: requests per worker that wait in the ingress.
            has_once: whether another copy of what one worker has cached has a cost here.
        """
        return cls(
            side.workers,
            side.num_held,
            side.num_in_host,
            requests_behind(side.workers, side.num_prompts, side.num_workers, num_queued),
            side.held_once if has_once else (0, 0),
            spares_decodes,
        )


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


def _choose(candidates: list[Candidate], rng: random.Random) -> Route:
    """`candidates`: cheapest first."""
    best = candidates[:NUM_CANDIDATES_KEPT]
    limit = best[0].total_s * (1.0 + TIE)
    is_local = best[0].prefill is None
    equals = [c for c in best if c.total_s <= limit and (c.prefill is None) == is_local]
    chosen = rng.choice(equals)
    # The best of the other kind: what else could be done.
    other = next((each for each in candidates if (each.prefill is None) != is_local), None)
    if other is not None and other not in best:
        best.append(other)
    return Route(
        chosen.prefill,
        chosen.decode,
        chosen.first_token_s,
        chosen.num_cached_tokens,
        tuple(best),
        _reason(chosen, other),
        chosen.prefix_source,
        _cause(chosen, other),
    )


def _reason(chosen: Candidate, other: Candidate | None) -> str:
    kind, other_kind = "local prefill", "remote prefill"
    if chosen.prefill is not None:
        kind, other_kind = other_kind, kind
    if other is None:
        return f"{kind}: {other_kind} is not available"
    return f"{kind}: {other.total_s - chosen.total_s:.4f} s cheaper than {other_kind}"


def _cause(chosen: Candidate, other: Candidate | None) -> Cause:
    """Why the chosen route is better than `other`, the best of the other kind.

    A long queue also delays the requests behind it: it is named as the cause if it makes up a
    quarter of the advantage or more.
    """
    if other is None:
        return "other_unavailable"
    compute_s, queue_s = other.own_s - chosen.own_s, other.wait_s - chosen.wait_s
    if max(compute_s, queue_s) < CAUSE_SHARE * (other.total_s - chosen.total_s):
        return "transfer_or_decode"
    return "compute" if compute_s >= queue_s else "queue"
