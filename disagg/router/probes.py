"""Probes: a worker that seemed slow gets a prompt now and then, to notice when it no longer is.

A worker without prompts reports no times of steps with prompts, so the router would never notice
that they are short again. Therefore, once in `NUM_PER_PROBE` reservations, the worker that has
reported none for longest is assumed to compute prompts as fast as the fastest worker of its model,
until its next step with prompts. Decode workers report steps all the time, and may still be wrong
about prompts. If its decode steps show a slower GPU, its prompts are assumed to take longer by as
much. A worker that has reported no step at all is assumed to be as fast in all as the fastest of
its pool. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from disagg.messages import StepCosts
from disagg.router.worker_view import WorkerView
from disagg.time_model import CHUNK_TOKENS, StepTimeModel

NUM_PER_PROBE = 50  # reservations; one request in 50 is slower if the worker is still slow
SILENT_S = 4.0  # step times reported since then are trusted
NUM_COMPARED = 64  # workers, whose fastest is found: a decision waits for it


class _Report(msgspec.Struct):
    """What a worker has last reported, and when that was new."""

    num_observed: int
    num_prompts: int
    learned_s: float


class Probes:
    """Decides which workers' step times are replaced by those of a faster worker."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        # Workers that are not under probe, with the time of their last new step with prompts;
        # longest ago first.
        self._prompts_s: dict[str, float] = {}
        self._assumed: dict[str, tuple[StepTimeModel, bool]] = {}  # and whether for prompts only
        self._num_reserved = 0

    def on_status(self, worker_id: str, costs: StepCosts | None, now: float) -> None:
        num_observed, num_prompts = (
            (costs.num_observed, costs.num_prompts) if costs is not None else (0, 0)
        )
        report = self._reports.get(worker_id)
        if report is None:
            self._reports[worker_id] = _Report(num_observed, num_prompts, now)
            self._prompts_s[worker_id] = now
            return
        if report.num_observed == num_observed:
            return
        report.num_observed, report.learned_s = num_observed, now
        _, is_of_prompts = self._assumed.get(worker_id, (None, True))
        if report.num_prompts != num_prompts or not is_of_prompts:
            report.num_prompts = num_prompts
            self._prompts_s.pop(worker_id, None)
            self._prompts_s[worker_id] = now
            self._assumed.pop(worker_id, None)

    def drop(self, worker_id: str) -> None:
        for each in (self._assumed, self._reports, self._prompts_s):
            each.pop(worker_id, None)

    def reserved(self) -> None:
        self._num_reserved += 1

    def assumed(self, worker_id: str, reported: StepTimeModel) -> StepTimeModel:
        """The step times to reckon with, of a worker that reports `reported`."""
        found = self._assumed.get(worker_id)
        if found is None:
            return reported
        times, is_of_prompts = found
        return _with_prompts_of(times, reported) if is_of_prompts else times

    def next(self, workers: Mapping[str, WorkerView], now: float) -> str | None:
        """The worker to probe from now on; None: no probe is due."""
        if self._num_reserved < NUM_PER_PROBE:
            return None
        self._num_reserved = 0
        chosen = self._longest_without_prompts(workers, now)
        if chosen is None:
            return None
        name, record = chosen.worker_id, chosen.record
        decodes = now - self._reports[name].learned_s < SILENT_S
        alike = (
            each.times
            for each in workers.values()
            if each.record.model == record.model and (decodes or each.record.role == record.role)
        )
        fastest = _fastest(alike, chosen.times)
        if decodes:
            fastest = _fastest((_on_its_gpu(fastest, chosen.times),), chosen.times)
        self._assumed[name] = fastest, decodes
        del self._prompts_s[name]
        return name

    def _longest_without_prompts(
        self, workers: Mapping[str, WorkerView], now: float
    ) -> WorkerView | None:
        """The one of the workers that take requests and are not under probe."""
        for worker_id, learned_s in self._prompts_s.items():
            if now - learned_s < SILENT_S:
                return None
            worker = workers.get(worker_id)
            if worker is not None and worker.accepting:
                return worker
        return None


def _fastest(alike: Iterable[StepTimeModel], own: StepTimeModel) -> StepTimeModel:
    return min([*islice(alike, NUM_COMPARED), own], key=lambda times: times.prefill_s(CHUNK_TOKENS))


def _on_its_gpu(times: StepTimeModel, own: StepTimeModel) -> StepTimeModel:
    """`times`, slower by as much as a step of `own` takes longer."""
    per_step_s = times.coefficients[0]
    factor = max(1.0, own.coefficients[0] / per_step_s) if per_step_s > 0.0 else 1.0
    return StepTimeModel(tuple(factor * seconds for seconds in times.coefficients))


def _with_prompts_of(times: StepTimeModel, own: StepTimeModel) -> StepTimeModel:
    """`own` with prompts computed as `times` says."""
    per_step_s, _, _, per_sequence_s, per_context_s, _ = own.coefficients
    _, per_token_s, per_attended_s, _, _, _ = times.coefficients
    per_prompt_step_s = max(0.0, times.prompt_step_s - per_step_s)
    return StepTimeModel(
        (
            per_step_s,
            per_token_s,
            per_attended_s,
            per_sequence_s,
            per_context_s,
            per_prompt_step_s,
        )
    )
