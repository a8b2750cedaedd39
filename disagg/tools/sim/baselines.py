"""Baseline routing policies to compare `router.policy.choose_route` with.

Each uses one criterion, as many routers do: round robin, random, least loaded, or longest cached
prefix. Prefill goes to the prefill pool and decode to the decode pool; with one pool, a worker does
both. None of them refuses requests.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Collection
from functools import partial

from disagg.messages import GenerateRequest
from disagg.router.fleet import FleetView
from disagg.router.policy import ChooseRoute, check_deadline, choose_route
from disagg.router.prefix_index import PrefixIndex
from disagg.router.route import Candidate, Route
from disagg.router.worker_pools import Side, sample_workers
from disagg.router.worker_view import WorkerView

Pick = Callable[[Side, random.Random], int]  # the place of a worker in a side's lists
NO_LIMIT = sys.maxsize


def new_policy(name: str) -> ChooseRoute:
    """A policy of `POLICIES`, with a state of its own. Raises `KeyError`."""
    if name in (OURS, FIXED_ROLES):
        return choose_route
    if name == ALL_WORKERS:
        return partial(choose_route, num_random=NO_LIMIT)
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
        check_deadline(request, now)
        pools = fleet.pools.get(request.model)
        prefills, decodes = sample_workers(request, pools, index, rng, exclude, NO_LIMIT)
        side = prefills or decodes
        place = pick_prefill(side, rng)
        source = goal = side.workers[place]
        if prefills is not None:
            goal = decodes.workers[pick_decode(decodes, rng)]
        prefill = source.worker_id if prefills is not None else None
        num_cached = min(side.num_held[place], len(request.token_ids) - 1)
        only = Candidate(prefill, goal.worker_id, 0.0, 0.0, 0.0, 0.0, num_cached)
        return Route(prefill, goal.worker_id, 0.0, num_cached, (only,), name)

    return choose


def _load(worker: WorkerView) -> tuple[int, int]:
    """Sort key: queued prompt tokens, then running sequences."""
    return worker.num_uncomputed_tokens, worker.num_decoding + worker.num_waiting


def _turns() -> Pick:
    numbers = itertools.count()

    def pick(side: Side, rng: random.Random) -> int:
        names = [worker.worker_id for worker in side.workers]
        return names.index(sorted(names)[next(numbers) % len(names)])

    return pick


def _any(side: Side, rng: random.Random) -> int:
    return rng.randrange(len(side.workers))


def _least_loaded(side: Side, rng: random.Random) -> int:
    # The workers are in random order, so the first of equals is a random one.
    return min(range(len(side.workers)), key=lambda place: _load(side.workers[place]))


def _less_loaded_of_two(side: Side, rng: random.Random) -> int:
    return min((0, len(side.workers) - 1), key=lambda place: _load(side.workers[place]))


def _most_held(side: Side, rng: random.Random) -> int:
    return side.num_held.index(max(side.num_held))


OURS = "predicted-seconds"
FIXED_ROLES = "fixed-roles"  # ours, of requests that come without a TPOT SLO
ALL_WORKERS = "all-workers"  # ours, which looks at all workers of a large fleet too
_PICKS: dict[str, Callable[[], tuple[Pick, Pick]]] = {
    "round-robin": lambda: (_turns(), _turns()),
    "random": lambda: (_any, _any),
    "two-choices": lambda: (_less_loaded_of_two, _less_loaded_of_two),
    "least-loaded": lambda: (_least_loaded, _least_loaded),
    "prefix-only": lambda: (_most_held, _least_loaded),
}
POLICIES = (OURS, FIXED_ROLES, ALL_WORKERS, *_PICKS)
