"""The streams of a worker: turns a `Start` into a sequence, and the events of a step into deltas.

It is used by the engine's thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from disagg import telemetry
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.errors import DisaggError, EngineFailed, Overloaded, RequestFailed, request_failed
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone
from disagg.messages import GenerateRequest, StageTimes, Start, TokenDelta, WireError

log = logging.getLogger(__name__)

# Bytes per token of a waiting request: an integer, its place in a list, and its share of a block
# hash. Measured: 39.7.
TOKEN_NBYTES = 40

LinkId = int
Leave = Callable[[Sequence], KVTicket]
GiveUp = Callable[[Sequence], None]


Stage = Literal["prefill.queue", "prefill.compute", "decode.queue", "decode"]


class Phases:
    """The stages of one request on this worker, as spans of its trace, and the times of its first
    token. Times are Unix seconds. Spans cost nothing while tracing is off.

    prefill.queue  prefill.compute      if its prompt is computed here
    kv.pull        decode.queue         if its KV comes from another worker
    decode                              from the first token here to the last

    If the request fails, the span of its last stage has the error.
    """

    __slots__ = (
        "_num_tokens",
        "_pull_lane",
        "_pull_nbytes",
        "_pull_s",
        "_queue_s",
        "_since_s",
        "_stage",
        "traceparent",
    )

    def __init__(self, request: GenerateRequest, now: float, *, is_prefill: bool) -> None:
        self.traceparent = request.traceparent
        self._stage: Stage = "prefill.queue" if is_prefill else "decode.queue"
        self._since_s = now
        self._num_tokens = 0  # number of tokens in this stage
        self._queue_s = self._pull_s = 0.0
        self._pull_nbytes, self._pull_lane = 0, ""

    def pulled(self, seconds: float, nbytes: int, lane: str) -> None:
        """Record that `seconds` of its wait were a KV transfer, which brought `nbytes`."""
        self._pull_s += seconds
        self._pull_nbytes += nbytes
        self._pull_lane = lane

    def admitted(self, now: float) -> None:
        """Record that the request is part of a step for the first time."""
        self._queue_s = max(0.0, now - self._since_s - self._pull_s)
        self._end(now)
        self._stage = "prefill.compute" if self._stage == "prefill.queue" else "decode"

    def times(self, now: float) -> StageTimes:
        """The stage times when the first token here comes, which is now. Call before `gained`."""
        is_prefill = self._stage.startswith("prefill")
        return StageTimes(
            is_prefill,
            self._queue_s,
            self._pull_s,
            max(0.0, now - self._since_s),
            self._pull_nbytes,
            self._pull_lane,
        )

    def gained(self, now: float, event: TokenEvent) -> None:
        """Record the new tokens of the request."""
        self._num_tokens += len(event.token_ids)
        if self._stage == "prefill.compute" and event.token_ids:
            sequence = event.sequence
            attributes = {
                "disagg.num_prompt_tokens": sequence.num_prompt_tokens,
                "disagg.num_cached_tokens": sequence.num_cached_prompt_tokens,
            }
            self._end(now, attributes)
            self._stage, self._num_tokens = "decode", 0
        elif event.is_last:
            attributes = {"disagg.num_tokens": self._num_tokens} if self._num_tokens else {}
            self._end(now, attributes, event.error)

    def cancelled(self, now: float) -> None:
        """Record that nobody waits for the request any more."""
        self._end(now, {telemetry.CANCELLED: True, "disagg.num_tokens": self._num_tokens})

    def failed(self, now: float, error: Exception) -> None:
        self._end(now, None, error)

    def _end(
        self,
        now: float,
        attributes: telemetry.Attributes | None = None,
        error: Exception | None = None,
    ) -> None:
        telemetry.record_span(self._stage, self.traceparent, self._since_s, now, attributes, error)
        self._since_s = now


def record_pull(traceparent: str, done: PullDone, now: float) -> None:
    """Record the span of one KV transfer."""
    telemetry.record_span(
        "kv.pull",
        traceparent,
        now - done.seconds,
        now,
        {
            "disagg.kv.nbytes": done.nbytes,
            "disagg.kv.num_blocks": done.num_blocks,
            "disagg.kv.gigabytes_per_s": done.nbytes / max(done.seconds, 1e-9) / 1e9,
            "disagg.kv.lane": done.lane,
        },
        done.error,
    )


@dataclass(slots=True)
class WorkerStream:
    """One request of one link while it is on this worker.

    request_id: the client's, for the log; that of `sequence` is the worker's own.
    """

    request_id: str
    link_id: LinkId
    stream_id: int
    sequence: Sequence
    phases: Phases
    nbytes: int  # memory of the prompt, a draft and a grammar
    is_first_delta: bool = True


def check_room(nbytes: int, num_requests: int, max_nbytes: int) -> None:
    """Check the bound on the memory of all requests on this worker.

    A single request is always allowed; its length is checked elsewhere.

    Args:
        nbytes: memory of all requests, including the new one.
        num_requests: number of these requests.

    Raises:
        Overloaded: there is no room here; another worker may have room.
    """
    if nbytes > max_nbytes and num_requests > 1:
        raise Overloaded(
            f"The requests on this worker already fill the {max_nbytes} bytes that they may use;"
            " try again shortly."
        )


def sequence_id(link_id: LinkId, stream_id: int) -> str:
    """The id of a stream's sequence and ticket, unique in this process whatever clients send."""
    return f"{link_id}/{stream_id}"


