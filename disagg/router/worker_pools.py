"""The workers of each model that take requests, and those of them that a routing decision compares.

A decision compares the workers that have cached most of its prompt, and some random ones: the best
of a few random choices is nearly as good as the best of all (the power of d choices; Mitzenmacher,
2001), and its time does not grow with the fleet. Of as many workers as that it compares all.
What depends on a whole pool (its queue, and how many workers have cached the prefix) is known
without looking at each worker.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

from disagg.errors import Unavailable
from disagg.messages import GenerateRequest
from disagg.router.prefix_index import PrefixIndex, PromptHolders
from disagg.router.worker_view import WorkerView, host_id

# Workers of each pool that a decision compares: those with most of the prompt, and random ones.
NUM_DEEPEST, NUM_RANDOM = 4, 12


class PooledWorker:
    """A worker, with what a decision reads of many workers: one object, since in a large fleet
    reports displace all of them from the processor's caches.

    Attributes:
        view: its latest.
        bit, host_bit: of its cache and of its host memory in the prefix index; 0: it has none.
    """

    __slots__ = ("bit", "host_bit", "position", "view", "worker_id")

    def __init__(self, view: WorkerView, position: int, index: PrefixIndex) -> None:
        self.worker_id = view.worker_id
        self.view = view
        self.position = position  # in `WorkerPool.workers`
        self.bit, self.host_bit = index.bit(view.worker_id), index.bit(host_id(view.worker_id))


class WorkerPool:
    """Workers that a decision compares with each other.

    Attributes:
        workers: in no order.
        num_prompts: prompts that wait on them or are being computed.
        by_bit: each worker by each of its bits in the prefix index.
        bits: a mask of these.
    """

    def __init__(self) -> None:
        self.workers: list[PooledWorker] = []
        self.num_prompts = 0
        self.by_bit: dict[int, PooledWorker] = {}
        self.bits = 0
        self._by_id: dict[str, PooledWorker] = {}

    def __len__(self) -> int:
        return len(self.workers)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._by_id

    def put(self, view: WorkerView, index: PrefixIndex) -> None:
        """Store a worker's latest view. Before its next snapshot it is dropped."""
        worker = self._by_id.get(view.worker_id)
        if worker is not None:
            self.num_prompts += view.backlog.num_prompts - worker.view.backlog.num_prompts
            worker.view = view
            return
        worker = self._by_id[view.worker_id] = PooledWorker(view, len(self.workers), index)
        self.workers.append(worker)
        self.num_prompts += view.backlog.num_prompts
        for bit in filter(None, (worker.bit, worker.host_bit)):
            self.by_bit[bit] = worker
            self.bits |= bit

    def drop(self, worker_id: str) -> None:
        worker, last = self._by_id.pop(worker_id), self.workers.pop()
        if last is not worker:
            self.workers[worker.position] = last
            last.position = worker.position
        self.num_prompts -= worker.view.backlog.num_prompts
        for bit in filter(None, (worker.bit, worker.host_bit)):
            del self.by_bit[bit]
            self.bits ^= bit


class ModelPools:
    """The pools of one model.

    Attributes:
        prefill, decode: by role, or the same pool twice if every worker may do both.
        has_states: whether the model has recurrent states, as the last worker said.
    """

    def __init__(self, is_shared: bool) -> None:
        self.prefill = WorkerPool()
        self.decode = self.prefill if is_shared else WorkerPool()
        self.has_states = False

    @property
    def num_workers(self) -> int:
        number = len(self.decode)
        return number if self.prefill is self.decode else number + len(self.prefill)

    def put(self, view: WorkerView, index: PrefixIndex) -> None:
        """Store a worker's latest view, or remove a worker that no longer takes requests.

        Args:
            index: gives places to workers that were not in a pool.
        """
        if view.accepting:
            self.has_states = view.record.has_states
            (self.decode if view.record.role == "decode" else self.prefill).put(view, index)
        else:
            self.drop(view.worker_id)

    def drop(self, worker_id: str) -> None:
        pool = self.decode if worker_id in self.decode else self.prefill
        if worker_id in pool:
            pool.drop(worker_id)


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


class ComparedWorkers(NamedTuple):
    """The workers that a decision compares.

    prefills: for remote prefill; None: there is no worker for it. It is `decodes` if every worker
        may do both.
    """

    prefills: Side | None
    decodes: Side

    @property
    def is_shared(self) -> bool:
        return self.prefills is self.decodes

    @property
    def num_workers(self) -> int:
        """The number of the model's workers."""
        if self.prefills is None or self.is_shared:
            return self.decodes.num_workers
        return self.prefills.num_workers + self.decodes.num_workers

    def holder(self) -> tuple[WorkerView | None, int]:
        """The worker with the longest cached prefix, and its tokens; None: none has cached any."""
        best, most = None, 0
        for side in (self.prefills, self.decodes):
            deepest = max(side.num_held) if side is not None else 0
            if side is not None and deepest > most:
                best, most = side.workers[side.num_held.index(deepest)], deepest
        return best, most


def sample_workers(
    request: GenerateRequest,
    pools: ModelPools | None,
    index: PrefixIndex,
    rng: random.Random,
    exclude: Collection[str] = (),
    num_random: int = NUM_RANDOM,
) -> ComparedWorkers:
    """Choose the workers to compare.

    Args:
        pools: of the request's model; None: it never had a worker.
        exclude: workers that must not get the request (again).
        num_random: workers of each pool beside those with most of the prompt.

    Raises:
        Unavailable: no worker of the request's model takes requests.
    """
    hashes = () if request.scores_prompt else request.block_hashes
    found = index.find(hashes, has_states=pools is not None and pools.has_states)

    def choose(pool: WorkerPool) -> Side | None:
        workers = pool.workers
        if exclude:
            workers = [each for each in workers if each.worker_id not in exclude]
        if not workers:
            return None
        if len(workers) <= NUM_DEEPEST + num_random:
            chosen = rng.sample(workers, len(workers))  # so that ties are decided by chance
        else:
            num_deepest = NUM_DEEPEST + 2 * len(exclude)
            deepest = found.deepest(pool.bits, num_deepest, rng.random())
            holders = [pool.by_bit[bit] for bit in deepest]
            chosen = rng.sample(workers, num_random)
            chosen += [each for each in holders if each.worker_id not in exclude]
            # One may be found for its cache, for its host memory, and by chance.
            chosen = list(dict.fromkeys(chosen))
        return _side(pool, chosen, found)

    prefills = decodes = None
    if pools is not None:
        decodes = prefills = choose(pools.decode)
        if pools.prefill is not pools.decode:
            prefills = choose(pools.prefill)
    if decodes is not None:
        return ComparedWorkers(prefills, decodes)
    if prefills is not None:
        return ComparedWorkers(None, prefills)
    raise Unavailable(
        f"No worker of model {request.model!r} takes requests at the moment; try again shortly."
    )


def _side(pool: WorkerPool, workers: Sequence[PooledWorker], found: PromptHolders) -> Side:
    block_size = workers[0].view.record.block_size  # one per model
    num_held = [depth * block_size for depth in found.depths([each.bit for each in workers])]
    host_bits = [each.host_bit for each in workers]
    num_in_host = [depth * block_size for depth in found.depths(host_bits)]
    second, most = sorted((0, 0, *num_held))[-2:]
    views = [each.view for each in workers]
    return Side(views, num_held, num_in_host, (second, most), pool.num_prompts, len(pool))
