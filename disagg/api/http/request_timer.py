"""Observes one request: its first token, the times between tokens, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from disagg import semconv
from disagg.api.http.metrics import ApiMetrics
from disagg.api.http.request_spans import RequestSpans
from disagg.api.request_spec import RequestSlo
from disagg.api.running_job import ChoiceDelta, RunningJob
from disagg.api_keys import DEFAULT_TENANT
from disagg.errors import DisaggError, Overloaded, Unavailable

CUT_BY_DRAIN = "the server stopped"  # message of the cancellation of a request that ran too long


def _failure_code(error: BaseException | None) -> str | None:
    """The error code that a client sees; None if the answer is complete or the client has left."""
    if isinstance(error, DisaggError):
        return error.code
    if isinstance(error, asyncio.CancelledError):
        return Unavailable.code if error.args == (CUT_BY_DRAIN,) else None
    return DisaggError.code if isinstance(error, Exception) else None


class RequestTimer:
    """Observes the TTFT, the times between tokens and the end of one run.

    Use it as a context manager around the iteration of the run's batches.

    Args:
        operation: what OpenTelemetry calls the API of the request.
        spans: the request's spans, to which exemplars lead.
        tenant: the tenant's label in metrics.
    """

    def __init__(
        self,
        metrics: ApiMetrics,
        run: RunningJob,
        arrived_s: float,
        operation: str,
        spans: RequestSpans,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self._metrics = metrics
        self._run = run
        self._operation = operation
        self._spans = spans
        self._tenant = tenant
        self._model = run.model.name
        self._num_choices = len(run.requests)
        self._itl = metrics.itl.of(self._model)
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s = arrived_s

    def __enter__(self) -> RequestTimer:
        return self

    def observe(self, batch: Sequence[ChoiceDelta]) -> None:
        num_tokens = 0
        for piece in batch:
            num_tokens += piece.num_tokens
            if piece.finish_reason is not None:
                self._metrics.of("request_success", self._model, piece.finish_reason).inc()
        self.observe_tokens(num_tokens)

    def observe_tokens(self, num_tokens: int) -> None:
        """Observe new tokens that have arrived together. It counts no ends of choices."""
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        if self._first_s is None:
            self._first_s = now
            self._metrics.of("time_to_first_token_seconds", self._model).observe(
                now - self._arrived_s
            )
        else:
            # Choices run in parallel; each of them gets its share of the tokens of this interval.
            self._itl.observe((now - self._last_s) * self._num_choices / num_tokens)
        self._last_s = now

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        metrics, model, run = self._metrics, self._model, self._run
        if isinstance(error, Overloaded):
            return  # the request was refused
        failure = _failure_code(error)
        if failure is not None:
            metrics.of("request_failure", model, failure).inc()
        metrics.of("e2e_request_latency_seconds", model).observe(metrics.clock() - self._arrived_s)
        metrics.of("prompt_tokens", model, self._tenant).inc(run.num_prompt_tokens)
        metrics.of("cached_prompt_tokens", model, self._tenant).inc(run.num_cached_tokens)
        metrics.of("generation_tokens", model, self._tenant).inc(run.num_completion_tokens)
        if error is None or failure is not None:
            self._observe_as_conventional(failure or "")
        if model in metrics.slo_s and (error is None or failure is not None):
            slo = RequestSlo(run.requests[0].ttft_slo_s, run.requests[0].tpot_slo_s)
            ttft_slo_s, tpot_slo_s = metrics.slo_s[model]
            has_met = error is None and self._is_in_time(
                slo.ttft_s or ttft_slo_s, slo.tpot_s or tpot_slo_s
            )
            metrics.of("request_slo", model, "met" if has_met else "missed", slo.kind).inc()

    def _is_in_time(self, ttft_slo_s: float, tpot_slo_s: float) -> bool:
        if self._first_s is None:
            return True  # an answer without tokens
        is_early = self._first_s - self._arrived_s <= ttft_slo_s
        return is_early and self._decode_s <= tpot_slo_s * self._num_following

    @property
    def _num_following(self) -> int:
        """Number of tokens after the first one of each choice."""
        return max(0, self._run.num_completion_tokens - self._num_choices)

    @property
    def _decode_s(self) -> float:
        """Seconds from the first to the last token, added up over the choices."""
        return 0.0 if self._first_s is None else (self._last_s - self._first_s) * self._num_choices

    def _observe_as_conventional(self, failure: str) -> None:
        metrics, exemplar = self._metrics, self._spans.exemplar
        labels = (self._operation, semconv.PROVIDER, self._model, self._run.model_name)
        duration_s = metrics.clock() - self._arrived_s
        metrics.of(semconv.GEN_AI_SERVER_REQUEST_DURATION, *labels, failure).observe(
            duration_s, exemplar
        )
        if failure or self._first_s is None:
            return
        ttft_s = self._first_s - self._arrived_s
        metrics.of(semconv.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, *labels).observe(ttft_s, exemplar)
        if self._num_following:
            tpot_s = self._decode_s / self._num_following
            metrics.of(semconv.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, *labels).observe(
                tpot_s, exemplar
            )