def is_of_link(name: str, link_id: LinkId) -> bool:
    """Whether a sequence or ticket belongs to this link."""
    return name.startswith(f"{link_id}/")


class Streams:
    """All open streams of a worker.

    nbytes: memory of all their prompts, whether waiting, being imported, or running.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._by_sequence: dict[str, WorkerStream] = {}
        self._queued: dict[str, WorkerStream] = {}  # streams that are not in a step yet

    @property
    def num_open(self) -> int:
        return len(self._by_sequence)

    def open(self, link_id: LinkId, start: Start, now: float) -> Sequence:
        """Make the sequence of a request. Stream ids are unique on a link."""
        sequence = Sequence(start.request, hand_over=start.hand_over)
        sequence.request_id = sequence_id(link_id, start.stream_id)
        num_elsewhere = 0 if start.ticket is None else start.ticket.num_tokens
        is_prefill = num_elsewhere < len(sequence.tokens) - 1  # a pulled prefix is shorter
        phases = Phases(start.request, now, is_prefill=is_prefill)
        num_tokens = len(sequence.tokens) + len(start.request.draft_token_ids)
        grammar = sequence.sampling.grammar
        nbytes = TOKEN_NBYTES * num_tokens + (0 if grammar is None else len(grammar.source))
        request_id = start.request.request_id
        stream = WorkerStream(request_id, link_id, start.stream_id, sequence, phases, nbytes)
        self._by_sequence[sequence.request_id] = stream
        self.nbytes += nbytes
        self._queued[sequence.request_id] = stream
        return sequence

    def cancel(self, name: str, now: float) -> None:
        """Forget a stream that nobody waits for any more, if it is open."""
        stream = self._by_sequence.get(name)
        if stream is not None:
            stream.phases.cancelled(now)
            self._close(name)

    def _close(self, name: str) -> None:
        stream = self._by_sequence.pop(name, None)
        if stream is not None:
            self.nbytes -= stream.nbytes
        self._queued.pop(name, None)

    def is_open(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._by_sequence

    def of_link(self, link_id: LinkId) -> list[str]:
        return [name for name, each in self._by_sequence.items() if each.link_id == link_id]

    def pulled(self, sequence: Sequence, seconds: float, nbytes: int, lane: str) -> None:
        """Record that the transfer of a sequence has ended, with 0 bytes if it failed."""
        stream = self._by_sequence.get(sequence.request_id)
        if stream is not None:
            stream.phases.pulled(seconds, nbytes, lane)

    def deltas(
        self,
        events: tuple[TokenEvent, ...],
        leave: Leave,
        give_up: GiveUp,
        now: float,
        step_s: float,
    ) -> dict[LinkId, list[TokenDelta]]:
        """The deltas of a step, for each link.

        Args:
            leave: turns a sequence that was handed over into a ticket for its blocks.
            give_up: removes a sequence in any state. It is called if one request fails here, so
                that only this request ends.
            now: Unix seconds at the end of the step, which took `step_s`.
        """
        self._end_queues(now - step_s)
        deltas: dict[LinkId, list[TokenDelta]] = {}
        for event in events:
            stream = self._by_sequence.get(event.sequence.request_id)
            if stream is None:
                continue
            is_last = event.is_last
            try:
                if is_last or stream.is_first_delta or event.logprobs is not None:
                    ticket = leave(event.sequence) if event.left else None
                    delta = _delta(event, stream, ticket, now)
                else:
                    delta = TokenDelta(stream.stream_id, event.token_ids)
                stream.phases.gained(now, event)
                if isinstance(event.error, RequestFailed | EngineFailed):
                    _log_failed(stream, event.error)
            except Exception as error:
                failed = request_failed(error)
                _log_failed(stream, failed)
                stream.phases.failed(now, failed)
                self._close(event.sequence.request_id)
                give_up(event.sequence)
                delta = TokenDelta(stream.stream_id, (), error=WireError.from_error(failed))
                is_last = True
            deltas.setdefault(stream.link_id, []).append(delta)
            if is_last:
                self._close(event.sequence.request_id)
        return deltas

    def early_delta(self, sequence: Sequence, ticket: KVTicket) -> tuple[LinkId, TokenDelta]:
        """The delta that sends an early ticket on the open stream of a sequence."""
        stream = self._by_sequence[sequence.request_id]
        return stream.link_id, TokenDelta(stream.stream_id, (), early_ticket=ticket)

    def fail_all(self, error: DisaggError) -> dict[LinkId, list[TokenDelta]]:
        """End every open stream with an error. Returns their last deltas."""
        deltas: dict[LinkId, list[TokenDelta]] = {}
        for stream in self._by_sequence.values():
            last = TokenDelta(stream.stream_id, (), error=WireError.from_error(error))
            deltas.setdefault(stream.link_id, []).append(last)
        self._by_sequence.clear()
        self._queued.clear()
        self.nbytes = 0
        return deltas

    def _end_queues(self, step_began_s: float) -> None:
        admitted = [name for name, each in self._queued.items() if each.sequence.was_admitted]
        for name in admitted:
            self._queued.pop(name).phases.admitted(step_began_s)


def _log_failed(stream: WorkerStream, error: RequestFailed | EngineFailed) -> None:
    extra = {"request_id": stream.request_id}
    # An engine's failure ends many requests, and is logged once with its traceback.
    cause = error.__cause__ if isinstance(error, RequestFailed) else None
    log.error("A request is ended: %s", error.message, exc_info=cause, extra=extra)


def _delta(
    event: TokenEvent, stream: WorkerStream, ticket: KVTicket | None, now: float
) -> TokenDelta:
    num_cached_tokens, times, prompt_logprobs, pooled = 0, None, None, None
    if stream.is_first_delta:
        stream.is_first_delta = False
        num_cached_tokens = event.sequence.num_cached_prompt_tokens
        times = stream.phases.times(now) if event.token_ids else None
        prompt_logprobs = event.sequence.take_prompt_logprobs()
        pooled = event.sequence.pooled
    return TokenDelta(
        stream.stream_id,
        event.token_ids,
        event.finish_reason,
        event.logprobs,
        num_cached_tokens,
        ticket,
        None if event.error is None else WireError.from_error(event.error),
        times=times,
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
    )
