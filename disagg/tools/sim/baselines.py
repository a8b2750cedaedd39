"""Baseline routing policies to compare `router.policy.choose_route` with.

Some use one criterion, as many routers do: round robin, random, least loaded, or longest cached
prefix. Others are the policies of other systems, in our words after their papers and documentation
and with their default weights: Dynamo's KV router, llm-d's scorers and its latency predictor,
SGLang's cache-aware router, Ray Serve LLM's prefix-aware router, Preble, and TaiChi. Ray's and
Serve's default is `two-choices`. They see here what our router sees, so none suffers from stale
figures.

Prefill goes to the prefill pool and decode to the decode pool; with one pool, a worker does both.
TaiChi alone lets decode workers compute prompts too. None of them refuses requests.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter, itemgetter

from disagg.messages import GenerateRequest
from disagg.router.fleet import FleetView
from disagg.router.policy import ChooseRoute, check_deadline, choose_route
from disagg.router.prefix_index import PrefixIndex
from disagg.router.route import Candidate, Route
from disagg.router.worker_pools import Side, sample_workers
from disagg.router.worker_view import WorkerView
from disagg.time_model import CHUNK_TOKENS

# The place of a worker in a side's lists, for a prompt of so many tokens.
Pick = Callable[[Side, int, random.Random], int]
# Of the workers for prefill, if there are any, and those for decode: who computes a prompt of so
# many tokens, how many of them it has cached, and who decodes.
PickBoth = Callable[[Side | None, Side, int, random.Random], tuple[WorkerView, int, WorkerView]]
NO_LIMIT = sys.maxsize


def new_policy(
    name: str,
    slos_s: tuple[float, float] = (math.inf, math.inf),
    chunks: tuple[int, int] = (CHUNK_TOKENS, CHUNK_TOKENS),
) -> ChooseRoute:
    """A policy of `POLICIES`, with a state of its own. Raises `KeyError`.

    Args:
        slos_s: the SLOs of TTFT and TPOT, for the policy that reads them from requests.
        chunks: tokens in a step of prefill and of decode workers, for the policy that sets them.
    """
    if name in (OURS, ADMIT_ALL, FIXED_ROLES, NO_REFUSALS):
        return choose_route
    if name == TAICHI:
        return _policy(name, _taichi(chunks))
    if name == ALL_WORKERS:
        return partial(choose_route, num_random=NO_LIMIT)
    if name == LATENCY:
        return _policy(name, _of_roles(*(partial(_with_headroom, slos_s),) * 2))
    return _policy(name, _of_roles(*_PICKS[name]()))


def _policy(name: str, pick: PickBoth) -> ChooseRoute:
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
        num_tokens = len(request.token_ids)
        source, num_held, goal = pick(prefills, decodes, num_tokens, rng)
        prefill = None if source is goal else source.worker_id
        num_cached = min(num_held, num_tokens - 1)
        only = Candidate(prefill, goal.worker_id, 0.0, 0.0, 0.0, 0.0, num_cached)
        return Route(prefill, goal.worker_id, 0.0, num_cached, (only,), name)

    return choose


def _of_roles(pick_prefill: Pick, pick_decode: Pick) -> PickBoth:
    """Each pool picks for itself; with one pool, whoever computes the prompt decodes, too."""

    def pick(
        prefills: Side | None, decodes: Side, num_tokens: int, rng: random.Random
    ) -> tuple[WorkerView, int, WorkerView]:
        side = prefills or decodes
        place = pick_prefill(side, num_tokens, rng)
        source = goal = side.workers[place]
        if prefills is not None:
            goal = decodes.workers[pick_decode(decodes, num_tokens, rng)]
        return source, side.num_held[place], goal

    return pick


def _load(worker: WorkerView) -> tuple[int, int]:
    """Sort key: queued prompt tokens, then running sequences."""
    return worker.num_uncomputed_tokens, worker.num_decoding + worker.num_waiting


def _turns() -> Pick:
    numbers = itertools.count()

    def pick(side: Side, num_tokens: int, rng: random.Random) -> int:
        names = [worker.worker_id for worker in side.workers]
        return names.index(sorted(names)[next(numbers) % len(names)])

    return pick


def _any(side: Side, num_tokens: int, rng: random.Random) -> int:
    return rng.randrange(len(side.workers))


def _least_loaded(side: Side, num_tokens: int, rng: random.Random) -> int:
    # The workers are in random order, so the first of equals is a random one.
    return min(range(len(side.workers)), key=lambda place: _load(side.workers[place]))


def _less_loaded_of_two(side: Side, num_tokens: int, rng: random.Random) -> int:
    return min((0, len(side.workers) - 1), key=lambda place: _load(side.workers[place]))


def _most_held(side: Side, num_tokens: int, rng: random.Random) -> int:
    return side.num_held.index(max(side.num_held))


def _num_requests(worker: WorkerView) -> int:
    return worker.num_decoding + worker.num_waiting


def _cheapest_in_blocks(side: Side, num_tokens: int, rng: random.Random) -> int:
    """Dynamo's KV router (1.2): prompt tokens to compute plus tokens that decode, in blocks."""

    def cost(place: int) -> int:
        worker = side.workers[place]
        num_to_prefill = worker.num_uncomputed_tokens + num_tokens - side.num_held[place]
        return num_to_prefill + worker.num_context_tokens

    return min(range(len(side.workers)), key=cost)


