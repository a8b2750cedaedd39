"""An engine's load as `WorkerStatus`, from which routers predict seconds."""

from __future__ import annotations

from disagg.engine.sched.scheduler import Scheduler
from disagg.messages import WorkerStatus


def load_of(scheduler: Scheduler) -> WorkerStatus:
    """As of now. Transfers, holds and step costs are for the worker to add."""
    queues, running = scheduler.queues, scheduler.running
    num_uncomputed = queues.num_queued_tokens
    if queues.num_left > len(running):  # somebody has more to compute than the next token
        num_uncomputed += sum(each.num_uncomputed for each in running if each.num_uncomputed > 1)
    return WorkerStatus(
        num_running=len(running),
        num_waiting=len(scheduler.waiting) + len(scheduler.arrived),
        num_uncomputed_tokens=num_uncomputed,
        num_context_tokens=queues.num_computed,
        num_free_blocks=scheduler.pool.num_free,
        num_blocks=scheduler.pool.num_blocks,
        num_drafted=scheduler.num_drafted,
        num_accepted=scheduler.num_accepted,
        num_preempted=scheduler.num_preempted,
    )
