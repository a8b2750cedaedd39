"""Prometheus metrics of requests, with vLLM's names and the prefix `disagg_`.

Each is a row of `TABLE`. `ApiMetrics.of` returns a series, to which the caller adds:

    metrics.of("request_success", model, "stop").inc()

Latencies also have the names of OpenTelemetry's GenAI conventions, with exemplars: traces of
requests that took so long. The buckets are those of these conventions. `RequestTimer` observes one
request.
"""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from disagg import semconv, telemetry
from disagg.api.apis import BY_PATH
from disagg.api.http.request_spans import RequestSpans
from disagg.api.request_spec import RequestSlo
from disagg.api.running_job import ChoiceDelta, RunningJob
from disagg.api_keys import DEFAULT_TENANT
from disagg.errors import DisaggError, Overloaded, RefusalReason, Unavailable
from disagg.messages import StageTimes
from disagg.router.cascade import CascadeDecision

# By default there is a second series with the creation time of each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = b"application/openmetrics-text"  # in the `Accept` of those who ask for exemplars
OPEN_METRICS_CONTENT_TYPE = openmetrics.CONTENT_TYPE_LATEST.encode()

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**power for power in range(14))
_NUM_TOKENS = tuple(float(4**power) for power in range(10))

# The stages of a request until its second token, in order: see the help of the metric. Those up to
# `prefill_compute` add up to the TTFT, except for the time between processes.
Stage: TypeAlias = Literal[
    "receive", "tokenize", "queue", "prefix_pull", "prefill_queue", "prefill_compute", "kv_pull",
    "decode_queue", "decode_first_step",
]  # fmt: skip


