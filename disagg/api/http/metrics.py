"""Prometheus metrics of requests, with vLLM's names and the prefix `disagg_`.

Latencies also have the names of OpenTelemetry's GenAI conventions, with exemplars: traces of
requests that took so long. The buckets are those of these conventions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType, TracebackType
from typing import Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from disagg import semconv, telemetry
from disagg.api.apis import BY_PATH
from disagg.api.http.request_spans import RequestSpans
from disagg.api.http.token_latency import TokenLatency
from disagg.api.running_job import ChoiceDelta, RunningJob
from disagg.api.slo import RequestSlo
from disagg.api_keys import DEFAULT_TENANT
from disagg.errors import DisaggError, Overloaded, RefusalReason, Unavailable
from disagg.router.cascade import CascadeDecision

# By default there is a second series with the creation time of each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

LabelledMetric = TypeVar("LabelledMetric", bound=MetricWrapperBase)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = b"application/openmetrics-text"  # in the `Accept` of those who ask for exemplars
OPEN_METRICS_CONTENT_TYPE = openmetrics.CONTENT_TYPE_LATEST.encode()
CUT_BY_DRAIN = "the server stopped"  # message of the cancellation of a request that ran too long

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**power for power in range(14))


# The stages of a request until its second token, in order. Those up to `prefill_compute` add up to
# the TTFT, except for the time between processes.
Stage: TypeAlias = Literal[
    "receive",  # reading the body
    "tokenize",  # parsing, chat template, tokenization, grammar check
    "queue",  # in the ingress, until a worker is chosen
    "prefix_pull",  # asking another worker for a prefix that it has cached
    "prefill_queue",  # on the prefill worker, without the pull of a prefix from another worker
    "prefill_compute",
    "kv_pull",
    "decode_queue",  # on the decode worker, without the pull
    "decode_first_step",
]


class ApiMetrics:
    """The metrics of an ingress.

    Args:
        registry: the registry that `/metrics` shows; other modules add their metrics to it.
        clock: returns monotonic seconds.
        slo_s: TTFT and TPOT SLO by model, in seconds; models without SLOs are missing.
        tenants: labels of tenants, whose refusals are counted from 0. A rate needs that: it does
            not see the first refusal of a series that begins with it.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        slo_s: Mapping[str, tuple[float, float]] = MappingProxyType({}),
        tenants: Iterable[str] = (DEFAULT_TENANT,),
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self.clock = clock
        self.slo_s = slo_s
        self._series: dict[tuple[MetricWrapperBase, tuple[str, ...]], MetricWrapperBase] = {}
        self._add_gauges()
        self._add_counters()
        self._add_histograms()
        self.registry.register(_DroppedSpans())
        for labels in product(BY_PATH, get_args(RefusalReason), tenants):
            self.refused.labels(*labels)

    def _add_gauges(self) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"disagg_{name}", text, labels, registry=self.registry)

        self.num_running = gauge(
            "num_requests_running",
            "Number of HTTP requests that this ingress is serving, including those that wait in"
            " its queue and streams",
        )
        self.num_tasks = gauge(
            "event_loop_tasks",
            "Number of tasks in the event loop of this ingress. It is small and constant without"
            " load; growth without load means a leak",
        )
        self.body_nbytes = gauge(
            "requests_body_bytes",
            "Size of the bodies of all HTTP requests that this ingress is serving, in bytes"
            " (limited by http.max_requests_nbytes)",
        )
        self.queue_length = gauge(
            "queue_num_requests",
            "Number of requests in the admission queue of this ingress; they wait because all"
            " workers are busy",
            "tenant",
        )
        self.queue_nbytes = gauge(
            "queue_bytes",
            "Size of the prompts of all requests in the admission queue of this ingress, in bytes"
            " (limited by http.max_queue_nbytes)",
        )

    def _add_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"disagg_{name}", text, labels, registry=self.registry)

        model, counted = "model_name", "Counted when a request ends, whether it succeeded or not"
        self.http_requests = counter(
            "http_requests",
            "Number of HTTP requests by route and status. 499: the client disconnected before the"
            " reply. A stream that fails after its first byte has status 200 (see request_failure)",
            "route",
            "code",
        )
        self.refused = counter(
            "request_refused",
            "Number of requests refused with status 429. reason: predicted_late (the first token"
            " was predicted to miss the deadline or ttft_slo_s), became_late (the same, noticed in"
            " the queue), queue_full, no_room (too many requests in this ingress or on the"
            " workers), tenant_limit (the tenant's limit of requests or tokens is used up)",
            "route",
            "reason",
            "tenant",
        )
        self.success = counter(
            "request_success",
            "Number of complete answers; each choice of a request counts as one",
            model,
            "finish_reason",
        )
        self.failure = counter(
            "request_failure",
            "Number of requests that failed after they were accepted, by error code",
            model,
            "code",
        )
        self.disconnects = counter(
            "request_disconnect",
            "Number of requests whose client disconnected before the answer was complete",
        )
        self.slo = counter(
            "request_slo",
            "Number of accepted requests by outcome: met (TTFT within ttft_slo_s and mean time"
            " between tokens within tpot_slo_s) or missed (also if the request failed). Goodput is"
            " the rate of met. slo: whether the SLO is that of the model, of the request, or none"
            " (batch work)",
            model,
            "outcome",
            "slo",
        )
        self.prompt_tokens = counter(
            "prompt_tokens", f"Number of prompt tokens, cached or not. {counted}", model, "tenant"
        )
        self.cached_tokens = counter(
            "cached_prompt_tokens",
            f"Number of prompt tokens whose KV came from a cache. {counted}",
            model,
            "tenant",
        )
        self.generation_tokens = counter(
            "generation_tokens", f"Number of generated tokens. {counted}", model, "tenant"
        )
        self.cascade_answers = counter(
            "cascade_answers",
            'Number of requests for the model "auto" (cascade), by the model that answered',
            model,
        )
        self.cascade_escalations = counter(
            "cascade_escalations",
            'Number of requests for the model "auto" that this model passed on to a larger one.'
            " reason: unsure (the log-probabilities of its first tokens were too low) or an error"
            " code",
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
            "Time that requests waited in the admission queue of this ingress. Requests that did"
            " not wait, or were refused, do not count",
            _TTFT_S,
            "tenant",
        )
        self.ttft = histogram(
            "time_to_first_token",
            "Time from the arrival of a request's headers to its first token (TTFT)",
            _TTFT_S,
            "model_name",
        )
        self.itl = TokenLatency(
            "disagg_inter_token_latency_seconds",
            "Time between tokens of one answer, measured when they leave this ingress (ITL, TPOT)",
            _TPOT_S,
        )
        self.registry.register(self.itl)
        self.e2e = histogram(
            "e2e_request_latency",
            "Time from the arrival of a request's headers to its last token",
            _DURATION_S,
            "model_name",
        )
        self.stages = histogram(
            "request_stage",
            "Time that requests spend in each stage until the second token. Stages until the first"
            " token, in order: receive (HTTP body), tokenize (chat template, tokenization, grammar"
            " check), queue (in the ingress), prefix_pull (asking another worker for a cached"
            " prefix), prefill_queue, prefill_compute. Further stages if a prefill worker computed"
            " the prompt: kv_pull (also the pull of a prefix before prefill), decode_queue,"
            " decode_first_step (includes computing the prompt again after a failed pull)",
            _TTFT_S,
            "model_name",
            "stage",
        )
        self._add_conventional_histograms()

    def _add_conventional_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...], *more: str) -> Histogram:
            labels = [
                semconv.GEN_AI_OPERATION_NAME,
                semconv.GEN_AI_PROVIDER_NAME,
                semconv.GEN_AI_REQUEST_MODEL,
                semconv.GEN_AI_RESPONSE_MODEL,
                *more,
            ]
            return Histogram(
                f"{_underscored(name)}_seconds",
                text,
                list(map(_underscored, labels)),
                buckets=buckets,
                registry=self.registry,
            )

        self.gen_ai_ttft = histogram(
            semconv.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
            "TTFT of requests that succeeded, from the arrival of a request's headers",
            _TTFT_S,
        )
        self.gen_ai_tpot = histogram(
            semconv.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
            "Mean time between tokens of each request that succeeded, without its first token",
            _TPOT_S,
        )
        self.gen_ai_duration = histogram(
            semconv.GEN_AI_SERVER_REQUEST_DURATION,
            "Time from the arrival of a request's headers to its last token or failure. Requests"
            " that were refused or whose client disconnected do not count",
            _DURATION_S,
            semconv.ERROR_TYPE,
        )

    def of(self, metric: LabelledMetric, *labels: str) -> LabelledMetric:
        """`metric.labels(*labels)`, cached: a request needs a dozen of them, 0.8 us each."""
        found = self._series.get((metric, labels))
        if found is None:
            found = self._series[metric, labels] = metric.labels(*labels)
        return cast(LabelledMetric, found)

    def staged(self, model: str, stage: Stage, seconds: float) -> None:
        """Observe how long a request spent in a stage."""
        self.of(self.stages, model, stage).observe(seconds)

    def cascade_decided(self, decision: CascadeDecision) -> None:
        self.cascade_answers.labels(decision.model).inc()
        for attempt in decision.attempts[:-1]:
            self.cascade_escalations.labels(attempt.model, attempt.reason).inc()

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    def expose_open(self, more: bytes) -> bytes:
        """All metrics and `more`, which is in Prometheus's format, in OpenMetrics' format."""
        others = _Families(tuple(text_string_to_metric_families(more.decode())))
        own: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
        beside: bytes = openmetrics.generate_latest(others)  # type: ignore[no-untyped-call]
        return own.removesuffix(b"# EOF\n") + beside


