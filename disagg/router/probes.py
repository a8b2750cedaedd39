"""Probes: a worker that was slow gets a request now and then, to notice when it recovers.

A worker without requests reports no step times, so the router would never notice that it is fast
again. Therefore, once in `NUM_PER_PROBE` reservations, the worker that has reported no step for
longest is assumed to be as fast as the fastest of its pool, until its next step. Pure; time is an
argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from disagg.messages import StepCosts
from disagg.router.worker_view import WorkerView
from disagg.time_model import CHUNK_TOKENS, StepTimeModel

NUM_PER_PROBE = 50  # reservations; one request in 50 is slower if the worker is still slow
SILENT_S = 4.0  # step times reported since then are trusted
NUM_COMPARED = 64  # workers of a pool, whose fastest is found: a decision waits for it


class Probes:
    """Decides which workers' step times are replaced by those of a faster worker.

    Attributes:
        trusted: the step times that are assumed for workers under probe, by id.
    """

    def __init__(self) -> None:
        self.trusted: dict[str, StepTimeModel] = {}
        self._num_observed: dict[str, int] = {}
        self._learned_s: dict[str, float] = {}  # longest ago first
        self._num_reserved = 0

    def on_status(self, worker_id: str, costs: StepCosts | None, now: float) -> None:
        num_observed = costs.num_observed if costs is not None else 0
        if self._num_observed.get(worker_id) != num_observed:
            self._num_observed[worker_id] = num_observed
            self._learned_s.pop(worker_id, None)
            self._learned_s[worker_id] = now
            self.trusted.pop(worker_id, None)

    def drop(self, worker_id: str) -> None:
        for each in (self.trusted, self._num_observed, self._learned_s):
            each.pop(worker_id, None)

    def reserved(self) -> None:
        self._num_reserved += 1

    def next(self, workers: Mapping[str, WorkerView], now: float) -> str | None:
        """The worker to probe from now on; None: no probe is due."""
        if self._num_reserved < NUM_PER_PROBE:
            return None
        self._num_reserved = 0
        chosen = self._longest_silent(workers, now)
        if chosen is None:
            return None
        pool = (chosen.record.model, chosen.record.role)
        alike = (each for each in workers.values() if (each.record.model, each.record.role) == pool)
        times = [each.times for each in islice(alike, NUM_COMPARED)]
        self.trusted[chosen.worker_id] = min([*times, chosen.times], key=_chunk_s)
        return chosen.worker_id

    def _longest_silent(self, workers: Mapping[str, WorkerView], now: float) -> WorkerView | None:
        """The longest silent worker that takes requests and is not under probe."""
        for worker_id, learned_s in self._learned_s.items():
            if now - learned_s < SILENT_S:
                return None
            worker = workers.get(worker_id)
            if worker is not None and worker.accepting and worker_id not in self.trusted:
                return worker
        return None


def _chunk_s(times: StepTimeModel) -> float:
    return times.prefill_s(CHUNK_TOKENS)
