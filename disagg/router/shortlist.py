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

from disagg.errors import DeadlineExceeded, Unavailable
from disagg.messages import GenerateRequest
from disagg.router.fleet import FleetView
from disagg.router.prefix_index import PrefixIndex, PrefixMatch
from disagg.router.worker_pools import ModelPools, WorkerPool
from disagg.router.worker_view import WorkerView, host_id, worker_of

# Of each pool of a large fleet.
NUM_CHEAPEST = 6  # of each ranking
NUM_DEEPEST = 2  # that hold most of the prompt
NUM_HITS, NUM_HITS_SEEN = 3, 12  # the cheapest for it, of those that hold most
NUM_RANDOM = 2


class Side(NamedTuple):
    """Workers that may do one part of a request, prefill or decode.

    workers: the workers that the decision compares.
    num_held: leading tokens of the prompt that each of these has cached.
    held_once: how many leading tokens at least two of the whole pool have cached, and at least one.
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
        """Of the model."""
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
    return Shortlist(other if prefills else None, side, held, _holder(workers, held))


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


def _holder(workers: Iterable[WorkerView], held: Mapping[str, int]) -> WorkerView | None:
    most, holder = 0, None
    for worker in workers:
        num_held = held.get(worker.worker_id, 0)
        if num_held > most:
            most, holder = num_held, worker
    return holder


def _of_some(
    request: GenerateRequest,
    fleet: FleetView,
    index: PrefixIndex,
    pools: ModelPools,
    rng: random.Random,
    exclude: Collection[str],
) -> Shortlist | None:
    """The shortlist of a large fleet; None: all workers found of some pool are excluded."""
    workers, prefill, decode = fleet.workers, pools.prefill, pools.decode
    block_size = workers[(decode.names or prefill.names)[0]].record.block_size  # one per model
    found = index.find(() if request.scores_prompt else request.block_hashes)
    some = _Some(workers, found, len(request.token_ids), block_size, rng, exclude)
    prefills: Side | None
    if prefill is decode:
        decodes = prefills = some.of(decode)
    elif not len(decode):
        decodes, prefills = some.of(prefill), None
    else:
        decodes, prefills = some.of(decode), some.of(prefill) if len(prefill) else None
    if not decodes.workers or (prefills is not None and not prefills.workers):
        return None
    return Shortlist(prefills, decodes, some.held, _holder(some.holders, some.held))


class _Some:
    """Finds the workers that one decision looks at, pool by pool.

    Attributes:
        held: leading tokens by name in the index, of the workers with most of the prompt and of
            all compared ones.
        holders: workers of these pools with most of the prompt, in their cache or in host memory.
    """

    def __init__(
        self,
        workers: Mapping[str, WorkerView],
        found: PrefixMatch,
        num_tokens: int,
        block_size: int,
        rng: random.Random,
        exclude: Collection[str],
    ) -> None:
        self._workers = workers
        self._found = found
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._rng = rng
        self._exclude = exclude
        self.held: dict[str, int] = {}
        self.holders: list[WorkerView] = []

    def of(self, pool: WorkerPool) -> Side:
        workers, rng, held = self._workers, self._rng, self.held
        hits = self._hits(pool)
        names = self._cheapest_hits(pool, hits)
        names += islice(hits, NUM_DEEPEST)
        for ranking in pool.rankings_for(self._num_tokens):
            names += ranking.cheapest(NUM_CHEAPEST, rng)
        names += rng.choices(pool.names, k=NUM_RANDOM)
        looked_at = dict.fromkeys(names)
        for name in self._exclude:
            looked_at.pop(name, None)
        num_held = [self._held_by(workers[name]) for name in looked_at]
        others = [held[name] for name in hits if name in held and name not in looked_at]
        once = _held_once([*num_held, *others])
        return Side(
            [workers[name] for name in looked_at], num_held, once, pool.num_prompts, len(pool)
        )

    def _hits(self, pool: WorkerPool) -> Mapping[str, int]:
        """Leading tokens by worker, of those with most of the prompt; most come first."""
        hits: dict[str, int] = {}
        longest = self._found.longest(NUM_HITS_SEEN, pool.index_bits, self._rng.random())
        for name, num_blocks in longest:
            self.held[name] = num_blocks * self._block_size
            hits.setdefault(worker_of(name), self.held[name])
        for name in self._exclude:
            hits.pop(name, None)
        self.holders += [self._workers[name] for name in hits]
        return hits

    def _cheapest_hits(self, pool: WorkerPool, hits: Mapping[str, int]) -> list[str]:
        def prefill_s(name: str) -> float:
            any_s, token_s = pool.prefill_estimates[name]
            return any_s + token_s * (self._num_tokens - hits[name])

        return sorted(hits, key=prefill_s)[:NUM_HITS]

    def _held_by(self, worker: WorkerView) -> int:
        """Leading tokens in a worker's cache. Also looks up those in its host memory."""
        if worker.host is not None:
            self._look_up(host_id(worker.worker_id))
        return self._look_up(worker.worker_id)

    def _look_up(self, name: str) -> int:
        num_tokens = self.held.get(name)
        if num_tokens is None:
            num_tokens = self.held[name] = self._found.num_blocks(name) * self._block_size
        return num_tokens
