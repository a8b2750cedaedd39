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

A worker without prompts reports no times of steps with prompts, so nobody would notice that they
are short again. Therefore a prompt goes now and then to a worker that seems slow and has computed
none for a while, if there is one (`fleet.Exploration`).

Not all pairs are compared: the cost of a pair is its prefill side, its decode side and the
transfer, so the few cheapest workers of each side are enough. Nor are all workers of a large fleet
(`router/worker_pools.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Protocol

import msgspec

from disagg.errors import DeadlineExceeded
from disagg.messages import GenerateRequest
from disagg.router.admission import admit, admits
from disagg.router.costs import (
    DecodeCost,
    PoolPressure,
    PrefillCost,
    Prompt,
    decode_cost,
    local_route,
    prefill_cost,
    remote_route,
    transfer_s,
    with_prefix_pull,
)
from disagg.router.fleet import FleetView
from disagg.router.prefix_index import PrefixIndex
from disagg.router.route import Candidate, Cause, Route
from disagg.router.worker_pools import NUM_RANDOM, ComparedWorkers, Side, sample_workers
from disagg.router.worker_view import UNMEASURED_S_PER_BYTE, WorkerView
from disagg.time_model import CHUNK_TOKENS, StepTimeModel

NUM_PER_SIDE = 4  # cheapest prefill and decode workers of which all pairs are compared
NUM_PREFIX_PULLERS = 2  # cheapest workers for which a prefix pull is considered
CAUSE_SHARE = 0.25  # share of a route's advantage from which the queue is named as its cause
NUM_CANDIDATES_KEPT = 6
TIE = 1e-3  # costs of one kind that are this close, as a fraction, are equal

# A worker that seems slow is explored: its prompts would take longer by this factor than on the
# fastest one, and it has reported no step with prompts for so long. One that is a little slower
# gets prompts in any case, when the others are busy.
SLOWER, SILENT_S = 1.1, 4.0

_total_s, _first_token_s = attrgetter("total_s"), attrgetter("first_token_s")


class ChooseRoute(Protocol):
    """A routing policy for a request without a ticket: `choose_route`, or one of
    `tools/sim/baselines.py`."""

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
        ttft_slo_s: latest first token; see `admission.admit`. None: no limit, for a request that
            was admitted before.
        num_random: how many random workers of each pool are compared.

    Raises:
        Unavailable: no worker of the request's model takes requests.
        Overloaded: no route is predicted to meet the request's deadline or the SLO.
        DeadlineExceeded: the request's deadline has passed.
    """
    compared = _compared(request, fleet, index, now, rng, exclude, num_random)
    if fleet.exploration.is_due():
        slow = _silent_worker(compared, now)
        candidates = [] if slow is None else _candidates(request, fleet, compared, now, slow)
        if candidates:
            route = _choose(candidates, compared)
            return msgspec.structs.replace(route, reason="to see whether the worker is still slow")
    candidates = _candidates(request, fleet, compared, now)
    if ttft_slo_s is not None:
        learned, cheapest = fleet.first_tokens[request.model], min(candidates, key=_total_s)
        learned.arrive(cheapest.own_s)
        left_s = request.deadline_unix_s - now
        if not admits(cheapest, ttft_slo_s, left_s, learned):
            candidates = admit(candidates, ttft_slo_s, left_s, learned)
    return _choose(candidates, compared)


def _compared(
    request: GenerateRequest,
    fleet: FleetView,
    index: PrefixIndex,
    now: float,
    rng: random.Random,
    exclude: Collection[str],
    num_random: int = NUM_RANDOM,
) -> ComparedWorkers:
    check_deadline(request, now)
    return sample_workers(request, fleet.pools.get(request.model), index, rng, exclude, num_random)


def check_deadline(request: GenerateRequest, now: float) -> None:
    """Raises `DeadlineExceeded`."""
    if now >= request.deadline_unix_s:
        raise DeadlineExceeded("The request's deadline passed before a worker was chosen.")


def _silent_worker(compared: ComparedWorkers, now: float) -> WorkerView | None:
    """The worker that has computed no prompt for longest, of those that seem slow.

    One whose streams a prompt would delay is left alone, and one that has prompts: it will report
    these.
    """
    prefills, decodes = compared
    workers = [*decodes.workers, *(prefills.workers if prefills is not None else ())]
    fastest = min([worker.times for worker in workers], key=_chunk_s)

    def seems_slow(worker: WorkerView) -> bool:
        if worker.num_uncomputed_tokens:
            return False
        if worker.num_decoding and worker.tpot_slo_s == math.inf:
            return False
        factor = _chunk_s(worker.times) / _chunk_s(fastest)
        if now - worker.stepped_s < SILENT_S and fastest.per_step_s > 0.0:
            # Its decode steps show what its GPU is, and only its prompts may be wrong.
            factor /= max(1.0, worker.times.per_step_s / fastest.per_step_s)
        return factor > SLOWER

    silent = [each for each in workers if now - each.prompts_s >= SILENT_S and seems_slow(each)]
    return min(silent, key=attrgetter("prompts_s"), default=None)


def _chunk_s(times: StepTimeModel) -> float:
    return times.prefill_s(CHUNK_TOKENS)


def _candidates(
    request: GenerateRequest,
    fleet: FleetView,
    compared: ComparedWorkers,
    now: float,
    only: WorkerView | None = None,
) -> list[Candidate]:
    """All routes that are compared, or those where one worker computes the prompt.

    Args:
        only: that worker.
    """
    prefills, decodes = compared
    prompt = _prompt(request, fleet, decodes.workers[0].tpot_slo_s, now, *compared.holder())
    num_queued = fleet.queued.get(request.model, 0) / compared.num_workers
    pool = PoolPressure.of(decodes, num_queued, spares_decodes=prefills is not None)
    costs = prefill_costs(decodes, prompt, pool)
    goals = _goals(decodes, prompt, min(map(_first_token_s, costs)))
    if only is not None:
        pairs = zip(costs, goals, strict=True)
        local = [local_route(prompt, *pair) for pair in pairs if pair[0].worker is only]
        if local:
            return local
    pulls = prefix_pulls(prompt, costs, pool)
    candidates = [local_route(prompt, *pair) for pair in zip(costs, goals, strict=True)]
    candidates += [local_route(prompt, pull, goals[number]) for number, pull in pulls]
    if prefills is None:
        return candidates
    if compared.is_shared:
        costs += [pull for _, pull in pulls]
    else:
        costs = prefill_costs(prefills, prompt, PoolPressure.of(prefills, num_queued))
    if only is not None:
        return remote_routes(goals, prompt, [each for each in costs if each.worker is only])
    return candidates + remote_routes(goals, prompt, costs)


def _goals(decodes: Side, prompt: Prompt, first_token_s: float = 0.0) -> list[DecodeCost]:
    num_tokens, num_output, usual = prompt[:3]
    return [
        decode_cost(worker, num_tokens, num_held, num_output, usual, first_token_s)
        for worker, num_held in zip(decodes.workers, decodes.num_held, strict=True)
    ]


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
    compared = _compared(request, fleet, index, now, rng, exclude)
    decodes = compared.decodes
    source = fleet.workers.get(source_id)
    prompt = _prompt(request, fleet, decodes.workers[0].tpot_slo_s, now)
    prompt = prompt._replace(ttft_slo_s=math.inf)  # its first token has come
    candidates = []
    for goal, num_in_host in zip(_goals(decodes, prompt), decodes.num_in_host, strict=True):
        worker, num_held = goal.worker, goal.num_held_tokens
        own = prefill_cost(worker, prompt, num_held, num_in_host=num_in_host)
        local = local_route(prompt, own, goal)
        if source is not None and num_kv_tokens > num_held:
            rest = prefill_cost(worker, prompt, num_kv_tokens)
            pull_s = transfer_s(source, worker, num_kv_tokens - num_held)
            pulled = local_route(prompt, rest, goal, pull_s)
            local = min(local, pulled, key=_total_s)
        candidates.append(local)
    return _choose(candidates, compared)


def _prompt(
    request: GenerateRequest,
    fleet: FleetView,
    usual_tpot_slo_s: float,
    now: float,
    holder: WorkerView | None = None,
    num_at_holder: int = 0,
) -> Prompt:
    """The request as costs see it.

    Args:
        usual_tpot_slo_s: the model's. If it has none, roles are fixed, and the request's own SLOs
            add no cost.
        holder: the worker with the longest cached prefix.
        num_at_holder: leading tokens that it has cached.
    """
    num_tokens, usual = len(request.token_ids), fleet.answers.usual(request.model)
    num_output = expected_output(request, usual)
    num_at_source = 0
    if holder is not None:  # the last token is always computed, since its logits are needed
        block_size = holder.record.block_size
        num_at_source = min(num_at_holder, (num_tokens - 1) // block_size * block_size)
    tpot_slo_s, ttft_slo_s = request.tpot_slo_s or usual_tpot_slo_s, request.ttft_slo_s or math.inf
    has_tpot_slo = math.inf not in (tpot_slo_s, usual_tpot_slo_s)
    miss_s = 0.0
    if usual_tpot_slo_s != math.inf:
        miss_s = num_output * (tpot_slo_s if has_tpot_slo else usual_tpot_slo_s)
        miss_s += ttft_slo_s if ttft_slo_s != math.inf else 0.0
    return Prompt(
        num_tokens,
        num_output,
        usual,
        now,
        holder if num_at_source else None,
        num_at_source,
        ttft_slo_s,
        has_tpot_slo,
        miss_s,
        "" if request.adapter is None else request.adapter.digest,
    )


def expected_output(request: GenerateRequest, usual: float) -> int:
    """How many tokens the request will probably generate; `usual` is the mean answer length."""
    num_generated = len(request.token_ids) - request.num_prompt_tokens
    return max(1, min(request.sampling.max_tokens - num_generated, round(usual)))


def prefill_costs(side: Side, prompt: Prompt, pool: PoolPressure) -> list[PrefillCost]:
    each = zip(side.workers, side.num_held, side.num_in_host, strict=True)
    return [
        prefill_cost(worker, prompt, num_held, pool, num_in_host)
        for worker, num_held, num_in_host in each
    ]


def prefix_pulls(
    prompt: Prompt, costs: Sequence[PrefillCost], pool: PoolPressure
) -> list[tuple[int, PrefillCost]]:
    """The costs with a prefix pull of the workers that would then compute the rest of the prompt
    soonest, and the numbers of these workers.

    Only of workers where a pull is cheaper than none. `costs`: without one.
    """
    if prompt.prefix_source is None:
        return []

    def about_s(number: int) -> float:
        cost = costs[number]
        num_left = prompt.num_tokens - prompt.num_at_source
        share = num_left / (prompt.num_tokens - cost.num_cached_tokens)
        return cost.queue_s + (cost.own_s + cost.beside_s) * share

    numbers = [n for n, each in enumerate(costs) if each.num_cached_tokens < prompt.num_at_source]
    soonest = sorted(numbers, key=about_s)[:NUM_PREFIX_PULLERS]
    pulls = [(n, with_prefix_pull(costs[n], prompt, pool)) for n in soonest]
    return [(n, pull) for n, pull in pulls if pull.total_s < costs[n].total_s]


def remote_routes(
    goals: Sequence[DecodeCost], prompt: Prompt, costs: Sequence[PrefillCost]
) -> list[Candidate]:
    sources = sorted(costs, key=_total_s)[:NUM_PER_SIDE]
    best_goals = sorted(goals, key=_goal_s)[:NUM_PER_SIDE]
    pairs = [
        remote_route(prompt, source, goal)
        for source in sources
        for goal in best_goals
        if source.worker is not goal.worker
    ]
    return [pair for pair in pairs if pair.total_s < math.inf]


def _goal_s(goal: DecodeCost) -> float:
    """The cost of decoding there, less the time to move what it has cached: to compare decode
    workers before the source of the KV is known."""
    record = goal.worker.record
    held_nbytes = record.kv_nbytes(goal.num_held_tokens)
    return goal.place_s + goal.decode_s + goal.delay_s - held_nbytes * UNMEASURED_S_PER_BYTE


def _choose(candidates: Sequence[Candidate], compared: ComparedWorkers) -> Route:
    ranked = sorted(candidates, key=_total_s)
    best, cheapest = ranked[:NUM_CANDIDATES_KEPT], ranked[0]
    limit, is_local = cheapest.total_s * (1.0 + TIE), cheapest.prefill is None
    equals = [c for c in ranked if c.total_s <= limit and (c.prefill is None) == is_local]
    chosen = cheapest if len(equals) == 1 else _drawn_first(equals, compared)
    # The best of the other kind: what else could be done.
    other = next((each for each in ranked if (each.prefill is None) != is_local), None)
    for each in (chosen, other):
        if each is not None and each not in best:
            best.append(each)
            best.sort(key=_total_s)
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


def _drawn_first(equals: Sequence[Candidate], compared: ComparedWorkers) -> Candidate:
    """Workers were drawn in an order of chance, so neither their ids nor rounding decide."""
    sides = [side for side in compared if side is not None]
    drawn = [worker.worker_id for side in sides for worker in side.workers]
    places = {worker_id: place for place, worker_id in enumerate(drawn)}

    def place(each: Candidate) -> tuple[int, int, bool]:
        prefill = -1 if each.prefill is None else places[each.prefill]
        return places[each.decode], prefill, each.prefix_source is not None

    return min(equals, key=place)


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