def _fewest_context_tokens(side: Side, num_tokens: int, rng: random.Random) -> int:
    """Dynamo's decode workers: no weight on what is cached."""
    places = range(len(side.workers))
    return min(places, key=lambda place: side.workers[place].num_context_tokens)


def _highest_score(prefix_weight: float, side: Side, num_tokens: int, rng: random.Random) -> int:
    """llm-d's default profile: what is cached (3; 0 for decode), the queue (2), free KV (2)."""
    queues = [worker.num_waiting for worker in side.workers]
    most, spread = max(queues), max(queues) - min(queues)

    def score(place: int) -> float:
        worker = side.workers[place]
        queue = (most - queues[place]) / spread if spread else 1.0
        free = worker.num_free_blocks / worker.record.num_blocks
        return prefix_weight * side.num_held[place] / num_tokens + 2.0 * queue + 2.0 * free

    return max(range(len(side.workers)), key=score)


def _with_headroom(
    slos_s: tuple[float, float], side: Side, num_tokens: int, rng: random.Random
) -> int:
    """llm-d's latency predictor, which is exact here: the worker with the least headroom before
    both SLOs (TTFT weighs 0.8); if none has any, a random one, with weights for short times."""
    ttft_slo_s, tpot_slo_s = slos_s
    times_s = []
    for worker, num_held in zip(side.workers, side.num_held, strict=True):
        ahead_s = worker.backlog.under_way_s + worker.backlog.later_s
        num_new = max(1, num_tokens - num_held)
        ttft_s = ahead_s + worker.times.prefill_s(num_new, num_tokens - num_new)
        num_context = worker.num_context_tokens + num_tokens
        times_s.append((ttft_s, worker.times.decode_step_s(worker.num_decoding + 1, num_context)))
    ahead = [(ttft_slo_s - ttft_s, tpot_slo_s - tpot_s) for ttft_s, tpot_s in times_s]
    fits = [place for place, each in enumerate(ahead) if min(each) >= 0.0]
    if fits:
        return min(fits, key=lambda place: 0.8 * ahead[place][0] + 0.2 * ahead[place][1])
    weights = [1.0 / (0.8 * ttft_s + 0.2 * tpot_s) for ttft_s, tpot_s in times_s]
    return rng.choices(range(len(weights)), weights)[0]


def _cache_aware(
    least_share: float, least_gap: float, side: Side, num_tokens: int, rng: random.Random
) -> int:
    """SGLang's router (0.3.1: share 0.3, gap 64) and Ray Serve LLM's (0.1, inf): the worker with
    most of the prompt, if that is this share of it, else the one with the smallest cache. If one
    has so many requests more than another, and 1.5 times as many, the one with fewest."""
    places = range(len(side.workers))
    loads = [_num_requests(worker) for worker in side.workers]
    if max(loads) - min(loads) > least_gap and max(loads) > 1.5 * min(loads):
        return loads.index(min(loads))
    deepest = max(places, key=lambda place: side.num_held[place])
    if side.num_held[deepest] > least_share * num_tokens:
        return deepest
    return max(places, key=lambda place: side.workers[place].num_free_blocks)


