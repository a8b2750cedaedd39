"""The workers of each model that take requests, ranked by cost and updated by reports.

A decision in a large fleet compares only some workers (`router/shortlist.py`). For this, workers
are ranked by the cost of a usual request there; each report updates the rank. The queues of a whole
pool, on which costs also depend, are kept as a sum.
"""

from __future__ import annotations

import math
import random

from disagg.router.costs import decode_cost, prefill_estimate
from disagg.router.output_length import USUAL_OUTPUT_TOKENS
from disagg.router.worker_view import WorkerView
from disagg.time_model import CHUNK_TOKENS

NUM_ALL_LOOKED_AT = 32  # workers of a model up to which decisions compare all of them
BUCKETS_PER_OCTAVE = 8
LEAST_S, MOST_S = 2.0**-20, 2.0**20


class Ranking:
    """Names by a cost in seconds that changes often, cheapest first.

    Exact to an eighth of an octave, so a report with small changes moves nothing.
    """

    def __init__(self) -> None:
        num_buckets = _bucket(MOST_S) + 1
        self._buckets: list[list[str]] = [[] for _ in range(num_buckets)]
        self._filled = 0  # a bit for each bucket that is not empty
        self._bucket_of: dict[str, int] = {}
        self._place_of: dict[str, int] = {}  # in its bucket

    def put(self, name: str, cost_s: float) -> None:
        number = _bucket(cost_s)
        before = self._bucket_of.get(name)
        if number == before:
            return
        if before is not None:
            self.drop(name)
        bucket = self._buckets[number]
        self._bucket_of[name] = number
        self._place_of[name] = len(bucket)
        bucket.append(name)
        self._filled |= 1 << number

    def drop(self, name: str) -> None:
        number = self._bucket_of.pop(name)
        bucket, place = self._buckets[number], self._place_of.pop(name)
        last = bucket.pop()
        if last != name:
            bucket[place] = last
            self._place_of[last] = place
        if not bucket:
            self._filled ^= 1 << number

    def cheapest(self, number: int, rng: random.Random) -> list[str]:
        """Up to `number` of the cheapest names; random ones among equal costs."""
        found: list[str] = []
        filled = self._filled
        while filled and len(found) < number:
            lowest = filled & -filled
            filled ^= lowest
            bucket = self._buckets[lowest.bit_length() - 1]
            room = number - len(found)
            if len(bucket) <= room:
                found += bucket
            else:
                start = int(rng.random() * len(bucket))
                found += bucket[start : start + room]
                found += bucket[: number - len(found)]
        return found


def _bucket(cost_s: float) -> int:
    octaves = math.log2(cost_s + LEAST_S) if cost_s < MOST_S else 20.0
    return int(BUCKETS_PER_OCTAVE * (octaves + 20.0))


class WorkerPool:
    """Workers that a decision compares with each other.

    Attributes:
        names: of all workers, in no order.
        num_prompts: prompts that wait on them or are being computed.
        index_bits: of their caches and their host memory in the prefix index.
        by_prefill, by_decode, by_both: in a ranked pool, workers by the cost of a usual request of
            which nothing is cached.
        prefill_estimates: in a ranked pool, `costs.prefill_estimate` by worker.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_prompts = 0
        self.prefill_estimates: dict[str, tuple[float, float]] = {}
        self.index_bits = 0
        self._num_prompts: dict[str, int] = {}
        self._bits: dict[str, int] = {}
        self._place_of: dict[str, int] = {}  # in `names`
        self.by_prefill, self.by_decode, self.by_both = Ranking(), Ranking(), Ranking()

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._place_of

    def put(self, worker: WorkerView, index_bits: int) -> None:
        name, num_prompts = worker.worker_id, worker.backlog.num_prompts
        if name not in self._place_of:
            self._place_of[name] = len(self.names)
            self.names.append(name)
            self._bits[name] = 0
        if index_bits != self._bits[name]:
            self.index_bits ^= self._bits[name] ^ index_bits
            self._bits[name] = index_bits
        self.num_prompts += num_prompts - self._num_prompts.get(name, 0)
        self._num_prompts[name] = num_prompts

    def drop(self, name: str) -> None:
        place, last = self._place_of.pop(name), self.names.pop()
        if last != name:
            self.names[place] = last
            self._place_of[last] = place
        self.num_prompts -= self._num_prompts.pop(name)
        self.index_bits ^= self._bits.pop(name)
        if self.prefill_estimates.pop(name, None) is not None:
            for ranking in (self.by_prefill, self.by_decode, self.by_both):
                ranking.drop(name)

    def rank(self, worker: WorkerView) -> None:
        name = worker.worker_id
        estimate = self.prefill_estimates[name] = prefill_estimate(worker)
        prefill_s = estimate[0] + CHUNK_TOKENS * estimate[1]
        goal = decode_cost(worker, CHUNK_TOKENS, 0, USUAL_OUTPUT_TOKENS)
        decode_s = goal.place_s + goal.decode_s
        if goal.added is not None:  # as `candidates` charges for missed SLOs
            num_missed = goal.added.num_others_missed + goal.added.is_missed(0.0)
            decode_s += num_missed * USUAL_OUTPUT_TOKENS * worker.tpot_slo_s
        self.by_prefill.put(name, prefill_s)
        self.by_decode.put(name, decode_s)
        self.by_both.put(name, prefill_s + decode_s)


class ModelPools:
    """The pools of one model.

    Attributes:
        prefill, decode: by role, or the same pool twice if every worker may do both.
        is_large: whether the pools are ranked, and decisions leave workers out.
    """

    def __init__(self, is_shared: bool) -> None:
        self.prefill = WorkerPool()
        self.decode = self.prefill if is_shared else WorkerPool()
        self._workers: dict[str, WorkerView] = {}
        self.is_large = False

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def put(self, worker: WorkerView, index_bits: int) -> None:
        """Store a worker's latest view, or remove a worker that no longer takes requests.

        Args:
            index_bits: of its cache and its host memory in the prefix index.
        """
        name = worker.worker_id
        if not worker.accepting:
            self.drop(name)
            return
        self._workers[name] = worker
        self._of(worker).put(worker, index_bits)
        if self.is_large:
            self._of(worker).rank(worker)
        elif len(self._workers) > NUM_ALL_LOOKED_AT:
            self.is_large = True
            for each in self._workers.values():
                self._of(each).rank(each)

    def drop(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._of(worker).drop(name)
            self.is_large = len(self._workers) > NUM_ALL_LOOKED_AT

    def _of(self, worker: WorkerView) -> WorkerPool:
        return self.decode if worker.record.role == "decode" else self.prefill