class _DroppedSpans(Collector):
    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "disagg_trace_spans_dropped",
            "Number of spans of traces that this ingress lost, because the collector was slow, away"
            " or refused them",
            telemetry.num_dropped(),
        )


class _Families(NamedTuple):
    """Metrics that are collected already."""

    families: tuple[Metric, ...]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _underscored(name: str) -> str:
    """A name of OpenTelemetry as Prometheus writes it."""
    return name.replace(".", "_")


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
        self.gained(num_tokens)

    def gained(self, num_tokens: int) -> None:
        """Observe new tokens that have arrived together. It counts no ends of choices."""
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        if self._first_s is None:
            self._first_s = now
            self._metrics.of(self._metrics.ttft, self._model).observe(now - self._arrived_s)
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
            metrics.of(metrics.failure, model, failure).inc()
        metrics.of(metrics.e2e, model).observe(metrics.clock() - self._arrived_s)
        metrics.of(metrics.prompt_tokens, model, self._tenant).inc(run.job.num_prompt_tokens)
        metrics.of(metrics.cached_tokens, model, self._tenant).inc(run.num_cached_tokens)
        metrics.of(metrics.generation_tokens, model, self._tenant).inc(run.num_completion_tokens)
        if error is None or failure is not None:
            self._observe_as_conventional(failure or "")
        if model in metrics.slo_s and (error is None or failure is not None):
            slo = RequestSlo(run.job.requests[0].ttft_slo_s, run.job.requests[0].tpot_slo_s)
            ttft_slo_s, tpot_slo_s = metrics.slo_s[model]
            has_met = error is None and self._is_in_time(
                slo.ttft_s or ttft_slo_s, slo.tpot_s or tpot_slo_s
            )
            metrics.of(metrics.slo, model, "met" if has_met else "missed", slo.kind).inc()

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
        metrics.of(metrics.gen_ai_duration, *labels, failure).observe(duration_s, exemplar)
        if failure or self._first_s is None:
            return
        ttft_s = self._first_s - self._arrived_s
        metrics.of(metrics.gen_ai_ttft, *labels).observe(ttft_s, exemplar)
        if self._num_following:
            tpot_s = self._decode_s / self._num_following
            metrics.of(metrics.gen_ai_tpot, *labels).observe(tpot_s, exemplar)
