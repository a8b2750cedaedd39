"""What the API counts, under the names vLLM's dashboards use with our prefix.

Buckets are those of OpenTelemetry's GenAI conventions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        self.ttft = histogram(
            "disagg_time_to_first_token_seconds", "From arrival to first token", _TTFT_S
        )
        self.itl = histogram(
            "disagg_inter_token_latency_seconds", "Between tokens of one answer", _TPOT_S
        )
        self.e2e = histogram(
            "disagg_e2e_request_latency_seconds", "From arrival to last token", _DURATION_S
        )

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class RequestTimer:
    """Observes one request: when its first token came, how tokens followed, when it ended."""

    def __init__(self, metrics: ApiMetrics, model: str, num_choices: int, arrived_s: float) -> None:
        self._metrics = metrics
        self._model = model
        self._ttft = metrics.ttft.labels(model)
        self._itl = metrics.itl.labels(model)
        self._num_choices = num_choices
        self._arrived_s = arrived_s
        self._last_s: float | None = None

    def tokens(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = self._metrics.clock()
        if self._last_s is None:
            self._ttft.observe(now - self._arrived_s)
        else:
            # Choices run side by side: each gains its share of the tokens of this interval.
            gap_s = (now - self._last_s) * self._num_choices / num_tokens
            self._itl.observe(gap_s)
        self._last_s = now

    def ended(self, num_prompt: int, num_cached: int, num_completion: int) -> None:
        metrics, model = self._metrics, self._model
        metrics.e2e.labels(model).observe(metrics.clock() - self._arrived_s)
        metrics.prompt_tokens.labels(model).inc(num_prompt)
        metrics.cached_tokens.labels(model).inc(num_cached)
        metrics.generation_tokens.labels(model).inc(num_completion)
