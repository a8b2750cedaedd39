"""The order of waiting requests: by priority, then fair between tenants, then by deadline.

The lowest priority number comes first; among those, the tenant with the least service for its
weight; of one tenant, the earliest deadline. Service is counted in predicted seconds of work, one
scale for prompts, cached prefixes and answers of any length: the virtual token counter of Sheng et
al. (2024), with the time model as its cost function. An idle tenant saves up no credit.

Pure: no clock, no event loop, no worker.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False)
class Waiter:
    """One waiting request.

    key: its order among those of its tenant: priority, deadline, and a number in order of arrival.
    """

    tenant: str
    cost_s: float
    nbytes: int
    key: tuple[int, float, int] = (0, 0.0, 0)

    @property
    def priority(self) -> int:
        return self.key[0]


_key = attrgetter("key")
Waiting = TypeVar("Waiting", bound=Waiter)


class _TenantQueue(Generic[Waiting]):
    """One tenant's requests. served_s: service over weight; only differences have a meaning."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.served_s = 0.0
        self.waiting: list[Waiting] = []  # in order of their keys
        self.waiting_s: defaultdict[int, float] = defaultdict(float)  # costs of these by priority
        self.nbytes = 0

    def rank(self) -> tuple[int, float, int]:
        """Sort key of its first request among the first requests of all tenants."""
        priority, _, number = self.waiting[0].key
        return priority, self.served_s, number


class FairQueue(Generic[Waiting]):
    """Requests of several tenants for one pool of workers.

    Args:
        weight: of a tenant, by name; one of weight 2 is served twice as much as one of weight 1.
    """

    def __init__(self, weight: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self._weight = weight
        # Every tenant that was served: bounded by the number of keys.
        self._tenants: dict[str, _TenantQueue[Waiting]] = {}
        self._active: dict[str, _TenantQueue[Waiting]] = {}  # tenants with waiting requests
        self._reached_s = 0.0  # `served_s` of the tenant that was served last
        self._num = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Waiting]:
        for tenant in self._active.values():
            yield from tenant.waiting

    def num_by_tenant(self) -> dict[str, int]:
        return {tenant.name: len(tenant.waiting) for tenant in self._active.values()}

    def push(self, waiter: Waiting) -> None:
        tenant = self._tenant(waiter.tenant)
        if not tenant.waiting:
            self._catch_up(tenant)
            self._active[tenant.name] = tenant
        insort(tenant.waiting, waiter, key=_key)
        tenant.waiting_s[waiter.priority] += waiter.cost_s
        self._count(tenant, waiter, 1)

    def first(self) -> Waiting | None:
        """The request that is served next."""
        if not self._active:
            return None
        return min(self._active.values(), key=_TenantQueue.rank).waiting[0]

    def serve(self, waiter: Waiting) -> None:
        """Remove the next request and charge its tenant."""
        tenant = self._tenants[waiter.tenant]
        self._reached_s = max(self._reached_s, tenant.served_s)
        tenant.served_s += waiter.cost_s / tenant.weight
        self.remove(waiter)

    def remove(self, waiter: Waiting) -> None:
        """Remove a request without charge, if it is still here."""
        tenant = self._tenants[waiter.tenant]
        place = bisect_left(tenant.waiting, waiter.key, key=_key)
        if place == len(tenant.waiting) or tenant.waiting[place] is not waiter:
            return
        del tenant.waiting[place]
        self._count(tenant, waiter, -1)
        neighbours = tenant.waiting[max(0, place - 1) : place + 1]
        if any(each.priority == waiter.priority for each in neighbours):
            tenant.waiting_s[waiter.priority] -= waiter.cost_s
        else:
            del tenant.waiting_s[waiter.priority]  # with the rounding errors in it
        if not tenant.waiting:
            del self._active[tenant.name]

    def pass_by(self, name: str, cost_s: float) -> None:
        """Charge a tenant for a request that did not have to wait."""
        tenant = self._tenant(name)
        if not tenant.waiting:
            self._catch_up(tenant)
        self._reached_s = max(self._reached_s, tenant.served_s)
        tenant.served_s += cost_s / tenant.weight

    def correct(self, name: str, cost_s: float) -> None:
        """Add to a tenant's charge if a request cost more than charged; negative: it cost less."""
        tenant = self._tenant(name)
        tenant.served_s += cost_s / tenant.weight

    def ahead_s(self, waiter: Waiting) -> float:
        """The work ahead of `waiter`, which is not in the queue yet, in seconds."""
        own = self._tenant(waiter.tenant)
        place = bisect_left(own.waiting, waiter.key, key=_key)
        mine_s = sum(each.cost_s for each in own.waiting[:place])
        if not own.waiting:
            self._catch_up(own)
        begins_s = own.served_s + mine_s / own.weight
        total_s = mine_s
        for tenant in self._active.values():
            if tenant is own:
                continue
            for priority, cost_s in tenant.waiting_s.items():
                if priority < waiter.priority:
                    total_s += cost_s
                elif priority == waiter.priority:
                    lead_s = (begins_s - tenant.served_s) * tenant.weight
                    total_s += min(cost_s, max(0.0, lead_s))
        return total_s

    def longest(self) -> Waiting | None:
        """The last request of the tenant whose requests take the most room for its weight."""
        if not self._active:
            return None
        tenant = max(self._active.values(), key=lambda each: each.nbytes / each.weight)
        return tenant.waiting[-1]

    def room_taken(self, name: str, nbytes: int) -> float:
        """Bytes of a tenant for its weight, with `nbytes` more."""
        tenant = self._tenant(name)
        return (tenant.nbytes + nbytes) / tenant.weight

    def _tenant(self, name: str) -> _TenantQueue[Waiting]:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantQueue(name, self._weight(name))
        return tenant

    def _catch_up(self, tenant: _TenantQueue[Waiting]) -> None:
        tenant.served_s = max(tenant.served_s, self._floor_s())

    def _floor_s(self) -> float:
        if self._active:
            return min(tenant.served_s for tenant in self._active.values())
        return self._reached_s

    def _count(self, tenant: _TenantQueue[Waiting], waiter: Waiting, sign: int) -> None:
        self._num += sign
        self.nbytes += sign * waiter.nbytes
        tenant.nbytes += sign * waiter.nbytes
