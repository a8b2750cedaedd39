"""What an engine has to do, for routers to predict seconds from."""

from __future__ import annotations

from disagg.engine.scheduler import Scheduler
from disagg.messages import WorkerStatus


def load_of(scheduler: Scheduler) -> WorkerStatus:
    """As of now. Transfers, holds and step costs are for the worker to add."""
    num_uncomputed, num_context = scheduler.queues.num_queued_tokens, 0
    for sequence in scheduler.running:
        num_computed = sequence.num_computed
        num_context += num_computed
        left = len(sequence.tokens) - num_computed
        if left > 1:
            num_uncomputed += left
    return WorkerStatus(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.arrived),
        num_uncomputed_tokens=num_uncomputed,
        num_context_tokens=num_context,
        num_free_blocks=scheduler.pool.num_free,
        num_blocks=scheduler.pool.num_blocks,
        num_drafted=scheduler.num_drafted,
        num_accepted=scheduler.num_accepted,
    )
