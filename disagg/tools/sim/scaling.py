"""Autoscaling in a simulation: runs the real autoscaler once per virtual second.

A new worker serves after its start-up time; a worker that is scaled down drains as under Serve.
Starting and draining workers cost worker-hours too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from disagg.config import PoolConfig, TierConfig
from disagg.errors import RequestError
from disagg.ingress.admission_queue import AdmissionQueue
from disagg.messages import WorkerRecord, WorkerStatus
from disagg.router.autoscale import Autoscaler, lacks_tpot
from disagg.router.load_report import Demand, PoolState, RequestTotals, sum_pools
from disagg.router.worker_view import Pool
from disagg.time_model import StepTimeModel

PERIOD_S = 1.0
DRAIN_S = 60.0


def check_slos(tier: TierConfig, prefill: StepTimeModel, decode: StepTimeModel) -> None:
    """Raise `RequestError` if not even a short request on an idle worker meets the SLOs."""
    first_s = prefill.prefill_s(1)
    if first_s > tier.ttft_limit_s:
        raise RequestError(
            f"A prompt of one token takes {first_s:.4f} s, which is longer than the TTFT SLO of"
            f" {tier.ttft_limit_s:g} s, so no number of workers is enough. Raise ttft_slo_s.",
            param="ttft_slo_s",
        )
    lacks = lacks_tpot(tier, decode)
    if lacks:
        raise RequestError(
            f"{lacks}, so no number of workers is enough. Raise tpot_slo_s.", param="tpot_slo_s"
        )


class Member(Protocol):
    """A worker that can be told to stop."""

    def drain(self, leave_by_s: float) -> None: ...

    @property
    def is_idle(self) -> bool: ...


class Scaling:
    """Starts and stops workers of all pools.

    Args:
        start: makes a worker of a pool, which serves from now on; returns its id.
        stop: removes a drained worker.
        members: the present workers by id, oldest first.
    """

    def __init__(
        self,
        tier: TierConfig,
        max_num_workers: int | None,
        demand: Demand,
        admission_queue: AdmissionQueue,
        reports: Callable[[], list[tuple[WorkerRecord, WorkerStatus]]],
        call_at: Callable[..., object],
        start: Callable[[Pool], str],
        stop: Callable[[str], None],
        members: Callable[[], Mapping[str, Member]],
    ) -> None:
        self._autoscaler = Autoscaler((tier,), max_num_workers)
        self._demand = demand
        self._admission_queue = admission_queue
        self._reports = reports
        self._call_at = call_at
        self._start = start
        self._stop = stop
        self._members = members
        self._pools: dict[Pool, PoolConfig] = {
            (tier.name, role): pool for role, pool in tier.pools.items()
        }
        self._serving: dict[Pool, list[str]] = {pool: [] for pool in self._pools}
        self._starting: dict[Pool, list[float]] = {pool: [] for pool in self._pools}  # ready times
        self._draining: dict[Pool, list[str]] = {pool: [] for pool in self._pools}
        self._model, self._before = tier.name, RequestTotals()
        self._paid_s = 0.0
        self._looked_s = 0.0

    @property
    def worker_hours(self) -> float:
        return self._paid_s / 3600.0

    def begin(self, serving: Iterable[tuple[Pool, str]]) -> None:
        """Start with these workers, oldest first."""
        for pool, worker_id in serving:
            self._serving[pool].append(worker_id)
        if any(each.autoscaling is not None for each in self._pools.values()):
            self._call_at(PERIOD_S, self._autoscale, PERIOD_S)

    def pay(self, now: float) -> None:
        """Count the worker-hours of starting, serving and draining workers."""
        for pool in self._pools:
            number = self._num(pool) + len(self._draining[pool])
            self._paid_s += number * (now - self._looked_s)
        self._looked_s = now

    def _autoscale(self, now: float) -> None:
        self.pay(now)
        self._finish(now)
        asked = self._demand.of(self._model)
        self._autoscaler.observe(self._model, now, PERIOD_S, asked.since(self._before))
        self._before = asked
        known = sum_pools(self._reports())
        states: dict[Pool, PoolState] = {}
        for pool in self._pools:
            state = known.get(pool, PoolState())
            num_waiting_tokens = self._admission_queue.num_uncomputed_tokens(pool[0])
            states[pool] = msgspec.structs.replace(
                state,
                num_workers=self._num(pool),
                num_queued_tokens=state.num_queued_tokens + num_waiting_tokens,
            )
        for pool, wanted in self._autoscaler.decide(now, states).items():
            self._resize(pool, wanted.num_workers, now)
        self._call_at(now + PERIOD_S, self._autoscale, now + PERIOD_S)

    def _num(self, pool: Pool) -> int:
        return len(self._serving[pool]) + len(self._starting[pool])

    def _finish(self, now: float) -> None:
        """Let started workers serve, and remove drained ones."""
        for pool, ready in self._starting.items():
            while ready and ready[0] <= now:
                ready.pop(0)
                self._serving[pool].append(self._start(pool))
        members = self._members()
        for draining in self._draining.values():
            for worker_id in list(draining):
                if worker_id not in members or members[worker_id].is_idle:
                    draining.remove(worker_id)
                    self._stop(worker_id)

    def _resize(self, pool: Pool, number: int, now: float) -> None:
        limits = self._pools[pool].autoscaling
        if limits is None:
            return
        while self._num(pool) < number:
            self._starting[pool].append(now + limits.start_s)
        while self._num(pool) > number:
            if self._starting[pool]:
                self._starting[pool].pop()
                continue
            worker_id = self._serving[pool].pop()
            self._draining[pool].append(worker_id)
            member = self._members().get(worker_id)
            if member is not None:
                member.drain(now + DRAIN_S / 2)
