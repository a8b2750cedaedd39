"""Probes: a worker that was slow gets a request now and then, to notice when it recovers.

A worker without requests reports no step times, so the router would never notice that it is fast
again. Therefore, once in `NUM_PER_PROBE` reservations, the worker that has reported no step for
longest is assumed to be as fast as the fastest of its pool, until its next step. Pure; time is an
argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from disagg.messages import StepCosts
from disagg.time_model import CHUNK_TOKENS, StepTimeModel

if TYPE_CHECKING:
    from disagg.router.fleet import WorkerView

NUM_PER_PROBE = 50  # reservations; one request in 50 is slower if the worker is still slow
SILENT_S = 4.0  # step times reported since then are trusted


class Probes:
    """Decides which workers' step times are replaced by those of a faster worker.

    Attributes:
        trusted: the step times that are assumed for workers under probe, by id.
    """

    def __init__(self) -> None:
        self.trusted: dict[str, StepTimeModel] = {}
        self._num_observed: dict[str, int] = {}
        self._learned_s: dict[str, float] = {}
        self._num_reserved = 0

    def heard(self, worker_id: str, costs: StepCosts | None, now: float) -> None:
        num_observed = costs.num_observed if costs is not None else 0
        if self._num_observed.get(worker_id) != num_observed:
            self._num_observed[worker_id] = num_observed
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
        silent = [each for each in workers.values() if self._is_silent(each, now)]
        if not silent:
            return None
        chosen = min(silent, key=lambda each: self._learned_s[each.worker_id])
        pool = (chosen.record.model, chosen.record.role)
        alike = (each for each in workers.values() if (each.record.model, each.record.role) == pool)
        self.trusted[chosen.worker_id] = min((each.times for each in alike), key=_chunk_s)
        return chosen.worker_id

    def _is_silent(self, worker: WorkerView, now: float) -> bool:
        """Whether it takes requests and is believed by what it said long ago."""
        if not worker.accepting or worker.worker_id in self.trusted:
            return False
        return now - self._learned_s.get(worker.worker_id, now) >= SILENT_S


def _chunk_s(times: StepTimeModel) -> float:
    return times.prefill_s(CHUNK_TOKENS)