def _exploit_or_explore(side: Side, num_tokens: int, rng: random.Random) -> int:
    """Preble: a worker with most of the prompt if that is more than half of it; else, or if that
    one has twice the load, the worker with the least seconds of work, this prompt included."""

    def seconds(place: int) -> float:
        worker = side.workers[place]
        num_new = max(1, num_tokens - side.num_held[place])
        own_s = worker.times.prefill_s(num_new, num_tokens - num_new)
        return own_s + worker.times.prefill_s(worker.num_uncomputed_tokens) + _decode_s(worker)

    places = range(len(side.workers))
    cheapest = min(places, key=seconds)
    most = max(side.num_held)
    if 2 * most <= num_tokens:
        return cheapest
    holder = min((place for place in places if side.num_held[place] == most), key=seconds)
    return holder if seconds(holder) <= 2.0 * seconds(cheapest) else cheapest


def _decode_s(worker: WorkerView) -> float:
    """Seconds that the streams of a worker add to others': a step of each."""
    return worker.num_decoding * worker.times.per_sequence_s


def _taichi(chunks: tuple[int, int]) -> PickBoth:
    """TaiChi (arXiv 2508.01989): all workers do both, in steps of at most `chunks` tokens, large
    ones in the prefill pool and small ones in the decode pool. A prompt goes to the worker that
    computes it soonest, which depends on its length, and its answer to the decode worker with the
    fewest tokens, or, when none has blocks left for it, to the prefill worker with most. The paper
    also moves running answers between workers; here they stay."""

    def pick(
        prefills: Side | None, decodes: Side, num_tokens: int, rng: random.Random
    ) -> tuple[WorkerView, int, WorkerView]:
        sides = [(decodes, chunks[prefills is not None])]
        if prefills is not None:
            sides.append((prefills, chunks[0]))
        _, source, num_held = min(
            (
                (_first_token_s(worker, num_tokens - num_held, chunk), worker, num_held)
                for side, chunk in sides
                for worker, num_held in zip(side.workers, side.num_held, strict=True)
            ),
            key=itemgetter(0),
        )
        if prefills is None:
            return source, num_held, source
        block_size = source.record.block_size
        roomy = [w for w in decodes.workers if w.num_free_blocks * block_size >= num_tokens]
        if roomy:
            return source, num_held, min(roomy, key=attrgetter("num_context_tokens"))
        return source, num_held, max(prefills.workers, key=attrgetter("num_free_blocks"))

    return pick


def _first_token_s(worker: WorkerView, num_new: int, chunk: int) -> float:
    """Seconds until a prompt is computed behind those that are queued, in steps of `chunk` tokens,
    of which each decoding sequence takes one."""
    times = worker.times
    num_all = worker.num_uncomputed_tokens + max(1, num_new)
    num_steps = math.ceil(num_all / max(1, chunk - worker.num_decoding))
    decode_s = times.decode_step_s(worker.num_decoding, worker.num_context_tokens)
    step_s = max(decode_s, times.per_step_s) + times.per_prompt_step_s
    return num_steps * step_s + times.prompts_s(num_all, 0, 1 + worker.num_waiting)


OURS = "predicted-seconds"
ADMIT_ALL = "admit-all"  # ours, of requests that come without a TTFT SLO
FIXED_ROLES = "fixed-roles"  # ours, of requests that come without a TPOT SLO
NO_REFUSALS = "no-refusals"  # the same, of requests that come without a TTFT SLO either
ALL_WORKERS = "all-workers"  # ours, which looks at all workers of a large fleet too
_PICKS: dict[str, Callable[[], tuple[Pick, Pick]]] = {
    "round-robin": lambda: (_turns(), _turns()),
    "random": lambda: (_any, _any),
    "two-choices": lambda: (_less_loaded_of_two, _less_loaded_of_two),
    "least-loaded": lambda: (_least_loaded, _least_loaded),
    "prefix-only": lambda: (_most_held, _least_loaded),
    "dynamo": lambda: (_cheapest_in_blocks, _fewest_context_tokens),
    "llm-d": lambda: (partial(_highest_score, 3.0), partial(_highest_score, 0.0)),
    "sglang": lambda: (partial(_cache_aware, 0.3, 64.0), _less_loaded_of_two),
    "ray-prefix": lambda: (partial(_cache_aware, 0.1, math.inf), _less_loaded_of_two),
    "preble": lambda: (_exploit_or_explore, _exploit_or_explore),
}
LATENCY, TAICHI = "llm-d-latency", "taichi"
PUBLISHED = ("dynamo", "llm-d", LATENCY, "sglang", "ray-prefix", "two-choices", "preble", TAICHI)
POLICIES = (OURS, ADMIT_ALL, FIXED_ROLES, NO_REFUSALS, ALL_WORKERS, *_PICKS, LATENCY, TAICHI)
