"""What one ingress knows about all workers: a `FleetView` for decisions.

`Fleet` observes the links and keeps the view. A worker is in the view from its snapshot until its
link ends. A view combines what workers report with what this ingress has sent them since
(`Reservations`): without that, all requests of one millisecond would choose the same worker.

No sockets; time is given.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from disagg.blocks import BlockHash
from disagg.messages import KVEvent, StepCosts, WorkerRecord, WorkerStatus
from disagg.router.admission import FirstTokens
from disagg.router.output_length import OutputLengths
from disagg.router.prefix_index import PrefixIndex
from disagg.router.worker_pools import ModelPools
from disagg.router.worker_view import RequestLoad, WorkerView, host_id
from disagg.time_model import StepTimeModel

# Reports after which a reservation ends: that of the step in which the request arrives, and the
# first one that includes it. Another report may be in flight when the request is sent. Waiting for
# that one too would count most requests twice during one step, which was the largest error of
# predicted first tokens.
NUM_STATUSES_UNTIL_SEEN = 2

NUM_PER_EXPLORED = 50  # reservations; one request in 50 takes longer if the worker is still slow


class Exploration:
    """Says when a prompt should go to a worker that seems slow, to measure it again."""

    def __init__(self) -> None:
        self.num_reserved = 0

    def is_due(self) -> bool:
        """Whether this decision should explore; the next ones should not."""
        if self.num_reserved < NUM_PER_EXPLORED:
            return False
        self.num_reserved = 0
        return True


class FleetView(msgspec.Struct, frozen=True):
    """All routable workers, for one decision. A decision never awaits, so the view cannot change
    meanwhile.

    Always current: a copy for each decision would cost more than the decision itself in a fleet of
    a thousand workers that all report.
    """

    workers: Mapping[str, WorkerView]
    answers: OutputLengths
    first_tokens: Mapping[str, FirstTokens]  # by model; every model has one
    queued: Mapping[str, int]  # requests of each model that wait in this ingress
    pools: Mapping[str, ModelPools]  # by model
    exploration: Exploration

    def num_accepting(self, model: str) -> int:
        """Workers of a model that take requests."""
        pools = self.pools.get(model)
        return 0 if pools is None else pools.num_workers


class Reservation:
    """A claim of one request on one worker. Opaque to its owner."""

    __slots__ = ("load", "num_until_seen", "worker_id")

    def __init__(self, worker_id: str, load: RequestLoad) -> None:
        self.worker_id = worker_id
        self.load = load
        self.num_until_seen: int | None = None  # statuses of its worker; None: it is not sent yet


class Reservations:
    """Requests that this ingress has routed and that the workers' reports do not include yet.

    A reservation counts from the routing decision until enough reports have arrived after `sent`,
    or until `release` (first token, or the end), whichever comes first.
    """

    def __init__(self) -> None:
        self._reservations: dict[str, set[Reservation]] = {}
        # Their sums: a burst reserves for hundreds of requests, and asks for it with each.
        self._loads: dict[str, RequestLoad] = {}

    def reserve(self, worker_id: str, load: RequestLoad) -> Reservation:
        reservation = Reservation(worker_id, load)
        self._reservations.setdefault(worker_id, set()).add(reservation)
        self._loads[worker_id] = _sum(self.coming_to(worker_id), load, 1)
        return reservation

    def sent(self, reservation: Reservation) -> None:
        """The request was sent to the worker."""
        reservation.num_until_seen = NUM_STATUSES_UNTIL_SEEN

    def release(self, reservation: Reservation) -> bool:
        """End a reservation; returns whether it still counted. May be repeated."""
        held = self._reservations.get(reservation.worker_id)
        if held is None or reservation not in held:
            return False
        held.remove(reservation)
        worker_id = reservation.worker_id
        if held:
            self._loads[worker_id] = _sum(self._loads[worker_id], reservation.load, -1)
        else:
            del self._reservations[worker_id], self._loads[worker_id]
        return True

    def on_status(self, worker_id: str) -> None:
        """The worker has sent a status."""
        for reservation in list(self._reservations.get(worker_id, ())):
            if reservation.num_until_seen is not None:
                reservation.num_until_seen -= 1
                if reservation.num_until_seen == 0:
                    self.release(reservation)

    def drop(self, worker_id: str) -> None:
        self._reservations.pop(worker_id, None)
        self._loads.pop(worker_id, None)

    def coming_to(self, worker_id: str) -> RequestLoad:
        return self._loads.get(worker_id, _NOTHING)


_NOTHING = RequestLoad()


def _sum(load: RequestLoad, other: RequestLoad, sign: int) -> RequestLoad:
    return RequestLoad(
        load.num_uncomputed_tokens + sign * other.num_uncomputed_tokens,
        load.num_sequences + sign * other.num_sequences,
        load.num_context_tokens + sign * other.num_context_tokens,
    )


class ModelTimes:
    """Step times of workers; for workers without any step yet, those of another one of their model.

    Otherwise a new worker whose prior is too slow would get no requests, and so would never
    correct it. Where priors differ, because GPUs are unlike, times are scaled by them. Of their
    model and not of their pool, so that a split into pools changes no route where roles are equal.
    """

    def __init__(self) -> None:
        self._untried: dict[str, str] = {}  # the model of each
        self._priors: dict[
            str, StepCosts
        ] = {}  # of workers that were heard before their first step
        # Of each model, the figures of one worker, and what its prior was; None: not known.
        self._by_model: dict[str, tuple[StepCosts, StepCosts | None]] = {}

    def on_status(self, record: WorkerRecord, costs: StepCosts | None) -> Collection[str]:
        """Returns the workers without steps whose figures have changed.

        They change only when the number of known steps of their model has doubled: these workers
        need figures of the right size, and not new ones at each step of a neighbour.
        """
        worker_id, model = record.worker_id, record.model
        if costs is None or not costs.num_observed:
            self._untried[worker_id] = model
            if costs is not None:
                self._priors[worker_id] = costs
            return ()
        self._untried.pop(worker_id, None)
        known, _ = self._by_model.get(model, (None, None))
        if known is not None and costs.num_observed < 2 * known.num_observed:
            return ()
        self._by_model[model] = costs, self._priors.get(worker_id)
        return [each for each, its in self._untried.items() if its == model]

    def of(self, record: WorkerRecord, costs: StepCosts | None) -> StepTimeModel:
        model = self._untried.get(record.worker_id)
        if model is None or model not in self._by_model:
            return _DEFAULT_TIMES if costs is None else StepTimeModel.from_costs(costs)
        known, prior = self._by_model[model]
        if costs is None or prior is None:
            return StepTimeModel.from_costs(known)
        return _scaled(*map(StepTimeModel.from_costs, (known, costs, prior)))

    def drop(self, worker_id: str) -> None:
        self._untried.pop(worker_id, None)
        self._priors.pop(worker_id, None)


_DEFAULT_TIMES = StepTimeModel()


def _scaled(known: StepTimeModel, own: StepTimeModel, its: StepTimeModel) -> StepTimeModel:
    """`known` of one worker, for another one: each figure times the ratio of their priors.

    What a step with prompts takes is scaled as a whole. The difference to a decode step may be
    nearly 0 in one of the priors, and a ratio of such figures says nothing.
    """
    if own == its:
        return known
    all_three = zip(known.coefficients, own.coefficients, its.coefficients, strict=True)
    *others, _ = (
        of_known * of_own / of_its if of_its > 0.0 else of_known
        for of_known, of_own, of_its in all_three
    )
    prompt_step_s = known.prompt_step_s
    if its.prompt_step_s > 0.0:
        prompt_step_s *= own.prompt_step_s / its.prompt_step_s
    return StepTimeModel.of((*others, max(0.0, prompt_step_s - others[0])))


class _Heard:
    """What was last heard of a worker.

    began_s: start of its running step, as far as known.
    stepped_s, prompts_s: when it last reported a new step, and a new step with prompts.
    """

    __slots__ = ("began_s", "prompts_s", "record", "status", "stepped_s")

    def __init__(self, record: WorkerRecord, status: WorkerStatus, now: float) -> None:
        self.record = record
        self.status = status
        self.began_s = self.stepped_s = self.prompts_s = now

    def hear(self, status: WorkerStatus, now: float) -> None:
        before, costs = self.status.step_costs, status.step_costs
        if costs is not None and costs is not before:
            if before is None or costs.num_observed != before.num_observed:
                self.stepped_s = now
            if before is None or costs.num_prompts != before.num_prompts:
                self.prompts_s = now
        self.status, self.began_s = status, now  # it reports between two steps


class Fleet:
    """Keeps the view and the prefix index current. It is the `LinkObserver` of an ingress.

    Args:
        now: the router's clock; without it the progress of a running step is not known.
        tpot_slo_s: default TPOT SLO of requests by model; models without one are left out.
        ingress_id: the id by which workers know this ingress.
    """

    def __init__(
        self,
        index: PrefixIndex | None = None,
        now: Callable[[], float] = lambda: math.inf,
        tpot_slo_s: Mapping[str, float] = MappingProxyType({}),
        ingress_id: str = "",
    ) -> None:
        self._tpot_slo_s = tpot_slo_s
        self._ingress_id = ingress_id
        self.index = index if index is not None else PrefixIndex()
        self._now = now
        self._ledger = Reservations()
        self._times = ModelTimes()
        self._heard: dict[str, _Heard] = {}
        self._views: dict[str, WorkerView] = {}  # current at all times: no decision waits for one
        self.answers = OutputLengths()
        self.first_tokens: defaultdict[str, FirstTokens] = defaultdict(FirstTokens)
        self.queued: dict[str, int] = {}  # kept by the admission queue
        # Called with a model when a worker of it begins to take requests.
        self.on_available: list[Callable[[str], None]] = []
        self._pools: dict[str, ModelPools] = {}  # by model
        self._exploration = Exploration()
        self._view = FleetView(
            MappingProxyType(self._views),
            self.answers,
            self.first_tokens,
            self.queued,
            self._pools,
            self._exploration,
        )

    def view(self) -> FleetView:
        """All routable workers now."""
        return self._view

    def reports(self) -> list[tuple[WorkerRecord, WorkerStatus]]:
        """The last report of every worker."""
        return [(worker.record, worker.status) for worker in self._heard.values()]

    def reserve(self, worker_id: str, load: RequestLoad) -> Reservation:
        """Count `load` from now on. Raises `KeyError` for a worker that is not in the view."""
        worker = self._heard[worker_id]
        status = worker.status
        is_idle = not status.num_running and not status.num_uncomputed_tokens
        if is_idle and self._ledger.coming_to(worker_id) is _NOTHING:
            worker.began_s = self._now()  # with this request
        self._exploration.num_reserved += 1
        reservation = self._ledger.reserve(worker_id, load)
        self._refresh_view(worker)
        return reservation

    def sent(self, reservation: Reservation) -> None:
        self._ledger.sent(reservation)

    def release(self, reservation: Reservation) -> None:
        """Stop counting a reservation. May be repeated."""
        if self._ledger.release(reservation):
            self._refresh_view(self._heard[reservation.worker_id])

    # links.client.LinkObserver

    def worker_synced(
        self, record: WorkerRecord, block_hashes: Sequence[BlockHash], status: WorkerStatus
    ) -> None:
        self._leave_pool(record.worker_id)  # of what had that name before
        worker = self._heard[record.worker_id] = _Heard(record, status, self._now())
        self.index.snapshot(record.worker_id, block_hashes)
        if status.host is not None:
            self.index.snapshot(host_id(record.worker_id), ())
        else:
            self.index.drop(host_id(record.worker_id))
        # After the index, which gives it new bits.
        self._refresh_views(worker)
        if status.accepting:
            self._tell_available(record.model)

    def worker_stepped(
        self, worker_id: str, kv_events: Sequence[KVEvent], status: WorkerStatus | None
    ) -> None:
        worker = self._heard.get(worker_id)
        if worker is None:
            return
        before = worker.status
        if status is not None:
            worker.hear(status, self._now())
            self._ledger.on_status(worker_id)
            self._refresh_views(worker)
        self.index.apply(worker_id, [each for each in kv_events if each.tier == "cache"])
        if worker.status.host is not None and kv_events:
            in_host = [each for each in kv_events if each.tier == "host"]
            self.index.apply(host_id(worker_id), in_host)
        if status is not None and status.accepting and not before.accepting:
            self._tell_available(worker.record.model)

    def worker_lost(self, worker_id: str) -> None:
        self._leave_pool(worker_id)
        worker = self._heard.pop(worker_id, None)
        if worker is None:
            return
        self._views.pop(worker_id, None)
        self._times.drop(worker_id)
        self._ledger.drop(worker_id)
        self.index.drop(worker_id)
        self.index.drop(host_id(worker_id))

    def _leave_pool(self, worker_id: str) -> None:
        worker = self._heard.get(worker_id)
        if worker is not None:
            self._pools[worker.record.model].drop(worker_id)

    def _tell_available(self, model: str) -> None:
        for tell in self.on_available:
            tell(model)

    def _refresh_views(self, worker: _Heard) -> None:
        """Update the views that a status of `worker` changes."""
        untried = self._times.on_status(worker.record, worker.status.step_costs)
        self._refresh_view(worker)
        for worker_id in untried:
            self._refresh_view(self._heard[worker_id])

    def _refresh_view(self, worker: _Heard) -> None:
        record, status = worker.record, worker.status
        worker_id = record.worker_id
        times = self._times.of(record, status.step_costs)
        tpot_slo_s = self._tpot_slo_s.get(record.model, math.inf)
        view = WorkerView.from_status(
            record,
            status,
            self._ledger.coming_to(worker_id),
            times,
            worker.began_s,
            tpot_slo_s,
            self._ingress_id,
            self._views.get(worker_id),
            worker.stepped_s,
            worker.prompts_s,
        )
        self._views[worker_id] = view
        pools = self._pools.get(record.model)
        if pools is None:
            pools = self._pools[record.model] = ModelPools(is_shared=tpot_slo_s != math.inf)
        pools.put(view, self.index)