class RequestMetric(NamedTuple):
    """A metric: its kind, its labels, its HELP, and the buckets of a histogram."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    labels: tuple[str, ...]
    text: str
    buckets: Sequence[float] = ()


_MODEL = "model_name"
_COUNTED = "Counted when a request ends, whether it succeeded or not"
_CONVENTIONAL = tuple(
    name.replace(".", "_")
    for name in (
        semconv.GEN_AI_OPERATION_NAME,
        semconv.GEN_AI_PROVIDER_NAME,
        semconv.GEN_AI_REQUEST_MODEL,
        semconv.GEN_AI_RESPONSE_MODEL,
    )
)
_ERROR_TYPE = semconv.ERROR_TYPE.replace(".", "_")

TABLE = {
    "num_requests_running": RequestMetric(Gauge, (),
        "Number of HTTP requests that this ingress is serving, including those that wait in its"
        " queue and streams"),
    "event_loop_tasks": RequestMetric(Gauge, (),
        "Number of tasks in the event loop of this ingress. It is small and constant without load;"
        " growth without load means a leak"),
    "requests_body_bytes": RequestMetric(Gauge, (),
        "Size of the bodies of all HTTP requests that this ingress is serving, in bytes (limited"
        " by http.max_requests_nbytes)"),
    "queue_num_requests": RequestMetric(Gauge, ("tenant",),
        "Number of requests in the admission queue of this ingress; they wait because all workers"
        " are busy"),
    "queue_bytes": RequestMetric(Gauge, (),
        "Size of the prompts of all requests in the admission queue of this ingress, in bytes"
        " (limited by http.max_queue_nbytes)"),
    "prefix_index_bytes": RequestMetric(Gauge, (),
        "Memory of the prefix index of this ingress, in bytes"),
    "prefix_index_blocks": RequestMetric(Gauge, (),
        "Number of different KV blocks in the prefix index of this ingress, each cached on one or"
        " more workers"),
    "prefix_index_max_blocks": RequestMetric(Gauge, (),
        "Largest number of KV blocks in the prefix index (prefix_index_nbytes). If workers cache"
        " more, the ingress forgets the oldest and misses prefix hits"),
    "prefix_index_evicted_blocks": RequestMetric(Gauge, (),
        "Number of KV blocks that the prefix index has forgotten for lack of room since the"
        " ingress started, although workers may still have them"),
    "tenant_limits_shared": RequestMetric(Gauge, (),
        "1 if tenants' rate limits apply to all ingresses together. 0 if the store that ingresses"
        " share is unreachable, so that each ingress grants the full limits"),
    "http_requests": RequestMetric(Counter, ("route", "code"),
        "Number of HTTP requests by route and status. 499: the client disconnected before the"
        " reply. A stream that fails after its first byte has status 200 (see request_failure)"),
    "request_refused": RequestMetric(Counter, ("route", "reason", "tenant"),
        "Number of requests refused with status 429. reason: predicted_late (the first token was"
        " predicted to miss the deadline or ttft_slo_s), became_late (the same, noticed in the"
        " queue), queue_full, no_room (too many requests in this ingress or on the workers),"
        " tenant_limit (the tenant's limit of requests or tokens is used up)"),
    "request_success": RequestMetric(Counter, (_MODEL, "finish_reason"),
        "Number of complete answers; each choice of a request counts as one"),
    "request_failure": RequestMetric(Counter, (_MODEL, "code"),
        "Number of requests that failed after they were accepted, by error code"),
    "request_disconnect": RequestMetric(Counter, (),
        "Number of requests whose client disconnected before the answer was complete"),
    "request_slo": RequestMetric(Counter, (_MODEL, "outcome", "slo"),
        "Number of accepted requests by outcome: met (TTFT within ttft_slo_s and mean time between"
        " tokens within tpot_slo_s) or missed (also if the request failed). Goodput is the rate of"
        " met. slo: whether the SLO is that of the model, of the request, or none (batch work)"),
    "prompt_tokens": RequestMetric(Counter, (_MODEL, "tenant"),
        f"Number of prompt tokens, cached or not. {_COUNTED}"),
    "cached_prompt_tokens": RequestMetric(Counter, (_MODEL, "tenant"),
        f"Number of prompt tokens whose KV came from a cache. {_COUNTED}"),
    "generation_tokens": RequestMetric(Counter, (_MODEL, "tenant"),
        f"Number of generated tokens. {_COUNTED}"),
    "request_prompt_tokens": RequestMetric(Histogram, (_MODEL,),
        f"Number of prompt tokens of each request. {_COUNTED}", _NUM_TOKENS),
    "request_generation_tokens": RequestMetric(Histogram, (_MODEL,),
        f"Number of generated tokens of each request. {_COUNTED}", _NUM_TOKENS),
    "cascade_answers": RequestMetric(Counter, (_MODEL,),
        'Number of requests for the model "auto" (cascade), by the model that answered'),
    "cascade_escalations": RequestMetric(Counter, (_MODEL, "reason"),
        'Number of requests for the model "auto" that this model passed on to a larger one.'
        " reason: unsure (the log-probabilities of its first tokens were too low) or an error"
        " code"),
    "request_moves": RequestMetric(Counter, (_MODEL,),
        "Number of times that a request was routed to another worker, with its tokens so far,"
        " because a worker or a transfer failed. A request may move several times"),
    "prefix_pulls": RequestMetric(Counter, (_MODEL, "outcome"),
        "Number of prefixes that a worker was to pull from another worker's cache. outcome:"
        " granted (the other worker issued a ticket) or refused (it issued none in time, so the"
        " prefix is computed)"),
    "prefills": RequestMetric(Counter, (_MODEL, "place", "reason"),
        "Number of prompts by the place where they are computed. place: remote (a prefill worker;"
        " the KV then moves to a decode worker) or local (the worker that decodes). reason: the"
        " largest predicted gain over the other place, which is compute (more of the prompt is"
        " cached there, or the worker is faster), queue (its queue is shorter) or"
        " transfer_or_decode (no KV has to move, or no running decodes are delayed); or"
        " other_unavailable (the other place accepts no requests); or moved (the request was"
        " routed again after a failure)"),
    "queue_wait_seconds": RequestMetric(Histogram, ("tenant",),
        "Time that requests waited in the admission queue of this ingress. Requests that did not"
        " wait, or were refused, do not count", _TTFT_S),
    "time_to_first_token_seconds": RequestMetric(Histogram, (_MODEL,),
        "Time from the arrival of a request's headers to its first token (TTFT)", _TTFT_S),
    "e2e_request_latency_seconds": RequestMetric(Histogram, (_MODEL,),
        "Time from the arrival of a request's headers to its last token", _DURATION_S),
    "request_stage_seconds": RequestMetric(Histogram, (_MODEL, "stage"),
        "Time that requests spend in each stage until the second token. Stages until the first"
        " token, in order: receive (HTTP body), tokenize (chat template, tokenization, grammar"
        " check), queue (in the ingress), prefix_pull (asking another worker for a cached prefix),"
        " prefill_queue, prefill_compute. Further stages if a prefill worker computed the prompt:"
        " kv_pull (also the pull of a prefix before prefill), decode_queue, decode_first_step"
        " (includes computing the prompt again after a failed pull)", _TTFT_S),
    semconv.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: RequestMetric(Histogram, _CONVENTIONAL,
        "TTFT of requests that succeeded, from the arrival of a request's headers", _TTFT_S),
    semconv.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: RequestMetric(Histogram, _CONVENTIONAL,
        "Mean time between tokens of each request that succeeded, without its first token",
        _TPOT_S),
    semconv.GEN_AI_SERVER_REQUEST_DURATION: RequestMetric(Histogram, (*_CONVENTIONAL, _ERROR_TYPE),
        "Time from the arrival of a request's headers to its last token or failure. Requests that"
        " were refused or whose client disconnected do not count", _DURATION_S),
}  # fmt: skip


class ApiMetrics:
    """The metrics of an ingress.

    Args:
        ingress: the label of what it counts where there are several ingresses; "" for none.
        slo_s: TTFT and TPOT SLO by model, in seconds; models without SLOs are missing.
        tenants: labels of tenants, whose refusals are counted from 0. A rate needs that: it does
            not see the first refusal of a series that begins with it.
        models: those whose moves are counted from 0.
    """

    def __init__(
        self,
        *,
        ingress: str = "",
        slo_s: Mapping[str, tuple[float, float]] = MappingProxyType({}),
        tenants: Iterable[str] = (DEFAULT_TENANT,),
        models: Iterable[str] = (),
    ) -> None:
        self.registry = CollectorRegistry()  # what it counts; other modules add metrics to it
        self.of_fleet = CollectorRegistry()  # what every ingress shows alike
        self._ingress = {"ingress": ingress} if ingress else {}
        self.clock = time.monotonic
        self.slo_s = slo_s
        self.itl = TokenLatency(
            "disagg_inter_token_latency_seconds",
            "Time between tokens of one answer, measured when they leave this ingress (ITL, TPOT)",
            _TPOT_S,
        )
        self._metrics = {name: self._add(name, row) for name, row in TABLE.items()}
        self._series: dict[tuple[str, ...], MetricWrapperBase] = {}
        self.registry.register(self.itl)
        self.registry.register(_DroppedSpans())
        for labels in product(BY_PATH, get_args(RefusalReason), tenants):
            self.of("request_refused", *labels)
        for model in models:
            self.of("request_moves", model)

    def _add(self, name: str, row: RequestMetric) -> MetricWrapperBase:
        is_conventional = "." in name
        name = f"{name.replace('.', '_')}_seconds" if is_conventional else f"disagg_{name}"
        more: dict[str, Any] = {"buckets": row.buckets} if row.buckets else {}
        return row.kind(name, row.text, row.labels, registry=self.registry, **more)

    def of(self, name: str, *labels: str) -> Any:
        """A series of a metric in `TABLE`. Cached: a request needs a dozen of them, 0.8 us each."""
        key = (name, *labels)
        found = self._series.get(key)
        if found is None:
            metric = self._metrics[name]
            found = self._series[key] = metric.labels(*labels) if labels else metric
        return found

    def sums(self, name: str, *by: str, of: str = "_total") -> dict[tuple[str, ...], float]:
        """A metric's figures, added up over all labels except `by`.

        Args:
            of: which of its figures: "_total" of a counter, "_sum" or "_count" of a histogram.
        """
        found: dict[tuple[str, ...], float] = {}
        for family in self._metrics[name].collect():
            for sample in family.samples:
                if sample.name.endswith(of):
                    labels = tuple(sample.labels[label] for label in by)
                    found[labels] = found.get(labels, 0.0) + sample.value
        return found

    def observe_stage(self, model: str, stage: Stage, seconds: float) -> None:
        """Observe how long a request spent in a stage. The clock may be set back."""
        self.of("request_stage_seconds", model, stage).observe(max(0.0, seconds))

    def observe_worker(self, model: str, times: StageTimes) -> None:
        """Observe the stage times that come with a worker's first token of a request."""
        if times.is_prefill:
            self.observe_stage(model, "prefill_queue", times.queue_s)
            self.observe_stage(model, "prefill_compute", times.compute_s)
        else:
            self.observe_stage(model, "decode_queue", times.queue_s)
            self.observe_stage(model, "decode_first_step", times.compute_s)
        if times.pull_s:
            self.observe_stage(model, "kv_pull", times.pull_s)

    def cascade_decided(self, decision: CascadeDecision) -> None:
        self.of("cascade_answers", decision.model).inc()
        for attempt in decision.attempts[:-1]:
            self.of("cascade_escalations", attempt.model, attempt.reason).inc()

    def expose(self) -> bytes:
        return generate_latest(self._collect())

    def expose_open(self, more: bytes) -> bytes:
        """All metrics and `more`, which is in Prometheus's format, in OpenMetrics' format."""
        others = _Families(tuple(text_string_to_metric_families(more.decode())))
        own: bytes = openmetrics.generate_latest(self._collect())  # type: ignore[no-untyped-call]
        beside: bytes = openmetrics.generate_latest(others)  # type: ignore[no-untyped-call]
        return own.removesuffix(b"# EOF\n") + beside

    def _collect(self) -> _Families:
        own = list(self.registry.collect())
        for family in own if self._ingress else ():
            family.samples = [
                each._replace(labels={**each.labels, **self._ingress}) for each in family.samples
            ]
        return _Families((*own, *self.of_fleet.collect()))


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


