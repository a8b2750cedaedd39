"""Pools of a simulation that follow its load: the product's autoscaler, once a virtual second.

A new worker serves after its start-up time; one that is not wanted any more drains as in Serve.
Both cost worker-hours meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from disagg.config import PoolConfig, TierConfig
from disagg.errors import RequestError
from disagg.messages import Role, WorkerRecord, WorkerStatus
from disagg.router.autoscale import Autoscaler, lacks_tpot, pools
from disagg.router.demand import Asked, Demand
from disagg.router.fleet import Pool
from disagg.router.pool_state import PoolState, states_of
from disagg.router.turns import Turns
from disagg.time_model import StepTimeModel

PERIOD_S = 1.0
DRAIN_S = 60.0


def check_slos(tier: TierConfig, times: StepTimeModel) -> None:
    """Raises `RequestError` where not even a short request on an idle worker holds the SLOs."""
    first_s = times.prefill_s(1)
    if first_s > tier.ttft_slo_s:
        raise RequestError(
            f"A prompt of one token takes {first_s:.4f} s, and the first token is to come after"
            f" {tier.ttft_slo_s:g} s: no number of workers is enough.",
            param="ttft_slo_s",
        )
    lacks = lacks_tpot(tier, times)
    if lacks:
        raise RequestError(f"{lacks}: no number of workers is enough.", param="tpot_slo_s")


class Member(Protocol):
    """A worker that can be told to stop."""

    def drain(self, leave_by_s: float) -> None: ...

    @property
    def is_idle(self) -> bool: ...


class Scaling:
    """Starts and stops workers of one tier.

    Args:
        start: makes a worker of a role, which serves from now on; returns its id.
        stop: takes a drained worker away.
        members: those that are there, by id, oldest first.
    """

    def __init__(
        self,
        tier: TierConfig,
        max_num_workers: int | None,
        demand: Demand,
        turns: Turns,
        reports: Callable[[], list[tuple[WorkerRecord, WorkerStatus]]],
        call_at: Callable[..., object],
        start: Callable[[Role], str],
        stop: Callable[[str], None],
        members: Callable[[], Mapping[str, Member]],
    ) -> None:
        self._tier = tier
        self._autoscaler = Autoscaler([tier], max_num_workers)
        self._demand = demand
        self._turns = turns
        self._reports = reports
        self._call_at = call_at
        self._start = start
        self._stop = stop
        self._members = members
        self._serving: dict[Role, list[str]] = {"prefill": [], "decode": []}
        self._starting: dict[Role, list[float]] = {"prefill": [], "decode": []}  # when ready
        self._draining: list[str] = []
        self._before = Asked()
        self._paid_s = 0.0
        self._looked_s = 0.0

    @property
    def worker_hours(self) -> float:
        return self._paid_s / 3600.0

    def begin(self, serving: Iterable[tuple[Role, str]]) -> None:
        """With those who serve from the beginning, oldest first."""
        for role, worker_id in serving:
            self._serving[role].append(worker_id)
        if any(pool.autoscaling is not None for _, pool in pools(self._tier)):
            self._call_at(PERIOD_S, self._look, PERIOD_S)

    def pay(self, now: float) -> None:
        """Everybody costs: who starts, who serves, who drains."""
        number = len(self._draining)
        number += sum(map(len, self._serving.values())) + sum(map(len, self._starting.values()))
        self._paid_s += number * (now - self._looked_s)
        self._looked_s = now

    def _look(self, now: float) -> None:
        self.pay(now)
        self._finish(now)
        asked = self._demand.of(self._tier.name)
        self._autoscaler.observe(self._tier.name, now, PERIOD_S, asked.since(self._before))
        self._before = asked
        known = states_of(self._reports())
        num_waiting_tokens = self._turns.num_uncomputed_tokens(self._tier.name)
        states: dict[Pool, PoolState] = {}
        for role, _ in pools(self._tier):
            state = known.get((self._tier.name, role), PoolState())
            states[self._tier.name, role] = msgspec.structs.replace(
                state,
                num_workers=self._num(role),
                num_queued_tokens=state.num_queued_tokens + num_waiting_tokens,
            )
        for (_, role), wanted in self._autoscaler.decide(now, states).items():
            self._resize(role, wanted.num_workers, now)
        self._call_at(now + PERIOD_S, self._look, now + PERIOD_S)

    def _num(self, role: Role) -> int:
        return len(self._serving[role]) + len(self._starting[role])

    def _finish(self, now: float) -> None:
        """Who has started serves, and who has drained is gone."""
        for role, ready in self._starting.items():
            while ready and ready[0] <= now:
                ready.pop(0)
                self._serving[role].append(self._start(role))
        members = self._members()
        for worker_id in list(self._draining):
            if worker_id not in members or members[worker_id].is_idle:
                self._draining.remove(worker_id)
                self._stop(worker_id)

    def _resize(self, role: Role, number: int, now: float) -> None:
        pool = self._pool(role)
        if pool.autoscaling is None:
            return
        while self._num(role) < number:
            self._starting[role].append(now + pool.autoscaling.start_s)
        while self._num(role) > number:
            if self._starting[role]:
                self._starting[role].pop()
                continue
            worker_id = self._serving[role].pop()
            self._draining.append(worker_id)
            member = self._members().get(worker_id)
            if member is not None:
                member.drain(now + DRAIN_S / 2)

    def _pool(self, role: Role) -> PoolConfig:
        return self._tier.prefill if role == "prefill" else self._tier.decode
