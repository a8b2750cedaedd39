"""The stages of a request inside one worker, as spans of its trace.

prefill.queue  prefill.compute      if its prompt is computed here
kv.pull        decode.queue         if its KV comes from another worker
decode                              from the first token here to the last

If a request fails, the span of its last stage has the error.
"""

from __future__ import annotations

from typing import Literal

from disagg import telemetry
from disagg.engine.sched.step import TokenEvent
from disagg.kvtransfer.transport import PullDone
from disagg.messages import GenerateRequest, StageTimes

Stage = Literal["prefill.queue", "prefill.compute", "decode.queue", "decode"]


class Phases:
    """The spans of one request on this worker, and the times of its first token, in Unix seconds.

    Spans cost nothing while tracing is off.
    """

    __slots__ = ("_num_tokens", "_pull_s", "_queue_s", "_since_s", "_stage", "traceparent")

    def __init__(self, request: GenerateRequest, now: float, *, is_prefill: bool) -> None:
        self.traceparent = request.traceparent
        self._stage: Stage = "prefill.queue" if is_prefill else "decode.queue"
        self._since_s = now
        self._num_tokens = 0  # number of tokens in this stage
        self._queue_s = self._pull_s = 0.0

    def pulled(self, seconds: float) -> None:
        """Record that `seconds` of its wait were a KV transfer."""
        self._pull_s += seconds

    def admitted(self, now: float) -> None:
        """Record that the request is part of a step for the first time."""
        self._queue_s = max(0.0, now - self._since_s - self._pull_s)
        self._end(now)
        self._stage = "prefill.compute" if self._stage == "prefill.queue" else "decode"

    def times(self, now: float) -> StageTimes:
        """The stage times when the first token here comes, which is now. Call before `gained`."""
        is_prefill = self._stage.startswith("prefill")
        return StageTimes(is_prefill, self._queue_s, self._pull_s, max(0.0, now - self._since_s))

    def gained(self, now: float, event: TokenEvent) -> None:
        """Record the new tokens of the request."""
        self._num_tokens += len(event.token_ids)
        if self._stage == "prefill.compute" and event.token_ids:
            sequence = event.sequence
            attributes = {
                "disagg.num_prompt_tokens": sequence.num_prompt_tokens,
                "disagg.num_cached_tokens": sequence.num_cached_tokens,
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