class Observations:
    """The observed times of one model."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.seconds = 0.0
        self.counts = [0] * (len(bounds) + 1)  # by bucket; the last bucket has no upper bound
        self._bounds = bounds

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += seconds


class TokenLatency(Collector):
    """A fast histogram, which is observed for each token of each stream; one series per model.

    `prometheus_client.Histogram` takes two locks and searches its buckets one by one, which was a
    twentieth of the work of an ingress for a token. This class needs no locks: only the event loop
    uses it.

    Args:
        bounds: upper bounds of the buckets in seconds, ascending and inclusive.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._models: dict[str, Observations] = {}

    def of(self, model: str) -> Observations:
        if model not in self._models:
            self._models[model] = Observations(self._bounds)
        return self._models[model]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=[_MODEL])
        for model, found in self._models.items():
            buckets, number = [], 0
            for bound, count in zip((*self._bounds, float("inf")), found.counts, strict=True):
                number += count
                le = floatToGoString(bound)  # type: ignore[no-untyped-call]
                buckets.append((le, number))
            family.add_metric([model], buckets, found.seconds)
        return [family]


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
        self._model = run.model.worker_model  # of LoRA adapters too: it has their SLOs
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

    def observe_piece(self, piece: ChoiceDelta) -> bool:
        """Observe a piece that ends no choice. Returns True, as `RunningJob.write_now` should."""
        self.observe_tokens(piece.num_tokens)
        return True

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
        metrics.of("request_prompt_tokens", model).observe(run.num_prompt_tokens)
        metrics.of("request_generation_tokens", model).observe(run.num_completion_tokens)
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
        labels = (self._operation, semconv.PROVIDER, self._run.model.name, self._run.model_name)
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


_EOF = "# EOF\n"
_SERIES = re.compile(r'[\w:]+(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?')


def join_expositions(texts: Iterable[bytes]) -> bytes:
    """One text with all families, and each series once: as the first text has it that has it.

    Every ingress shows all workers, so their series are in each text. What an ingress counts itself
    has its id as a label.
    """
    heads: dict[str, dict[str, str]] = {}  # the comments of a family, by their kind
    series: dict[str, dict[str, str]] = {}  # the lines of a family, by name and labels
    ends = False
    for text in texts:
        family = ""
        for line in text.decode().splitlines(keepends=True):
            if line == _EOF:
                ends = True
            elif line.startswith("# "):
                _, kind, family, *_ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(kind, line)
            elif match := _SERIES.match(line):
                series.setdefault(family, {}).setdefault(match[0], line)
    families = ((*head.values(), *series.get(name, {}).values()) for name, head in heads.items())
    return "".join([*(line for family in families for line in family), _EOF * ends]).encode()
