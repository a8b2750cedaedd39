"""One worker as routing decisions see it: its last report, and the requests on their way to it.

What costs read of it many times (how long its pulls take, the streams that run there, the work
queued there) is computed once per report, because a routing decision compares many workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from disagg.adapters import AdapterReport
from disagg.messages import HostCounts, Role, TransferFigure, WorkerRecord, WorkerStatus
from disagg.time_model import (
    CHUNK_TOKENS,
    LEAST_CHUNK_TOKENS,
    TPOT_SHARE,
    StepTimeModel,
    prompt_tokens_in,
    prompt_tokens_within,
)

# For a worker that has not pulled yet. Optimistic, because too high a price would never be
# corrected: nothing would be transferred.
UNMEASURED_LATENCY_S = 2e-3
UNMEASURED_S_PER_BYTE = 1e-10


class PullTimes:
    """`figures`: of one worker, by source."""

    __slots__ = ("_by_source", "_usual", "figures")

    def __init__(self, figures: Sequence[TransferFigure]) -> None:
        self.figures = figures
        self._by_source: dict[str, TransferFigure] | None = None
        self._usual = UNMEASURED_LATENCY_S, UNMEASURED_S_PER_BYTE

    def seconds(self, source_id: str, nbytes: int) -> float:
        """Seconds to pull from a source; if it was not measured, the mean of those that were."""
        by_source = self._by_source
        if by_source is None:
            by_source = self._index()
        figure = by_source.get(source_id)
        if figure is not None:
            return figure.latency_s + nbytes / figure.bytes_per_s
        latency_s, s_per_byte = self._usual
        return latency_s + nbytes * s_per_byte

    def _index(self) -> dict[str, TransferFigure]:
        figures = self.figures
        if figures:
            latency_s = sum([each.latency_s for each in figures]) / len(figures)
            s_per_byte = sum([1.0 / each.bytes_per_s for each in figures]) / len(figures)
            self._usual = latency_s, s_per_byte
        self._by_source = {each.source_id: each for each in figures}
        return self._by_source


# A step takes longer. Fitted costs may be 0 for each step and for each token, where prompts are so
# long that what they attend to explains all their time.
LEAST_STEP_S = 1e-6


class RunningStreams(NamedTuple):
    """The streams of a worker whose requests have a TPOT SLO. Computed once per report.

    num: sequences that decode, and sequences that will decode here after their prompt.
    num_now: of these, those that decode.
    step_s: a step without prompt tokens.
    full_prompt_rate: prompt tokens that the worker could compute a second without them.
    room_s: seconds that a step beside them has for prompts; inf: there are no streams.
    """

    num: int
    num_now: int
    step_s: float
    full_prompt_rate: float
    room_s: float = math.inf
    prompt_step_s: float = 0.0  # a step with prompts, but for their tokens

    def beside_s(self, num_tokens: int, work_s: float) -> float:
        """Seconds of a prompt's steps beside these streams, without its own tokens.

        Args:
            work_s: what `num_tokens` of the prompt add to the steps that compute them.
        """
        num_most = max(1, CHUNK_TOKENS - self.num)
        return max(math.ceil(work_s / self.room_s), -(-num_tokens // num_most)) * self.prompt_step_s

    @classmethod
    def predict(
        cls,
        times: StepTimeModel,
        tpot_slo_s: float,
        num: int,
        num_now: int,
        num_context_tokens: int,
    ) -> RunningStreams:
        """`num_context_tokens`: of all of them."""
        chunk_s = times.prompt_step_s + CHUNK_TOKENS * times.per_token_s
        full_rate = CHUNK_TOKENS / max(chunk_s, LEAST_STEP_S)
        if not num:
            return cls(0, 0, 0.0, full_rate)
        step_s = times.decode_step_s(num, num_context_tokens)
        least_s = LEAST_CHUNK_TOKENS * times.per_token_s
        prompt_step_s = step_s + times.per_prompt_step_s
        room_s = max(least_s, TPOT_SHARE * tpot_slo_s - prompt_step_s)
        return cls(num, num_now, step_s, full_rate, room_s, prompt_step_s)


def prompt_rate(
    times: StepTimeModel, tpot_slo_s: float, num_streams: float, streams_s: float
) -> tuple[float, float]:
    """Prompt tokens that a worker can compute a second beside some streams, and the seconds of a
    step with both.

    Args:
        streams_s: of a step without prompt tokens.
    """
    num_within = prompt_tokens_in(times, TPOT_SHARE * tpot_slo_s - streams_s)
    num_tokens = min(num_within, max(1, CHUNK_TOKENS - num_streams))
    step_s = streams_s + times.per_prompt_step_s + num_tokens * times.per_token_s
    step_s = max(step_s, LEAST_STEP_S)
    return num_tokens / step_s, step_s


class Backlog(msgspec.Struct, frozen=True, gc=False):
    """Prompts queued on a worker, and the steps that they take.

    Each step gives one token to every decoding sequence and fills the rest of its token budget with
    prompts in order of arrival. So the last queued prompt shares a step with a new one. Tokens of
    the running step no longer count as queued.
    """

    num_prompts: int  # that wait or are computed
    step_s: float  # a step with prompts, but for their tokens
    num_at_once: int  # tokens of prompts in a step
    under_way_s: float  # seconds of the running step as a whole; 0: the worker is idle
    num_later: int  # queued tokens that are in the steps to come
    later_s: float  # what these add to their steps

    @classmethod
    def predict(
        cls,
        times: StepTimeModel,
        num_waiting: int,
        num_queued: int,
        num_decoding: int,
        num_context_tokens: int,
        tpot_slo_s: float = math.inf,
    ) -> Backlog:
        """The backlog of `num_queued` tokens in `num_waiting` prompts on a worker.

        Args:
            num_decoding: sequences that decode on the worker.
            num_context_tokens: total context of these sequences.
            tpot_slo_s: their TPOT SLO, by which the worker limits prompt tokens in its steps.
        """
        decode_s = times.decode_step_s(num_decoding, num_context_tokens)
        step_s = times.per_prompt_step_s + (decode_s if num_decoding else times.per_step_s)
        num_at_once = CHUNK_TOKENS - num_decoding if num_decoding < CHUNK_TOKENS else 1
        if num_decoding and tpot_slo_s != math.inf:
            step_slo_s = TPOT_SHARE * tpot_slo_s
            num_within = prompt_tokens_within(times, step_slo_s, num_decoding, num_context_tokens)
            num_at_once = min(num_at_once, num_within)
        if not num_queued:
            return cls(num_waiting, step_s, num_at_once, decode_s, 0, 0.0)
        queued_s = times.prompts_s(num_queued, 0, num_waiting)
        num_later = num_queued - num_at_once if num_queued > num_at_once else 0
        later_s = queued_s * num_later / num_queued
        under_way_s = step_s + (queued_s - later_s)
        return cls(num_waiting + 1, step_s, num_at_once, under_way_s, num_later, later_s)


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
    adapters: AdapterReport | None = None  # LoRA adapters on its device; None: it takes none
    began_s: float = math.inf  # start of the running step, on the fleet's clock; inf: not known
    tpot_slo_s: float = math.inf  # of the requests of its model; inf: they have none
    streams: RunningStreams | None = None  # None: its model has no TPOT SLO
    is_home: bool = True  # among equals this ingress prefers it; with one ingress, all of them
    stepped_s: float = math.inf  # its last new step, on the fleet's clock
    prompts_s: float = math.inf  # its last new step with prompts

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
        stepped_s: float = math.inf,
        prompts_s: float = math.inf,
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
            num_now = min(num_streams, num_beside)
            streams = RunningStreams.predict(times, tpot_slo_s, num_streams, num_now, num_context)
        return cls(
            worker_id=record.worker_id,
            record=record,
            times=times,
            num_waiting=num_waiting,
            num_uncomputed_tokens=num_uncomputed,
            num_decoding=num_decoding,
            num_context_tokens=num_context,
            num_free_blocks=status.num_free_blocks - blocks_coming,
            backlog=Backlog.predict(
                times, num_waiting, num_uncomputed, num_beside, num_context, tpot_slo_s
            ),
            accepting=status.accepting,
            pulls=pulls,
            host=status.host,
            adapters=status.adapters,
            began_s=began_s,
            tpot_slo_s=tpot_slo_s,
            streams=streams,
            is_home=status.home_ingress in ("", ingress_id),
            stepped_s=stepped_s,
            prompts_s=prompts_s,
        )


def host_id(worker_id: str) -> str:
    """The name of a worker's host tier in the prefix index."""
    return f"{worker_id}/host"
