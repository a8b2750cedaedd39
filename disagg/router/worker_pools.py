"""The workers of each model that take requests, ranked by cost and updated by reports.

A decision in a large fleet compares only some workers (`router/shortlist.py`). For this, workers
are ranked by the cost of a usual request there; each report updates the rank. The queues of a whole
pool, on which costs also depend, are kept as a sum.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from typing import Generic, Literal, TypeAlias, TypeVar

from disagg.router.costs import decode_cost, prefill_estimate
from disagg.router.output_length import USUAL_OUTPUT_TOKENS
from disagg.router.prefix_index import PrefixIndex
from disagg.router.worker_view import WorkerView, host_id
from disagg.time_model import CHUNK_TOKENS

NUM_ALL_LOOKED_AT = 32  # workers of a model up to which decisions compare all of them
NUM_SOONEST = 6  # workers of a large pool that predictions of a wait look at
BUCKETS_PER_OCTAVE = 8
LEAST_S, MOST_S = 2.0**-20, 2.0**20


Ranked = TypeVar("Ranked", bound=Hashable)


class Ranking(Generic[Ranked]):
    """Items by a cost in seconds that changes often, cheapest first.

    Exact to an eighth of an octave, so a report with small changes moves nothing.

    Attributes:
        bucket_of: the bucket of costs in which each item is; cheaper ones have smaller numbers.
    """

    def __init__(self) -> None:
        num_buckets = _bucket(MOST_S) + 1
        self._buckets: list[list[Ranked]] = [[] for _ in range(num_buckets)]
        self._filled = 0  # a bit for each bucket that is not empty
        self.bucket_of: dict[Ranked, int] = {}
        self._place_of: dict[Ranked, int] = {}  # in its bucket

    def put(self, item: Ranked, cost_s: float) -> None:
        number = _bucket(cost_s)
        before = self.bucket_of.get(item)
        if number == before:
            return
        if before is not None:
            self.drop(item)
        bucket = self._buckets[number]
        self.bucket_of[item] = number
        self._place_of[item] = len(bucket)
        bucket.append(item)
        self._filled |= 1 << number

    def drop(self, item: Ranked) -> None:
        number = self.bucket_of.pop(item)
        bucket, place = self._buckets[number], self._place_of.pop(item)
        last = bucket.pop()
        if last != item:
            bucket[place] = last
            self._place_of[last] = place
        if not bucket:
            self._filled ^= 1 << number

    def cheapest(self, number: int, rng: random.Random | None = None) -> list[Ranked]:
        """Up to `number` of the cheapest items; among equal costs random ones, or the first."""
        found: list[Ranked] = []
        filled = self._filled
        while filled and len(found) < number:
            lowest = filled & -filled
            filled ^= lowest
            bucket = self._buckets[lowest.bit_length() - 1]
            room = number - len(found)
            if len(bucket) <= room:
                found += bucket
            else:
                start = int(rng.random() * len(bucket)) if rng is not None else 0
                found += bucket[start : start + room]
                found += bucket[: number - len(found)]
        return found


def _bucket(cost_s: float) -> int:
    octaves = math.log2(cost_s + LEAST_S) if cost_s < MOST_S else 20.0
    return int(BUCKETS_PER_OCTAVE * (octaves + 20.0))


# What workers are ranked by the cost of: prefill of a short or of a long prompt, decode, or all of
# a usual request. A worker beside whose streams few prompt tokens fit into a step is slow only for
# long prompts.
Part: TypeAlias = Literal["short", "long", "decode", "both"]
SHORT_TOKENS, LONG_TOKENS = 512, 4096
BETWEEN_TOKENS = math.sqrt(SHORT_TOKENS * LONG_TOKENS)


class PooledWorker:
    """A worker, with what a decision reads of many workers: one object, since in a large fleet
    reports displace all of them from the processor's caches.

    Attributes:
        view: its latest.
        in_index, host_in_index: places in the prefix index, of its cache and of its host memory;
            -1: it has none.
        any_s, token_s: in a ranked pool, `costs.prefill_estimate`.
    """

    __slots__ = ("any_s", "host_in_index", "in_index", "name", "place", "token_s", "view")

    def __init__(self, view: WorkerView, place: int) -> None:
        self.name = view.worker_id
        self.view = view
        self.place = place  # in `WorkerPool.workers`
        self.in_index = self.host_in_index = -1
        self.any_s = self.token_s = 0.0


class WorkerPool:
    """Workers that a decision compares with each other.

    Attributes:
        workers: in no order.
        num_prompts: prompts that wait on them or are being computed.
        by_index_place: by place in the prefix index.
        index_bits: a mask of these places.
        rankings: in a ranked pool, its workers by the cost of each part that decisions about this
            pool need, where nothing is cached.
    """

    def __init__(self, *parts: Part) -> None:
        self.workers: list[PooledWorker] = []
        self.num_prompts = 0
        self.by_index_place: dict[int, PooledWorker] = {}
        self.index_bits = 0
        self._by_name: dict[str, PooledWorker] = {}
        self.rankings: dict[Part, Ranking[PooledWorker]] = {}
        self.rank_by(*parts)

    def rank_by(self, *parts: Part) -> None:
        """Begin with empty rankings by these parts."""
        self.rankings = {part: Ranking() for part in parts}

    def __len__(self) -> int:
        return len(self.workers)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def put(self, view: WorkerView, index: PrefixIndex) -> PooledWorker:
        """Store a worker's latest view. Before its next snapshot it is dropped."""
        worker = self._by_name.get(view.worker_id)
        if worker is not None:
            self.num_prompts += view.backlog.num_prompts - worker.view.backlog.num_prompts
            worker.view = view
            return worker
        name = view.worker_id
        worker = self._by_name[name] = PooledWorker(view, len(self.workers))
        self.workers.append(worker)
        self.num_prompts += view.backlog.num_prompts
        in_index, host_in_index, *_ = (*index.places(name, host_id(name)), -1, -1)
        self._move(worker, in_index, host_in_index)
        return worker

    def _move(self, worker: PooledWorker, in_index: int, host_in_index: int) -> None:
        for place in (worker.in_index, worker.host_in_index):
            if place >= 0:
                del self.by_index_place[place]
                self.index_bits ^= 1 << place
        for place in (in_index, host_in_index):
            if place >= 0:
                self.by_index_place[place] = worker
                self.index_bits ^= 1 << place
        worker.in_index, worker.host_in_index = in_index, host_in_index

    def drop(self, name: str) -> None:
        worker, last = self._by_name.pop(name), self.workers.pop()
        if last is not worker:
            self.workers[worker.place] = last
            last.place = worker.place
        self.num_prompts -= worker.view.backlog.num_prompts
        self._move(worker, -1, -1)
        for ranking in self.rankings.values():
            if worker in ranking.bucket_of:
                ranking.drop(worker)

    def rank(self, worker: PooledWorker, spares_decodes: bool) -> None:
        """`spares_decodes`: as of `costs.prefill_cost`."""
        any_s, token_s = prefill_estimate(worker.view, spares_decodes)
        worker.any_s, worker.token_s = any_s, token_s
        cost_s: dict[Part, float] = {
            "short": any_s + SHORT_TOKENS * token_s,
            "long": any_s + LONG_TOKENS * token_s,
        }
        if "both" in self.rankings:
            decode_s = cost_s["decode"] = _decode_s(worker.view)
            cost_s["both"] = any_s + CHUNK_TOKENS * token_s + decode_s
        for part, ranking in self.rankings.items():
            ranking.put(worker, cost_s[part])

    def rankings_for(self, num_tokens: int) -> list[Ranking[PooledWorker]]:
        """The rankings for a prompt of that length."""
        other = "long" if num_tokens < BETWEEN_TOKENS else "short"
        return [ranking for part, ranking in self.rankings.items() if part != other]


