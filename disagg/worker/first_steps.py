"""Measures an engine's step times before its first request, to start its time model.

Without these times the first long prompt on a slow machine would look like a hung engine. Routers
also use them until a worker of the pool has served requests, and not longer: workers that start
together slow each other down, and a worker that seems slow would get no requests that could correct
its figure. The fit relies on them for long prompts until it has seen one. Prompts of several
lengths separate the cost of a token from that of a step with prompts, and several answers at a time
the cost of a decode from that of a step: a worker with one stream would not see it, and not know
whether drafts pay.
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.least_squares import Evidence
from disagg.messages import GenerateRequest, SamplingParams
from disagg.time_model import (
    CHUNK_TOKENS,
    NUM_STEP_FEATURES,
    StepFeatures,
    StepTimeModel,
    step_solver,
)

FEW_TOKENS, NUM_TOKENS = 8, 64  # of the first prompts that are timed
LONGEST_S = 0.25  # seconds that a longer one may take, as far as NUM_TOKENS show
NUM_DECODES = 3
NUM_SEQS = 8  # that decode together
NUM_TRIES = 3
LEAST_OF_PRIOR = 0.01
PULL = 1e-8  # so weak that the prior decides only what the steps do not show
NUM_SWEEPS = 500


def first_steps(
    engine: Engine, timer: Callable[[], float], prior: StepTimeModel | None = None
) -> StepTimeModel:
    """Step times of a few prompts and their answers. Their blocks are not cached.

    Args:
        engine: an engine with warm kernels and without requests.
        timer: returns monotonic seconds.
        prior: gives the coefficients that these steps do not show.
    """
    scheduler = engine.scheduler
    pool = engine.pool
    room = min(scheduler.max_model_len, pool.groups.longest(pool.num_blocks))
    num_tokens = min(NUM_TOKENS, room - NUM_DECODES - 1)
    caching, pool.enable_prefix_caching = pool.enable_prefix_caching, False
    drafting = scheduler.drafting
    proposer, drafting.proposer = drafting.proposer, None  # plain decode steps are timed
    seen = _fastest_steps(engine, timer, min(FEW_TOKENS, num_tokens))
    seen += (usual := _fastest_steps(engine, timer, num_tokens))
    num_fitting = pool.num_blocks // pool.groups.num_at_most(NUM_DECODES + 2)
    num_seqs = min(NUM_SEQS, scheduler.max_num_seqs, num_fitting)
    seen += _fastest_steps(engine, timer, min(1, num_tokens), num_seqs)
    prompt_s = sum(seconds for features, seconds in usual if features.num_new_tokens)
    if prompt_s > 0.0:
        num_in_time = int(num_tokens * LONGEST_S / prompt_s)
        num_long = min(CHUNK_TOKENS, room - NUM_DECODES - 1, num_in_time)
        if num_long >= 2 * num_tokens:
            seen += _fastest_steps(engine, timer, num_long)
    pool.enable_prefix_caching, drafting.proposer = caching, proposer
    return _fitted(seen, prior or StepTimeModel())


def _fitted(seen: list[tuple[StepFeatures, float]], prior: StepTimeModel) -> StepTimeModel:
    solver, evidence = step_solver(prior, PULL), Evidence(NUM_STEP_FEATURES, forgetting=1.0)
    for features, seconds in seen:
        if seconds > 0.0:
            evidence.add(solver.relative(features.row(), seconds))
    for _ in range(NUM_SWEEPS):
        solver.sweep(evidence)
    both = zip(solver.coefficients(), prior.coefficients, strict=True)
    # The result is used as a prior, in which a coefficient of 0 could never grow.
    return StepTimeModel.of(max(found, LEAST_OF_PRIOR * before) for found, before in both)


def _fastest_steps(
    engine: Engine, timer: Callable[[], float], num_tokens: int, num_seqs: int = 1
) -> list[tuple[StepFeatures, float]]:
    """Each step of prompts and their answers, with its least seconds: others only add time."""
    tries = [_timed_steps(engine, timer, num_tokens, num_seqs) for _ in range(NUM_TRIES)]
    return [(same[0][0], min(seconds for _, seconds in same)) for same in zip(*tries, strict=True)]


def _timed_steps(
    engine: Engine, timer: Callable[[], float], num_tokens: int, num_seqs: int
) -> list[tuple[StepFeatures, float]]:
    """The steps of prompts and their answers, with their seconds."""
    seen: list[tuple[StepFeatures, float]] = []
    for i in range(num_seqs if num_tokens > 0 else 0):
        engine.submit(_sequence(f"first steps {i}", num_tokens, max_tokens=NUM_DECODES + 1))
    while engine.has_work:
        began_s = timer()
        engine.step()
        seen.append((engine.last_plan.features, timer() - began_s))
    return seen


def _sequence(request_id: str, num_tokens: int, max_tokens: int) -> Sequence:
    request = GenerateRequest(
        request_id=request_id,
        model="",
        token_ids=(0,) * num_tokens,
        num_prompt_tokens=num_tokens,
        hash_root=b"",
        block_hashes=(),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_unix_s=float("inf"),
    )
    return Sequence(request)
