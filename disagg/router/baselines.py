"""Baseline routing policies to compare `policy.choose_route` with, in the simulator.

Each uses one criterion, as many routers do: round robin, random, least loaded, or longest cached
prefix. Prefill goes to the prefill pool and decode to the decode pool; with one pool, a worker does
both. None of them refuses requests.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from disagg.messages import GenerateRequest
from disagg.router.fleet import FleetView
from disagg.router.policy import ChooseRoute, choose_route
from disagg.router.prefix_index import PrefixIndex
from disagg.router.route import Candidate, Route
from disagg.router.shortlist import eligible, held_tokens
from disagg.router.worker_view import WorkerView

# One of some workers of one pool, which are never none. `held`: leading tokens by worker.
Pick = Callable[[Sequence[WorkerView], Mapping[str, int], random.Random], WorkerView]


def new_policy(name: str) -> ChooseRoute:
    """A policy of `POLICIES`, with a state of its own. Raises `KeyError`."""
    if name in (OURS, FIXED_ROLES):
        return choose_route
    if name == ALL_WORKERS:
        return partial(choose_route, looks_at_all=True)
    return _picking(name, *_PICKS[name]())


def _picking(name: str, pick_prefill: Pick, pick_decode: Pick) -> ChooseRoute:
    def choose(
        request: GenerateRequest,
        fleet: FleetView,
        index: PrefixIndex,
        now: float,
        rng: random.Random,
        exclude: Collection[str] = (),
        ttft_slo_s: float | None = math.inf,
    ) -> Route:
        prefills, decodes = eligible(request, fleet, now, exclude)
        held = held_tokens(index, request, decodes)
        source = pick_prefill(prefills or decodes, held, rng)
        goal = pick_decode(decodes, held, rng) if prefills else source
        prefill = source.worker_id if prefills else None
        num_cached = min(held.get(source.worker_id, 0), len(request.token_ids) - 1)
        only = Candidate(prefill, goal.worker_id, 0.0, 0.0, 0.0, 0.0, num_cached)
        return Route(prefill, goal.worker_id, 0.0, num_cached, (only,), name)

    return choose


def _load(worker: WorkerView) -> tuple[int, int]:
    """Sort key: queued prompt tokens, then running sequences."""
    return worker.num_uncomputed_tokens, worker.num_decoding + worker.num_waiting


def _turns() -> Pick:
    numbers = itertools.count()
    return lambda workers, held, rng: workers[next(numbers) % len(workers)]


def _any(workers: Sequence[WorkerView], held: Mapping[str, int], rng: random.Random) -> WorkerView:
    return rng.choice(workers)


def _least_loaded(
    workers: Sequence[WorkerView], held: Mapping[str, int], rng: random.Random
) -> WorkerView:
    least = min(map(_load, workers))
    return rng.choice([worker for worker in workers if _load(worker) == least])


def _less_loaded_of_two(
    workers: Sequence[WorkerView], held: Mapping[str, int], rng: random.Random
) -> WorkerView:
    return _least_loaded(rng.sample(workers, min(2, len(workers))), held, rng)


def _most_held(
    workers: Sequence[WorkerView], held: Mapping[str, int], rng: random.Random
) -> WorkerView:
    most = max(held.get(worker.worker_id, 0) for worker in workers)
    return rng.choice([w for w in workers if held.get(w.worker_id, 0) == most])


OURS = "predicted-seconds"
FIXED_ROLES = "fixed-roles"  # ours, of requests that come without SLOs
ALL_WORKERS = "all-workers"  # ours, which looks at all workers of a large fleet too
_PICKS: dict[str, Callable[[], tuple[Pick, Pick]]] = {
    "round-robin": lambda: (_turns(), _turns()),
    "random": lambda: (_any, _any),
    "two-choices": lambda: (_less_loaded_of_two, _less_loaded_of_two),
    "least-loaded": lambda: (_least_loaded, _least_loaded),
    "prefix-only": lambda: (_most_held, _least_loaded),
}
POLICIES = (OURS, FIXED_ROLES, ALL_WORKERS, *_PICKS)
