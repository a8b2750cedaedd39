"""Prometheus metrics of requests, with vLLM's names and our prefix.

Buckets are those of OpenTelemetry's GenAI conventions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Literal, TypeAlias, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase

from disagg.api.http.token_latency import TokenLatency
from disagg.api.running_job import ChoiceDelta, RunningJob
from disagg.api.slo import RequestSlo
from disagg.api_keys import DEFAULT_TENANT
from disagg.errors import DisaggError, Overloaded
from disagg.router.cascade import CascadeDecision

# They would be a second series for each counter and histogram, which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

LabelledMetric = TypeVar("LabelledMetric", bound=MetricWrapperBase)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**power for power in range(14))


# On the way of a request to its second token, in order. Up to `prefill_compute` they make up the
# time to the first token, but for what passes between processes.
Stage: TypeAlias = Literal[
    "receive",  # the body is read
    "tokenize",  # parsing, the chat template, tokens, the check of a grammar
    "queue",  # in the ingress, until a worker was chosen
    "prefix_pull",  # another worker is asked for the prefix that it has cached
    "prefill_queue",  # on the worker that prefills, less the pull of a prefix from another worker
    "prefill_compute",
    "kv_pull",
    "decode_queue",  # on the worker that decodes, less the pull
    "decode_first_step",
]


class ApiMetrics:
    """
    Args:
        registry: what `/metrics` shows; other parts may add to it.
        clock: a monotonic clock in seconds.
        slo_s: by model, to the first token and between tokens; others have none.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        slo_s: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self.clock = clock
        self.slo_s = slo_s
        self._series: dict[tuple[MetricWrapperBase, tuple[str, ...]], MetricWrapperBase] = {}
        self._add_gauges()
        self._add_counters()
        self._add_histograms()

    def _add_gauges(self) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"disagg_{name}", text, labels, registry=self.registry)

        self.num_running = gauge(
            "num_requests_running",
            "HTTP requests that this ingress is answering: those that wait, and streams, included",
        )
        self.num_tasks = gauge(
            "event_loop_tasks",
            "Tasks of this ingress's event loop. At rest a small constant; growth without load is a"
            " leak",
        )
        self.body_nbytes = gauge(
            "requests_body_bytes",
            "Bodies of HTTP requests that this ingress is answering, in bytes (bounded by"
            " http.max_requests_nbytes)",
        )
        self.queue_length = gauge(
            "queue_num_requests",
            "Requests in the admission queue of this ingress, because all workers are busy",
            "tenant",
        )
        self.queue_nbytes = gauge(
            "queue_bytes",
            "Prompts of the requests in the admission queue of this ingress, in bytes (bounded by"
            " http.max_queue_nbytes)",
        )

    def _add_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"disagg_{name}", text, labels, registry=self.registry)

        model, counted = "model_name", "Counted when the answer ends, however it ends"
        self.http_requests = counter(
            "http_requests",
            "HTTP requests by route and status. 499: the client disconnected before the reply."
            " A stream that fails after its first byte has status 200 (see request_failure)",
            "route",
            "code",
        )
        self.refused = counter(
            "request_refused",
            "Requests refused with 429 before any work was done. reason: predicted_late (the first"
            " token would come after the deadline or ttft_slo_s), became_late (noticed in the"
            " queue), queue_full, no_room (too many at once here or on the workers), tenant_limit"
            " (the tenant has used up its requests or tokens)",
            "route",
            "reason",
            "tenant",
        )
        self.success = counter(
            "request_success",
            "Complete answers: one for each choice of a request",
            model,
            "finish_reason",
        )
        self.failure = counter(
            "request_failure",
            "Requests that failed after they were accepted, by the code of the error",
            model,
            "code",
        )
        self.disconnects = counter(
            "request_disconnect",
            "Requests whose client disconnected before the answer was complete",
        )
        self.slo = counter(
            "request_slo",
            "Requests that were answered, by whether they met their SLO: first token within"
            " ttft_slo_s, and the mean time between tokens within tpot_slo_s. missed: also those"
            " that failed. Goodput is the rate of met. slo: the SLO of the model, of the request"
            " itself, or none (batch work)",
            model,
            "outcome",
            "slo",
        )
        self.prompt_tokens = counter(
            "prompt_tokens", f"Tokens of prompts, cached or not. {counted}", model, "tenant"
        )
        self.cached_tokens = counter(
            "cached_prompt_tokens",
            f"Tokens of prompts whose KV was cached somewhere and not computed. {counted}",
            model,
            "tenant",
        )
        self.generation_tokens = counter(
            "generation_tokens", f"Tokens that were generated. {counted}", model, "tenant"
        )
        self.cascade_answers = counter(
            "cascade_answers",
            'Requests for the model "auto" (small model first), by the model that answered',
            model,
        )
        self.cascade_escalations = counter(
            "cascade_escalations",
            'Requests for the model "auto" that this model did not answer, so that a larger one'
            " did. reason: unsure (its first tokens had too low log-probabilities) or the code of"
            " its error",
            model,
            "reason",
        )

    def _add_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"disagg_{name}_seconds", text, labels, buckets=buckets, registry=self.registry
            )

        self.queue_wait = histogram(
            "queue_wait",
            "Time that requests waited in the admission queue of this ingress: of those that had to"
            " wait, and were not refused",
            _TTFT_S,
            "tenant",
        )
        self.ttft = histogram(
            "time_to_first_token",
            "From the arrival of a request's head to its first token (TTFT)",
            _TTFT_S,
            "model_name",
        )
        self.itl = TokenLatency(
            "disagg_inter_token_latency_seconds",
            "Between tokens of one answer, as they leave this ingress (TPOT, ITL)",
            _TPOT_S,
        )
        self.registry.register(self.itl)
        self.e2e = histogram(
            "e2e_request_latency",
            "From the arrival of a request's head to its last token",
            _DURATION_S,
            "model_name",
        )
        self.stages = histogram(
            "request_stage",
            "Where a request's time goes until its second token. Stages of the first token, in"
            " order: receive (HTTP body), tokenize (chat template, tokens, grammar check), queue"
            " (in the ingress), prefix_pull (asking another worker for a cached prefix),"
            " prefill_queue, prefill_compute. Then, if that was on a prefill worker: kv_pull (also"
            " of a prefix from another worker, before prefill), decode_queue, decode_first_step"
            " (with a prompt that is computed again after a failed pull)",
            _TTFT_S,
            "model_name",
            "stage",
        )

    def of(self, metric: LabelledMetric, *labels: str) -> LabelledMetric:
        """`metric.labels(*labels)`, remembered: a request asks for a dozen, 0.8 us each."""
        found = self._series.get((metric, labels))
        if found is None:
            found = self._series[metric, labels] = metric.labels(*labels)
        return cast(LabelledMetric, found)

    def staged(self, model: str, stage: Stage, seconds: float) -> None:
        """A request has left a stage."""
        self.of(self.stages, model, stage).observe(seconds)

    def cascade_decided(self, decision: CascadeDecision) -> None:
        self.cascade_answers.labels(decision.model).inc()
        for attempt in decision.attempts[:-1]:
            self.cascade_escalations.labels(attempt.model, attempt.reason).inc()

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class RequestTimer:
    """Observes one run: when its first token came, how tokens followed, how it ended.

    Use as a context manager around the iteration of the run's batches.

    Args:
        tenant: as metrics call it.
    """

    def __init__(
        self, metrics: ApiMetrics, run: RunningJob, arrived_s: float, tenant: str = DEFAULT_TENANT
    ) -> None:
        self._metrics = metrics
        self._run = run
        self._tenant = tenant
        self._model = run.job.model.name
        self._num_choices = len(run.job.requests)
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
                self._metrics.of(self._metrics.success, self._model, piece.finish_reason).inc()
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        if self._first_s is None:
            self._first_s = now
            self._metrics.of(self._metrics.ttft, self._model).observe(now - self._arrived_s)
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
            metrics.of(metrics.failure, model, error.code).inc()
        metrics.of(metrics.e2e, model).observe(metrics.clock() - self._arrived_s)
        metrics.of(metrics.prompt_tokens, model, self._tenant).inc(run.job.num_prompt_tokens)
        metrics.of(metrics.cached_tokens, model, self._tenant).inc(run.num_cached_tokens)
        metrics.of(metrics.generation_tokens, model, self._tenant).inc(run.num_completion_tokens)
        if model in metrics.slo_s and (error is None or isinstance(error, DisaggError)):
            asked = RequestSlo(run.job.requests[0].ttft_slo_s, run.job.requests[0].tpot_slo_s)
            ttft_slo_s, tpot_slo_s = metrics.slo_s[model]
            has_met = error is None and self._is_in_time(
                asked.ttft_s or ttft_slo_s, asked.tpot_s or tpot_slo_s
            )
            metrics.of(metrics.slo, model, "met" if has_met else "missed", asked.kind).inc()

    def _is_in_time(self, ttft_slo_s: float, tpot_slo_s: float) -> bool:
        if self._first_s is None:
            return True  # an answer without tokens
        num_following = self._run.num_completion_tokens - self._num_choices
        decode_s = (self._last_s - self._first_s) * self._num_choices
        is_early = self._first_s - self._arrived_s <= ttft_slo_s
        return is_early and decode_s <= tpot_slo_s * max(0, num_following)
