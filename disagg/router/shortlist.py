"""Chooses the workers that a routing decision compares: all of a small fleet, some of a large one.

The time of a decision must not grow with the fleet. So in a large fleet it compares the workers
that have cached most of the prompt, those where a usual request is cheapest
(`router/worker_pools.py`), and a few random ones, so that every worker is compared now and then.
What depends on all workers (the queue of a pool, and how many workers have cached the prefix) is
known without looking at each.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from disagg.blocks import BlockHash
from disagg.errors import DeadlineExceeded, Unavailable
from disagg.messages import GenerateRequest
from disagg.router.fleet import FleetView
from disagg.router.prefix_index import PrefixIndex
from disagg.router.worker_pools import ModelPools, PooledWorker, WorkerPool
from disagg.router.worker_view import WorkerView, host_id

# Of each pool of a large fleet.
NUM_CHEAPEST = 6  # of each ranking
NUM_DEEPEST = 2  # that hold most of the prompt
NUM_HITS, NUM_HITS_SEEN = 3, 12  # the cheapest for it, of those that hold most
NUM_RANDOM = 2


class Side(NamedTuple):
    """Workers that may do one part of a request, prefill or decode.

    workers: the workers that the decision compares.
    num_held: leading tokens of the prompt that each of these has cached.
    num_in_host: the same for the host memory behind its cache.
    held_once: how many leading tokens at least two workers of the whole pool have cached, and how
        many at least one has.
    num_prompts, num_workers: of the whole pool.
    """

    workers: Sequence[WorkerView]
    num_held: Sequence[int]
    num_in_host: Sequence[int]
    held_once: tuple[int, int]
    num_prompts: int
    num_workers: int


class Shortlist(NamedTuple):
    """The workers that a decision compares.

    prefills: for remote prefill; None: there is no worker for it. It is `decodes` if every worker
        may do both.
    holder: the worker with the longest cached prefix; None: none has cached any.
    num_at_holder: leading tokens that it has cached.
    """

    prefills: Side | None
    decodes: Side
    holder: WorkerView | None
    num_at_holder: int

    @property
    def is_shared(self) -> bool:
        return self.prefills is self.decodes

    @property
    def num_workers(self) -> int:
        """The number of the model's workers."""
        if self.prefills is None or self.is_shared:
            return self.decodes.num_workers
        return self.prefills.num_workers + self.decodes.num_workers


def shortlist(
    request: GenerateRequest,
    fleet: FleetView,
    index: PrefixIndex,
    now: float,
    rng: random.Random,
    exclude: Collection[str] = (),
    looks_at_all: bool = False,
) -> Shortlist:
    """Choose the workers to compare.

    Args:
        now: Unix time in seconds.
        exclude: workers that must not get the request (again).
        looks_at_all: compare all workers, also in a large fleet.

    Raises:
        Unavailable: no worker of the request's model takes requests.
        DeadlineExceeded: the request's deadline has passed.
    """
    pools = fleet.pools.get(request.model)
    if pools is not None and pools.is_large and not looks_at_all:
        check_deadline(request, now)
        found = _of_some(request, fleet, index, pools, rng, exclude)
        if found is not None:
            return found
    return _of_all(request, fleet, index, now, rng, exclude)


def eligible(
    request: GenerateRequest, fleet: FleetView, now: float, exclude: Collection[str]
) -> tuple[list[WorkerView], list[WorkerView]]:
    """All workers for remote prefill, and all that may decode (and prefill for themselves)."""
    check_deadline(request, now)
    prefills: list[WorkerView] = []
    decodes: list[WorkerView] = []
    for worker in fleet.workers.values():
        record = worker.record
        if record.model != request.model or not worker.accepting or worker.worker_id in exclude:
            continue
        (decodes if record.role == "decode" else prefills).append(worker)
    if not prefills and not decodes:
        raise Unavailable(
            f"No worker of model {request.model!r} takes requests at the moment; try again shortly."
        )
    if (decodes or prefills)[0].tpot_slo_s != math.inf:  # one per model
        both = [*prefills, *decodes]
        return both, both
    return (prefills, decodes) if decodes else ([], prefills)


def check_deadline(request: GenerateRequest, now: float) -> None:
    """Raises `DeadlineExceeded`."""
    if now >= request.deadline_unix_s:
        raise DeadlineExceeded("The request's deadline passed before a worker was chosen.")


def held_tokens(
    index: PrefixIndex, request: GenerateRequest, workers: Sequence[WorkerView]
) -> Mapping[str, int]:
    """How many leading tokens of the request each worker of the model has cached.

    The host memory behind a worker's cache is listed under the worker's `host_id`.
    """
    if request.scores_prompt:
        return {}  # or none that helps
    block_size = workers[0].record.block_size  # one per model
    return {
        worker_id: num_blocks * block_size
        for worker_id, num_blocks in index.match(request.block_hashes).items()
    }


