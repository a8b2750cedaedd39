"""One worker as routing decisions see it: its last report, and the requests on their way to it."""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec

from disagg.messages import HostCounts, Role, WorkerRecord, WorkerStatus
from disagg.router.backlog import Backlog
from disagg.router.pull_times import PullTimes
from disagg.router.running_streams import RunningStreams
from disagg.time_model import StepTimeModel

Pool: TypeAlias = tuple[str, Role]  # model and role


class RequestLoad(msgspec.Struct, frozen=True):
    """The load that a request adds to a worker."""

    num_uncomputed_tokens: int = 0  # to prefill
    num_sequences: int = 0  # to decode
    num_context_tokens: int = 0  # that decoding reads, and that need blocks


class WorkerView(msgspec.Struct, frozen=True):
    """One worker at one moment, with the requests that are on their way to it."""

    worker_id: str
    record: WorkerRecord
    times: StepTimeModel
    num_waiting: int  # sequences that have tokens to prefill
    num_uncomputed_tokens: int
    num_decoding: int
    num_context_tokens: int
    num_free_blocks: int
    backlog: Backlog
    accepting: bool
    pulls: PullTimes
    host: HostCounts | None = None  # measured loads from its host memory; None: it has none
    began_s: float = math.inf  # start of the running step, on the fleet's clock; inf: not known
    tpot_slo_s: float = math.inf  # of the requests of its model; inf: they have none
    streams: RunningStreams | None = None  # None: its model has no TPOT SLO
    is_home: bool = True  # among equals this ingress prefers it; with one ingress, all of them

    @classmethod
    def from_status(
        cls,
        record: WorkerRecord,
        status: WorkerStatus,
        coming: RequestLoad,
        times: StepTimeModel,
        began_s: float = math.inf,
        tpot_slo_s: float = math.inf,
        ingress_id: str = "",
        before: WorkerView | None = None,
    ) -> WorkerView:
        """`before`: the view of the same worker until now; what has not changed is kept."""
        if before is not None and before.pulls.figures is status.transfers:
            pulls = before.pulls
        else:
            pulls = PullTimes(status.transfers)
        blocks_coming = -(-coming.num_context_tokens // record.block_size)
        num_waiting = status.num_waiting + (coming.num_uncomputed_tokens > 0)
        num_uncomputed = status.num_uncomputed_tokens + coming.num_uncomputed_tokens
        num_decoding = status.num_running + coming.num_sequences
        num_context = status.num_context_tokens + coming.num_context_tokens
        # Without TPOT SLOs, a running prompt delays other sequences as a decoding one does.
        num_beside, streams = num_decoding, None
        if tpot_slo_s != math.inf:
            num_beside = status.num_running - status.num_prefilling
            num_streams = num_decoding - status.num_leaving
            streams = RunningStreams.predict(times, tpot_slo_s, num_streams, num_context)
        return cls(
            record.worker_id,
            record,
            times,
            num_waiting,
            num_uncomputed,
            num_decoding,
            num_context,
            status.num_free_blocks - blocks_coming,
            Backlog.predict(
                times, num_waiting, num_uncomputed, num_beside, num_context, tpot_slo_s
            ),
            status.accepting,
            pulls,
            status.host,
            began_s,
            tpot_slo_s,
            streams,
            status.home_ingress in ("", ingress_id),
        )


def host_id(worker_id: str) -> str:
    """The name of a worker's host tier in the prefix index."""
    return f"{worker_id}/host"
