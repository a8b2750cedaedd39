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
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    held_once: how many leading tokens at least two workers of the whole pool have cached, and how
        many at least one has.
    num_prompts, num_workers: of the whole pool.
    """

    workers: Sequence[WorkerView]
    num_held: Sequence[int]
    held_once: tuple[int, int]
    num_prompts: int
    num_workers: int


class Shortlist(NamedTuple):
    """The workers that a decision compares.

    prefills: for remote prefill; None: there is no worker for it. It is `decodes` if every worker
        may do both.
    held: leading tokens by name in the index, of the workers above and of some others.
    holder: the worker with the longest cached prefix; None: none has cached any.
    """

    prefills: Side | None
    decodes: Side
    held: Mapping[str, int]
    holder: WorkerView | None

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
    holder = _holder(fleet, (each.worker_id for each in workers), held)
    return Shortlist(other if prefills else None, side, held, holder)


def _whole(workers: Sequence[WorkerView], held: Mapping[str, int]) -> Side:
    num_held = [held.get(worker.worker_id, 0) for worker in workers]
    num_prompts = sum([worker.backlog.num_prompts for worker in workers])
    return Side(workers, num_held, _held_once(num_held), num_prompts, len(workers))


def _rotated(workers: list[WorkerView], rng: random.Random) -> list[WorkerView]:
    """`workers` from a random position on, so that among equal ones not always the same are
    among the cheapest few."""
    start = int(rng.random() * len(workers))
    return workers[start:] + workers[:start]


def _held_once(num_held: Iterable[int]) -> tuple[int, int]:
    """How many leading tokens at least two workers have cached, and how many at least one."""
    *_, second, most = sorted([0, 0, *num_held])
    return second, most


def _holder(fleet: FleetView, names: Iterable[str], held: Mapping[str, int]) -> WorkerView | None:
    """The worker with the longest cached prefix."""
    longest = max(names, key=lambda name: held.get(name, 0), default="")
    return fleet.workers[longest] if held.get(longest) else None


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
    block_size = (decode.workers or prefill.workers)[0].view.record.block_size  # one per model
    names = () if request.scores_prompt else request.block_hashes
    some = _Some(index, names, len(request.token_ids), block_size, rng, exclude)
    prefills: Side | None
    if prefill is decode:
        decodes = prefills = some.of(decode)
    elif not len(decode):
        decodes, prefills = some.of(prefill), None
    else:
        decodes, prefills = some.of(decode), some.of(prefill) if len(prefill) else None
    if not decodes.workers or (prefills is not None and not prefills.workers):
        return None
    return Shortlist(prefills, decodes, some.held, _holder(fleet, some.holders, some.held))


class _Some:
    """Finds the workers that one decision looks at, pool by pool.

    Attributes:
        held: leading tokens by name in the index, of the workers with most of the prompt and of
                all compared ones.
        holders: workers of these pools with most of the prompt, in their cache or in host memory.
    """

    def __init__(
        self,
        index: PrefixIndex,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        block_size: int,
        rng: random.Random,
        exclude: Collection[str],
    ) -> None:
        self._index = index
        self._found = index.find(block_hashes)
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._rng = rng
        self._exclude = exclude
        self.held: dict[str, int] = {}
        self.holders: list[str] = []

    def of(self, pool: WorkerPool) -> Side:
        rng, held, exclude = self._rng, self.held, self._exclude
        hits = self._hits(pool)
        found = self._cheapest_hits(hits)
        found += islice(hits, NUM_DEEPEST)
        for ranking in pool.rankings_for(self._num_tokens):
            found += ranking.cheapest(NUM_CHEAPEST, rng)
        found += rng.choices(pool.workers, k=NUM_RANDOM)
        looked_at = dict.fromkeys(found)
        if exclude:
            looked_at = dict.fromkeys(each for each in found if each.name not in exclude)
        num_held = [self._held_by(each) for each in looked_at]
        others = [held[w.name] for w in hits if w not in looked_at and w.name in held]
        once = _held_once([*num_held, *others])
        workers = [each.view for each in looked_at]
        return Side(workers, num_held, once, pool.num_prompts, len(pool))

    def _hits(self, pool: WorkerPool) -> Mapping[PooledWorker, int]:
        """Leading tokens of those workers with most of the prompt, in their cache or in their host
        memory; most come first."""
        hits: dict[PooledWorker, int] = {}
        depths, turn = self._found.depths, self._rng.random()
        for place in self._index.deepest(self._found, pool.index_bits, turn, NUM_HITS_SEEN):
            worker, num_tokens = pool.by_index_place[place], depths[place] * self._block_size
            is_cache = place == worker.index_places[0]
            self.held[worker.name if is_cache else host_id(worker.name)] = num_tokens
            if worker.name not in self._exclude:
                hits.setdefault(worker, num_tokens)
        self.holders += [each.name for each in hits]
        return hits

    def _cheapest_hits(self, hits: Mapping[PooledWorker, int]) -> list[PooledWorker]:
        def prefill_s(worker: PooledWorker) -> float:
            return worker.any_s + worker.token_s * (self._num_tokens - hits[worker])

        return sorted(hits, key=prefill_s)[:NUM_HITS]

    def _held_by(self, worker: PooledWorker) -> int:
        """Leading tokens in a worker's cache. Also looks up those in its host memory."""
        depths, (place, *in_host) = self._found.depths, worker.index_places
        for each in in_host:
            self.held[host_id(worker.name)] = depths[each] * self._block_size
        num_tokens = self.held[worker.name] = depths[place] * self._block_size
        return num_tokens
