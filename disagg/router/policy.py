"""The routing policy: one function of request, fleet view, prefix index, time and rng.

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
(`shortlist`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from operator import attrgetter
from typing import Protocol

from disagg.messages import GenerateRequest
from disagg.router.admission import in_time, lateness_s
from disagg.router.candidates import (
    ComputingPool,
    Prompt,
    Slos,
    local_route,
    local_routes,
    prefill_costs,
    prefix_pull_costs,
    remote_routes,
)
from disagg.router.costs import decode_cost, prefill_cost, requests_behind, transfer_s
from disagg.router.fleet import FleetView
from disagg.router.prefix_index import PrefixIndex
from disagg.router.route import Candidate, Cause, Route
from disagg.router.shortlist import Shortlist, shortlist
from disagg.router.worker_view import WorkerView

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
    looks_at_all: bool = False,
) -> Route:
    """The cheapest route for `request` among those that are fast enough.

    Args:
        now: Unix time in seconds.
        exclude: workers that must not get the request (again).
        ttft_slo_s: latest first token; see `admission.in_time`. None: no limit, for a request that
            was admitted before.
        looks_at_all: at all workers of a large fleet too; see `shortlist`.

    Raises:
        Unavailable: no worker of the request's model takes requests.
        Overloaded: no route is predicted to meet the request's deadline or the SLO.
        DeadlineExceeded: the request's deadline has passed.
    """
    looked_at = shortlist(request, fleet, index, now, rng, exclude, looks_at_all)
    candidates = _candidates(request, fleet, looked_at, now)
    candidates.sort(key=_total_s)
    left_s = request.deadline_unix_s - now
    delay = fleet.delays.factor(request.model)
    if ttft_slo_s is not None and lateness_s(candidates[0], ttft_slo_s, left_s, delay) > 0.0:
        candidates = in_time(candidates, ttft_slo_s, left_s, delay)
    return _choose(candidates, rng)


def _candidates(
    request: GenerateRequest, fleet: FleetView, looked_at: Shortlist, now: float
) -> list[Candidate]:
    prefills, decodes, holder, num_at_holder = looked_at
    num_tokens = len(request.token_ids)
    usual = fleet.answers.usual(request.model)
    num_output = expected_output(request, usual)
    slos = _slos(request, decodes.workers[0].tpot_slo_s, num_output)
    prefix_source = _prefix_source(holder, num_at_holder, num_tokens)
    prompt = Prompt(num_tokens, *prefix_source, now, slos)
    goals = [
        decode_cost(worker, num_tokens, num_held, num_output, usual)
        for worker, num_held in zip(decodes.workers, decodes.num_held, strict=True)
    ]
    num_queued = fleet.queued.get(request.model, 0) / looked_at.num_workers
    # Decode workers hold the KV of what they decode in any case, so copies there cost nothing.
    has_once = prefills is None or looked_at.is_shared
    pool = ComputingPool(
        decodes.workers,
        decodes.num_held,
        decodes.num_in_host,
        requests_behind(decodes.workers, decodes.num_prompts, decodes.num_workers, num_queued),
        decodes.held_once if has_once else (0, 0),
        prefills is not None,
    )
    costs = prefill_costs(pool, prompt)
    candidates = local_routes(goals, prompt, pool, costs)
    if prefills is None:
        return candidates
    if not looked_at.is_shared:
        pool = ComputingPool(
            prefills.workers,
            prefills.num_held,
            prefills.num_in_host,
            requests_behind(
                prefills.workers, prefills.num_prompts, prefills.num_workers, num_queued
            ),
            prefills.held_once,
            True,
        )
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
    _, decodes, _, _ = shortlist(request, fleet, index, now, rng, exclude)
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
