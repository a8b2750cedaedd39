"""An engine's load as a `WorkerStatus`, from which routers predict seconds."""

from __future__ import annotations

from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.messages import WorkerStatus


def load_of(scheduler: Scheduler) -> WorkerStatus:
    """The scheduler's current load. The worker adds transfers, holds and step costs."""
    queues, running = scheduler.queues, scheduler.running
    prefills: list[Sequence] = []
    if queues.num_left > len(running):  # some sequence has more than one token to compute
        prefills = [each for each in running if each.num_uncomputed > 1]
    num_uncomputed = sum([each.num_uncomputed for each in prefills])
    return WorkerStatus(
        num_running=len(running),
        num_waiting=len(scheduler.waiting) + len(scheduler.imported),
        num_uncomputed_tokens=queues.num_queued_tokens + num_uncomputed,
        num_context_tokens=queues.num_computed,
        num_free_blocks=scheduler.pool.num_free,
        num_blocks=scheduler.pool.num_blocks,
        num_drafted=scheduler.num_drafted,
        num_accepted=scheduler.num_accepted,
        num_preempted=scheduler.num_preempted,
        num_prefilling=len(prefills),
        num_leaving=sum([each.hand_over for each in prefills]),
        num_corrupted=scheduler.num_corrupted,
    )
