"""An ingress's load report for the autoscaler, and what is in it.

By model: requests so far, and prompts that wait in the ingress (`Demand`). By pool: step times,
load and free blocks of the workers (`PoolState`). A report is numbers by name: Serve carries
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from disagg.messages import Role, WorkerRecord, WorkerStatus
from disagg.router.worker_view import Pool
from disagg.time_model import NUM_STEP_FEATURES, StepTimeModel


class RequestTotals(NamedTuple):
    num_requests: float = 0.0
    num_prompt_tokens: float = 0.0
    num_cached_tokens: float = 0.0  # of these, cached on the chosen worker
    num_output_tokens: float = 0.0  # expected: each answer counts with the usual length
    num_squared_tokens: float = 0.0  # sum of the squares of the prompts' lengths

    def plus(self, other: RequestTotals) -> RequestTotals:
        return RequestTotals(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def length_variability(self) -> float:
        """Variance of the prompts' lengths over their squared mean."""
        mean = self.num_prompt_tokens / self.num_requests if self.num_requests else 0.0
        if not mean:
            return 0.0
        return max(0.0, self.num_squared_tokens / self.num_requests / mean**2 - 1.0)

    def since(self, before: RequestTotals) -> RequestTotals:
        return RequestTotals(*(now - then for now, then in zip(self, before, strict=True)))


class Demand:
    """Totals of one ingress since its start, by model."""

    def __init__(self) -> None:
        self._asked: dict[str, RequestTotals] = {}

    def of(self, model: str) -> RequestTotals:
        return self._asked.get(model, RequestTotals())

    def arrived(self, model: str, num_prompt_tokens: int, usual_output_tokens: float) -> None:
        """Count a request, whether it is served or refused."""
        squared = float(num_prompt_tokens) ** 2
        one = RequestTotals(1.0, num_prompt_tokens, 0.0, usual_output_tokens, squared)
        self._asked[model] = self.of(model).plus(one)

    def hit(self, model: str, num_cached_tokens: int) -> None:
        """Count prompt tokens that were cached on the chosen worker."""
        self._asked[model] = self.of(model).plus(RequestTotals(0.0, 0.0, num_cached_tokens))


class PoolState(msgspec.Struct, frozen=True):
    """The state of a pool at one moment.

    num_workers: running and starting.
    times: of one worker; None until one has run a step.
    num_queued_tokens: of prompts, still to be computed in the whole pool or waiting for it.
    num_decoding, num_context_tokens: sequences of the whole pool, and their tokens.
    max_num_seqs, num_kv_tokens: room on one worker; 0: not known.
    """

    num_workers: int = 0
    times: StepTimeModel | None = None
    num_queued_tokens: float = 0.0
    num_decoding: float = 0.0
    num_context_tokens: float = 0.0
    max_num_seqs: int = 0
    num_kv_tokens: int = 0


def sum_pools(reports: Iterable[tuple[WorkerRecord, WorkerStatus]]) -> dict[Pool, PoolState]:
    """The state of each pool. Its step times are those of the worker with the most steps."""
    states: dict[Pool, PoolState] = {}
    num_learned: dict[Pool, int] = {}
    for record, status in reports:
        pool: Pool = (record.model, record.role)
        before = states.get(pool, PoolState())
        times, costs = before.times, status.step_costs
        if costs is not None and costs.num_observed > num_learned.get(pool, 0):
            num_learned[pool] = costs.num_observed
            times = StepTimeModel.from_costs(costs)
        states[pool] = PoolState(
            before.num_workers + 1,
            times,
            before.num_queued_tokens + status.num_uncomputed_tokens,
            before.num_decoding + status.num_running,
            before.num_context_tokens + status.num_context_tokens,
            record.max_num_seqs,
            record.num_blocks * record.block_size,
        )
    return states


_LOAD_FIELDS = ("num_queued_tokens", "num_decoding", "num_context_tokens")
_ROOM_FIELDS = ("max_num_seqs", "num_kv_tokens")


def report(
    demand: Demand, num_waiting_tokens: Mapping[str, int], states: Mapping[Pool, PoolState]
) -> dict[str, float]:
    """The report of one ingress.

    Args:
        num_waiting_tokens: of all models, uncomputed tokens of the prompts that wait in it.
    """
    said: dict[str, float] = {}
    for model, num_tokens in num_waiting_tokens.items():
        said[f"waiting/{model}/num_tokens"] = float(num_tokens)
        for name, value in demand.of(model)._asdict().items():
            said[f"asked/{model}/{name}"] = float(value)
    for (model, role), state in states.items():
        for field in (*_LOAD_FIELDS, *_ROOM_FIELDS):
            said[f"{role}/{model}/{field}"] = float(getattr(state, field))
        if state.times is not None:
            for number, seconds in enumerate(state.times.coefficients):
                said[f"{role}/{model}/times{number}"] = seconds
    return said


def read_totals(said: Mapping[str, float], model: str) -> RequestTotals:
    return RequestTotals(
        *(said.get(f"asked/{model}/{field}", 0.0) for field in RequestTotals._fields)
    )


def read_pool_state(reports: Iterable[Mapping[str, float]], model: str, role: Role) -> PoolState:
    """The pools' states from the reports of all ingresses.

    Every ingress gets the reports of all workers, so the largest figure is the most recent. Waiting
    prompts of the ingresses are added up, and count for both pools.
    """
    found = list(reports)

    def most(field: str) -> float:
        return max((each.get(f"{role}/{model}/{field}", 0.0) for each in found), default=0.0)

    times = None
    for each in found:
        values = [each.get(f"{role}/{model}/times{n}") for n in range(NUM_STEP_FEATURES)]
        if None not in values:
            times = StepTimeModel.of(value for value in values if value is not None)
    queued, decoding, num_context = map(most, _LOAD_FIELDS)
    queued += sum(each.get(f"waiting/{model}/num_tokens", 0.0) for each in found)
    seqs, kv_tokens = (int(most(field)) for field in _ROOM_FIELDS)
    return PoolState(0, times, queued, decoding, num_context, seqs, kv_tokens)