def _decode_s(worker: WorkerView) -> float:
    """The cost of decoding a usual request."""
    goal = decode_cost(worker, CHUNK_TOKENS, 0, USUAL_OUTPUT_TOKENS)
    decode_s = goal.place_s + goal.decode_s
    if goal.added is not None:  # as `policy` charges for missed SLOs
        num_missed = goal.added.num_others_missed + goal.added.is_missed(0.0)
        decode_s += num_missed * USUAL_OUTPUT_TOKENS * worker.tpot_slo_s
    return decode_s


class ModelPools:
    """The pools of one model.

    Attributes:
        prefill, decode: by role, or the same pool twice if every worker may do both.
        num_workers: of both.
        is_large: whether the pools are ranked, and decisions leave workers out.
    """

    def __init__(self, is_shared: bool) -> None:
        if is_shared:
            self.prefill = self.decode = WorkerPool("short", "long", "decode", "both")
        else:
            self.prefill, self.decode = WorkerPool("both"), WorkerPool("decode", "both")
        self.num_workers = 0
        self.is_large = False
        self._has_both = False

    def put(self, view: WorkerView, index: PrefixIndex) -> None:
        """Store a worker's latest view, or remove a worker that no longer takes requests.

        Args:
            index: gives places to workers that were not in a pool.
        """
        if not view.accepting:
            self.drop(view.worker_id)
            return
        worker = (self.decode if view.record.role == "decode" else self.prefill).put(view, index)
        is_large = self.is_large
        self._count()
        if self._has_divided() or not is_large:
            self._rank_all()
        elif self.is_large:
            self._rank(worker)

    def drop(self, name: str) -> None:
        pool = self.decode if name in self.decode else self.prefill
        if name in pool:
            pool.drop(name)
            self._count()
            if self._has_divided():
                self._rank_all()

    def _count(self) -> None:
        self.num_workers = len(self.decode)
        if self.prefill is not self.decode:
            self.num_workers += len(self.prefill)
        self.is_large = self.num_workers > NUM_ALL_LOOKED_AT

    def _has_divided(self) -> bool:
        """Whether there are workers of both roles now and were not before, or the other way round.

        Prefill workers decode too while there are no decode workers, and are then ranked by both.
        """
        has_both = self.prefill is not self.decode and min(len(self.prefill), len(self.decode)) > 0
        if has_both == self._has_both:
            return False
        self._has_both = has_both
        self.prefill.rank_by(*(("short", "long") if has_both else ("both",)))
        return True

    def _rank_all(self) -> None:
        if self.is_large:
            for worker in self._all():
                self._rank(worker)

    def _rank(self, worker: PooledWorker) -> None:
        pool = self.decode if worker.view.record.role == "decode" else self.prefill
        pool.rank(worker, spares_decodes=self._has_both)

    def _all(self) -> list[PooledWorker]:
        if self.prefill is self.decode:
            return self.decode.workers
        return [*self.prefill.workers, *self.decode.workers]

    def likely_soonest(self) -> tuple[list[WorkerView], list[WorkerView]]:
        """Workers among which one computes a prompt soonest, and workers for places to decode.

        All of them in small pools, the cheapest few in large ones. Not empty if any worker is.
        """
        if not self.is_large:
            decodes = [each.view for each in self.decode.workers]
            workers = [each.view for each in self._all()]
            return workers, decodes or workers
        decodes = self._cheapest(self.decode)
        if self.prefill is self.decode:
            return decodes, decodes
        prefills = self._cheapest(self.prefill)
        return [*prefills, *decodes], decodes or prefills

    def _cheapest(self, pool: WorkerPool) -> list[WorkerView]:
        """The workers of a ranked pool on which some part of a request costs least."""
        found = (each for by in pool.rankings.values() for each in by.cheapest(NUM_SOONEST))
        return [each.view for each in dict.fromkeys(found)]
