"""Prometheus metrics of routing: reroutes, prefix pulls, places of prefill, time by stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client import Counter

from disagg.api.http.metrics import ApiMetrics, Stage
from disagg.messages import StageTimes
from disagg.router.route import Cause


class RequestMetrics:
    """Metrics of one ingress's requests. Its methods are called per request, never per token.

    Args:
        api: metrics of the API, whose registry and histogram of stages are used.
        models: those whose moves are counted from 0.
    """

    def __init__(self, api: ApiMetrics | None = None, models: Iterable[str] = ()) -> None:
        self._api = api or ApiMetrics()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"disagg_{name}", text, labels, registry=self._api.registry)

        self._moves = counter(
            "request_moves",
            "Number of times that a request was routed to another worker, with its tokens so far,"
            " because a worker or a transfer failed. A request may move several times",
            "model_name",
        )
        for model in models:
            self._moves.labels(model)
        self._prefix_pulls = counter(
            "prefix_pulls",
            "Number of prefixes that a worker was to pull from another worker's cache. outcome:"
            " granted (the other worker issued a ticket) or refused (it issued none in time, so the"
            " prefix is computed)",
            "model_name",
            "outcome",
        )
        self._prefills = counter(
            "prefills",
            "Number of prompts by the place where they are computed. place: remote (a prefill"
            " worker; the KV then moves to a decode worker) or local (the worker that decodes)."
            " reason: the largest predicted gain over the other place, which is compute (more of"
            " the prompt is cached there, or the worker is faster), queue (its queue is shorter) or"
            " transfer_or_decode (no KV has to move, or no running decodes are delayed); or"
            " other_unavailable (the other place accepts no requests); or moved (the request was"
            " routed again after a failure)",
            "model_name",
            "place",
            "reason",
        )

    def moved(self, model: str) -> None:
        """Count a request that is routed again."""
        self._moves.labels(model).inc()

    def prefix_pull(self, model: str, is_granted: bool) -> None:
        """Count a request for another worker's cached prefix."""
        self._prefix_pulls.labels(model, "granted" if is_granted else "refused").inc()

    def routed(
        self, model: str, place: Literal["local", "remote"], reason: Cause | Literal["moved"]
    ) -> None:
        """Count a prompt that was routed to the worker that computes it."""
        self._api.of(self._prefills, model, place, reason).inc()

    def at_worker(self, model: str, times: StageTimes) -> None:
        """Observe the stage times that come with a worker's first token of a request."""
        if times.is_prefill:
            self.staged(model, "prefill_queue", times.queue_s)
            self.staged(model, "prefill_compute", times.compute_s)
        else:
            self.staged(model, "decode_queue", times.queue_s)
            self.staged(model, "decode_first_step", times.compute_s)
        if times.pull_s:
            self.staged(model, "kv_pull", times.pull_s)

    def staged(self, model: str, stage: Stage, seconds: float) -> None:
        """Observe how long a request spent in a stage before its second token."""
        self._api.staged(model, stage, max(0.0, seconds))  # the clock may be set back
