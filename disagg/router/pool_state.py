"""The state of each pool from its workers' reports: step times, load, free blocks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from disagg.messages import WorkerRecord, WorkerStatus
from disagg.router.worker_view import Pool
from disagg.time_model import StepTimeModel


class PoolState(msgspec.Struct, frozen=True):
    """The state of a pool at one moment.

    num_workers: running and starting.
    times: of one worker; None until one has run a step.
    num_queued_tokens: of prompts, still to be computed in the whole pool or waiting for it.
    num_decoding, num_context_tokens: sequences of the whole pool, and their tokens.
    max_num_seqs, num_kv_tokens: room on one worker; 0: not known.
    """

    num_workers: int = 0
    times: StepTimeModel | None = None
    num_queued_tokens: float = 0.0
    num_decoding: float = 0.0
    num_context_tokens: float = 0.0
    max_num_seqs: int = 0
    num_kv_tokens: int = 0


def states_of(reports: Iterable[tuple[WorkerRecord, WorkerStatus]]) -> dict[Pool, PoolState]:
    """The state of each pool. Its step times are those of the worker with the most steps."""
    states: dict[Pool, PoolState] = {}
    num_learned: dict[Pool, int] = {}
    for record, status in reports:
        pool: Pool = (record.model, record.role)
        before = states.get(pool, PoolState())
        times, costs = before.times, status.step_costs
        if costs is not None and costs.num_observed > num_learned.get(pool, 0):
            num_learned[pool] = costs.num_observed
            times = StepTimeModel.from_costs(costs)
        states[pool] = PoolState(
            before.num_workers + 1,
            times,
            before.num_queued_tokens + status.num_uncomputed_tokens,
            before.num_decoding + status.num_running,
            before.num_context_tokens + status.num_context_tokens,
            record.max_num_seqs,
            record.num_blocks * record.block_size,
        )
    return states
