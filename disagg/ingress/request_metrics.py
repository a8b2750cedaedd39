"""Prometheus counters of routing: reroutes, prefix pulls, places of prefill, time by stage."""

from __future__ import annotations

from typing import Literal

from prometheus_client import Counter

from disagg.api.http.metrics import ApiMetrics, Stage
from disagg.messages import StageTimes
from disagg.router.route import Cause


class RequestMetrics:
    """Counters of one ingress's requests, called a few times for each and never for a token.

    Args:
        api: whose registry and histogram of stages these share.
    """

    def __init__(self, api: ApiMetrics | None = None) -> None:
        self._api = api or ApiMetrics()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"disagg_{name}", text, labels, registry=self._api.registry)

        self._moves = counter(
            "request_moves",
            "Requests that were routed again, with the tokens that they had, after a worker or a"
            " transfer failed. One request may move several times",
            "model_name",
        )
        self._prefix_pulls = counter(
            "prefix_pulls",
            "Cached prefixes that a worker should pull from another one instead of computing them."
            " granted: the other worker issued a ticket; refused: it issued none in time",
            "model_name",
            "outcome",
        )
        self._prefills = counter(
            "prefills",
            "Prompts by where they were sent to be computed. place: remote (a prefill worker; the"
            " KV then moves to a decode worker) or local (the worker that decodes). reason, the"
            " largest predicted gain over the other place: other_unavailable (no other place took"
            " requests), compute (more is cached there, or it is faster), queue (its queue is"
            " shorter), transfer_or_decode (no KV has to move, or no running decodes are delayed);"
            " moved (again, after a failure)",
            "model_name",
            "place",
            "reason",
        )

    def moved(self, model: str) -> None:
        """A request is routed again."""
        self._moves.labels(model).inc()

    def prefix_pull(self, model: str, is_granted: bool) -> None:
        """Another worker was asked for a cached prefix."""
        self._prefix_pulls.labels(model, "granted" if is_granted else "refused").inc()

    def routed(
        self, model: str, place: Literal["local", "remote"], reason: Cause | Literal["moved"]
    ) -> None:
        """A prompt was routed to the worker that computes it."""
        self._api.of(self._prefills, model, place, reason).inc()

    def at_worker(self, model: str, times: StageTimes) -> None:
        """A worker has generated its first token of a request."""
        if times.is_prefill:
            self.staged(model, "prefill_queue", times.queue_s)
            self.staged(model, "prefill_compute", times.compute_s)
        else:
            self.staged(model, "decode_queue", times.queue_s)
            self.staged(model, "decode_first_step", times.compute_s)
        if times.pull_s:
            self.staged(model, "kv_pull", times.pull_s)

    def staged(self, model: str, stage: Stage, seconds: float) -> None:
        """A request has left a stage on its way to its second token."""
        self._api.staged(model, stage, max(0.0, seconds))  # the clock may be set back
