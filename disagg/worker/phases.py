"""A request's stages inside one worker, as spans of its trace.

prefill.queue  prefill.compute      when it is computed here from its first token on
kv.pull        decode.queue         when its KV arrives from elsewhere
decode                              from the first token here to the last
"""

from __future__ import annotations

from disagg import telemetry
from disagg.engine.step import TokenEvent
from disagg.kvtransfer.transport import PullDone
from disagg.messages import GenerateRequest


class Phases:
    """When one request was where. Times are Unix seconds; free unless tracing is on."""

    __slots__ = ("_is_prefill", "_num_tokens", "_since_s", "traceparent")

    def __init__(self, request: GenerateRequest, now: float, *, is_prefill: bool) -> None:
        self.traceparent = request.traceparent
        self._is_prefill = is_prefill
        self._since_s = now
        self._num_tokens = 0

    def admitted(self, now: float) -> None:
        """It is part of a step for the first time."""
        name = "prefill.queue" if self._is_prefill else "decode.queue"
        telemetry.record_span(name, self.traceparent, self._since_s, now)
        self._since_s = now

    def gained(self, now: float, event: TokenEvent) -> None:
        self._num_tokens += len(event.token_ids)
        sequence = event.sequence
        if self._is_prefill:
            self._is_prefill = False
            attributes = {
                "disagg.num_prompt_tokens": sequence.num_prompt_tokens,
                "disagg.num_cached_tokens": sequence.num_cached_tokens,
            }
            telemetry.record_span(
                "prefill.compute", self.traceparent, self._since_s, now, attributes
            )
            self._since_s = now
            self._num_tokens = 0
            return
        if event.is_last:
            telemetry.record_span(
                "decode",
                self.traceparent,
                self._since_s,
                now,
                {"disagg.num_tokens": self._num_tokens},
            )


def record_pull(traceparent: str, done: PullDone, now: float) -> None:
    """The span of one transfer."""
    telemetry.record_span(
        "kv.pull",
        traceparent,
        now - done.seconds,
        now,
        {
            "disagg.kv.nbytes": done.nbytes,
            "disagg.kv.num_blocks": done.num_blocks,
            "disagg.kv.gigabytes_per_s": done.nbytes / max(done.seconds, 1e-9) / 1e9,
            "disagg.kv.error": done.error or "",
        },
    )
