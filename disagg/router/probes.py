"""Probes: a worker that seemed slow gets a prompt now and then, to notice when it no longer is.

A worker without prompts reports no times of steps with prompts, so the router would never notice
that they are short again. Therefore, once in `NUM_PER_PROBE` reservations, the slow worker that has
reported none for longest is assumed to compute prompts as fast as the fastest worker of its model,
until its next step with prompts. Decode workers report steps all the time, and may still be wrong
about prompts. If its decode steps show a slower GPU, its prompts are assumed to take longer by as
much. A worker that has reported no step at all is assumed to be as fast in all as the fastest of
its pool. Pure; time is an argument. Nothing here goes through all workers: a decision waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from disagg.messages import Role, StepCosts, WorkerRecord
from disagg.router.worker_view import Pool, WorkerView
from disagg.time_model import CHUNK_TOKENS, StepTimeModel

NUM_PER_PROBE = 50  # reservations; one request in 50 is slower if the worker is still slow
SILENT_S = 4.0  # step times reported since then are trusted
NUM_LOOKED_AT = 64  # workers that a probe looks at, to find a slow one
# A worker is slow if its prompts take longer by this factor than those of the fastest. One that is
# a little slower gets prompts in any case, when the others are busy.
SLOWER = 1.1


class _Report(msgspec.Struct):
    """What a worker has last reported, and when that was new."""

    num_observed: int
    num_prompts: int
    learned_s: float


class _Fastest(msgspec.Struct):
    """The fastest worker of a pool."""

    worker_id: str
    chunk_s: float
    times: StepTimeModel


class Probes:
    """Decides which workers' step times are replaced by those of a faster worker."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        # Workers that are not under probe, with the time of their last new step with prompts, or of
        # the last look that found them fast enough; longest ago first.
        self._prompts_s: dict[str, float] = {}
        self._assumed: dict[str, tuple[StepTimeModel, bool]] = {}  # and whether for prompts only
        self._fastest: dict[Pool, _Fastest] = {}
        self._num_reserved = 0

    def on_status(self, record: WorkerRecord, costs: StepCosts | None, now: float) -> None:
        worker_id = record.worker_id
        num_observed, num_prompts = (
            (costs.num_observed, costs.num_prompts) if costs is not None else (0, 0)
        )
        report = self._reports.get(worker_id)
        if report is None:
            self._reports[worker_id] = _Report(num_observed, num_prompts, now)
            self._prompts_s[worker_id] = now
        elif report.num_observed == num_observed:
            return
        if costs is not None and num_observed:  # else nobody has measured them
            self._compare(record, StepTimeModel.from_costs(costs))
        if report is None:
            return
        report.num_observed, report.learned_s = num_observed, now
        _, is_of_prompts = self._assumed.get(worker_id, (None, True))
        if report.num_prompts != num_prompts or not is_of_prompts:
            report.num_prompts = num_prompts
            self._last(worker_id, now)
            self._assumed.pop(worker_id, None)

    def _compare(self, record: WorkerRecord, times: StepTimeModel) -> None:
        """Keep the fastest worker of its pool. When that one becomes slower or leaves, the others
        take its place as they report."""
        pool = (record.model, record.role)
        chunk_s = times.prefill_s(CHUNK_TOKENS)
        fastest = self._fastest.get(pool)
        if fastest is None:
            self._fastest[pool] = _Fastest(record.worker_id, chunk_s, times)
        elif chunk_s < fastest.chunk_s or record.worker_id == fastest.worker_id:
            fastest.worker_id = record.worker_id
            fastest.chunk_s, fastest.times = chunk_s, times

    def drop(self, record: WorkerRecord) -> None:
        for each in (self._assumed, self._reports, self._prompts_s):
            each.pop(record.worker_id, None)
        pool = (record.model, record.role)
        fastest = self._fastest.get(pool)
        if fastest is not None and fastest.worker_id == record.worker_id:
            del self._fastest[pool]

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
        for name in list(islice(self._prompts_s, NUM_LOOKED_AT)):
            if now - self._prompts_s[name] < SILENT_S:
                return None
            worker = workers.get(name)
            if worker is not None and worker.accepting:
                decodes = now - self._reports[name].learned_s < SILENT_S
                times = self._yardstick(worker, decodes)
                chunk_s = worker.times.prefill_s(CHUNK_TOKENS)
                if SLOWER * times.prefill_s(CHUNK_TOKENS) < chunk_s:
                    self._assumed[name] = times, decodes
                    del self._prompts_s[name]
                    return name
            self._last(name, now)
        return None

    def _last(self, worker_id: str, now: float) -> None:
        self._prompts_s.pop(worker_id, None)
        self._prompts_s[worker_id] = now

    def _yardstick(self, worker: WorkerView, decodes: bool) -> StepTimeModel:
        """What `worker` is assumed to take.

        Args:
            decodes: it reports steps, so that its GPU is known.
        """
        model, role = worker.record.model, worker.record.role
        roles: Iterable[Role] = ("prefill", "decode") if decodes else (role,)
        fastest = [self._fastest[model, each] for each in roles if (model, each) in self._fastest]
        if not fastest:
            return worker.times
        times = min(fastest, key=lambda each: each.chunk_s).times
        return _on_its_gpu(times, worker.times) if decodes else times


def _on_its_gpu(times: StepTimeModel, own: StepTimeModel) -> StepTimeModel:
    """`times`, slower by as much as a step of `own` takes longer."""
    factor = own.per_step_s / times.per_step_s if times.per_step_s > 0.0 else 1.0
    factor = max(1.0, factor)
    return StepTimeModel.of(factor * seconds for seconds in times.coefficients)


def _with_prompts_of(times: StepTimeModel, own: StepTimeModel) -> StepTimeModel:
    """`own` with prompts computed as `times` says."""
    return msgspec.structs.replace(
        own,
        per_token_s=times.per_token_s,
        per_attended_s=times.per_attended_s,
        per_prompt_step_s=max(0.0, times.prompt_step_s - own.per_step_s),
    )
