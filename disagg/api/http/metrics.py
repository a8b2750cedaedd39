"""Prometheus metrics of requests, with vLLM's names and our prefix.

Buckets are those of OpenTelemetry's GenAI conventions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from disagg.api.openai.answers import ChoiceDelta, RunningJob
from disagg.errors import DisaggError, Overloaded
from disagg.router.cascade import CascadeDecision

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**power for power in range(14))


class ApiMetrics:
    """
    Args:
        registry: what `/metrics` shows; other parts may add to it.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self.clock = clock
        model = ["model_name"]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, model, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.num_running = Gauge(
            "disagg_num_requests_running", "Requests in flight", registry=self.registry
        )
        self.num_tasks = Gauge(
            "disagg_event_loop_tasks", "Tasks of the event loop", registry=self.registry
        )
        self.body_nbytes = Gauge(
            "disagg_requests_body_bytes", "Bodies of requests in flight", registry=self.registry
        )
        self.refused = counter(
            "disagg_request_refused",
            "Requests that there was no room or no time for",
            ["route", "reason", "tenant"],
        )
        self.queue_length = Gauge(
            "disagg_queue_num_requests",
            "Requests that wait here for their turn",
            ["tenant"],
            registry=self.registry,
        )
        self.queue_nbytes = Gauge("disagg_queue_bytes", "What these take", registry=self.registry)
        self.queue_wait = Histogram(
            "disagg_queue_wait_seconds",
            "Of those who had their turn",
            ["tenant"],
            buckets=_TTFT_S,
            registry=self.registry,
        )
        self.http_requests = counter(
            "disagg_http_requests", "HTTP requests by route and status", ["route", "code"]
        )
        self.success = counter(
            "disagg_request_success", "Answers that came to an end", ["model_name", "finish_reason"]
        )
        self.failure = counter(
            "disagg_request_failure", "Answers that failed after they were accepted",
            ["model_name", "code"],
        )  # fmt: skip
        self.disconnects = counter("disagg_request_disconnect", "Clients that went away", [])
        self.prompt_tokens = counter("disagg_prompt_tokens", "Prompt tokens", model)
        self.cached_tokens = counter("disagg_cached_prompt_tokens", "Of these, not computed", model)
        self.generation_tokens = counter("disagg_generation_tokens", "Tokens of answers", model)
        self.cascade_answers = counter(
            "disagg_cascade_answers",
            "Requests for auto by who answered",
            model,
        )
        self.cascade_escalations = counter(
            "disagg_cascade_escalations",
            "Requests for auto that a model did not answer, and why",
            ["model_name", "reason"],
        )
        self.ttft = histogram(
            "disagg_time_to_first_token_seconds", "From arrival to first token", _TTFT_S
        )
        self.itl = histogram(
            "disagg_inter_token_latency_seconds", "Between tokens of one answer", _TPOT_S
        )
        self.e2e = histogram(
            "disagg_e2e_request_latency_seconds", "From arrival to last token", _DURATION_S
        )

    def cascade_decided(self, decision: CascadeDecision) -> None:
        self.cascade_answers.labels(decision.model).inc()
        for attempt in decision.attempts[:-1]:
            self.cascade_escalations.labels(attempt.model, attempt.reason).inc()

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class RequestTimer:
    """Observes one run: when its first token came, how tokens followed, how it ended.

    Use as a context manager around the iteration of the run's batches.
    """

    def __init__(self, metrics: ApiMetrics, run: RunningJob, arrived_s: float) -> None:
        self._metrics = metrics
        self._run = run
        self._model = run.job.model.name
        self._num_choices = len(run.job.choices)
        self._itl = metrics.itl.labels(self._model)
        self._arrived_s = arrived_s
        self._last_s: float | None = None

    def __enter__(self) -> RequestTimer:
        return self

    def observe(self, batch: Sequence[ChoiceDelta]) -> None:
        num_tokens = 0
        for piece in batch:
            num_tokens += piece.num_tokens
            if piece.finish_reason is not None:
                self._metrics.success.labels(self._model, piece.finish_reason).inc()
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        if self._last_s is None:
            self._metrics.ttft.labels(self._model).observe(now - self._arrived_s)
        else:
            # Choices run side by side: each gains its share of the tokens of this interval.
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
            return  # it was never taken in
        if isinstance(error, DisaggError):
            metrics.failure.labels(model, error.code).inc()
        metrics.e2e.labels(model).observe(metrics.clock() - self._arrived_s)
        metrics.prompt_tokens.labels(model).inc(run.job.num_prompt_tokens)
        metrics.cached_tokens.labels(model).inc(run.num_cached_tokens)
        metrics.generation_tokens.labels(model).inc(run.num_completion_tokens)