def _of_all(
    request: GenerateRequest,
    fleet: FleetView,
    index: PrefixIndex,
    now: float,
    rng: random.Random,
    exclude: Collection[str],
) -> Shortlist:
    prefills, decodes = eligible(request, fleet, now, exclude)
    is_shared = prefills is decodes
    decodes = _rotated(decodes, rng)
    held = held_tokens(index, request, decodes)
    side = other = _whole(decodes, held)
    workers = decodes
    if not is_shared:
        prefills = _rotated(prefills, rng)
        other = _whole(prefills, held)
        workers = [*prefills, *decodes]
    holder = max(workers, key=lambda worker: held.get(worker.worker_id, 0))
    num_at_holder = held.get(holder.worker_id, 0)
    return Shortlist(
        other if prefills else None, side, holder if num_at_holder else None, num_at_holder
    )


def _whole(workers: Sequence[WorkerView], held: Mapping[str, int]) -> Side:
    num_held = [held.get(worker.worker_id, 0) for worker in workers]
    num_in_host = [
        0 if worker.host is None else held.get(host_id(worker.worker_id), 0) for worker in workers
    ]
    num_prompts = sum([worker.backlog.num_prompts for worker in workers])
    return Side(workers, num_held, num_in_host, _held_once(num_held), num_prompts, len(workers))


def _rotated(workers: list[WorkerView], rng: random.Random) -> list[WorkerView]:
    """`workers` from a random position on, so that among equal ones not always the same are
    among the cheapest few."""
    start = int(rng.random() * len(workers))
    return workers[start:] + workers[:start]


def _held_once(num_held: Sequence[int]) -> tuple[int, int]:
    """How many leading tokens at least two workers have cached, and how many at least one."""
    second, most = sorted((0, 0, *num_held))[-2:]
    return second, most


def _of_some(
    request: GenerateRequest,
    fleet: FleetView,
    index: PrefixIndex,
    pools: ModelPools,
    rng: random.Random,
    exclude: Collection[str],
) -> Shortlist | None:
    """The shortlist of a large fleet; None: all workers found of some pool are excluded."""
    prefill, decode = pools.prefill, pools.decode
    names = () if request.scores_prompt else request.block_hashes
    some = _Some(index, names, len(request.token_ids), rng, exclude)
    prefills: Side | None
    if prefill is decode:
        decodes = prefills = some.of(decode)
    elif not len(decode):
        decodes, prefills = some.of(prefill), None
    else:
        decodes, prefills = some.of(decode), some.of(prefill) if len(prefill) else None
    if not decodes.workers or (prefills is not None and not prefills.workers):
        return None
    holder = some.holder.view if some.holder is not None else None
    return Shortlist(prefills, decodes, holder, some.num_at_holder)


class _Some:
    """Finds the workers that one decision looks at, pool by pool.

    Attributes:
        holder, num_at_holder: of these pools; see `Shortlist`.
    """

    def __init__(
        self,
        index: PrefixIndex,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        rng: random.Random,
        exclude: Collection[str],
    ) -> None:
        self._index = index
        self._found = index.find(block_hashes)
        self._num_tokens = num_tokens
        self._rng = rng
        self._exclude = exclude
        self.holder: PooledWorker | None = None
        self.num_at_holder = 0

    def of(self, pool: WorkerPool) -> Side:
        rng, depths, exclude = self._rng, self._found.depths, self._exclude
        block_size = pool.workers[0].view.record.block_size  # one per model
        hits = self._hits(pool, block_size)
        found = self._cheapest_hits(hits)
        found += islice(hits, NUM_DEEPEST)
        for ranking in pool.rankings_for(self._num_tokens):
            found += ranking.cheapest(NUM_CHEAPEST, rng)
        found += rng.choices(pool.workers, k=NUM_RANDOM)
        looked_at = dict.fromkeys(found)
        if exclude:
            looked_at = dict.fromkeys(each for each in found if each.name not in exclude)
        num_held = [depths[each.in_index] * block_size for each in looked_at]
        num_in_host = [
            depths[each.host_in_index] * block_size if each.host_in_index >= 0 else 0
            for each in looked_at
        ]
        others = [depths[w.in_index] * block_size for w in hits if w not in looked_at]
        workers = [each.view for each in looked_at]
        once = _held_once(num_held + others)
        return Side(workers, num_held, num_in_host, once, pool.num_prompts, len(pool))

    def _hits(self, pool: WorkerPool, block_size: int) -> Mapping[PooledWorker, int]:
        """Leading tokens of those workers with most of the prompt, in their cache or in their host
        memory; most come first."""
        hits: dict[PooledWorker, int] = {}
        depths, exclude, turn = self._found.depths, self._exclude, self._rng.random()
        for place in self._index.deepest(self._found, pool.index_bits, turn, NUM_HITS_SEEN):
            worker = pool.by_index_place[place]
            if worker in hits or worker.name in exclude:
                continue
            hits[worker] = depths[place] * block_size
            num_cached = depths[worker.in_index] * block_size
            if num_cached > self.num_at_holder:
                self.holder, self.num_at_holder = worker, num_cached
        return hits

    def _cheapest_hits(self, hits: Mapping[PooledWorker, int]) -> list[PooledWorker]:
        def prefill_s(worker: PooledWorker) -> float:
            return worker.any_s + worker.token_s * (self._num_tokens - hits[worker])

        return sorted(hits, key=prefill_s)[:NUM_HITS]
