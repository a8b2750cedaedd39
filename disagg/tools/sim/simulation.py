"""One simulation: a fleet of simulated workers, the real dispatcher, and the load of a trace.

This module decides when requests arrive. The same code as in production decides everything else.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from disagg.blocks import HASH_NBYTES, BlockHash
from disagg.errors import DisaggError, Overloaded, RequestError, WorkerLost
from disagg.ingress.admission_queue import AdmissionQueue
from disagg.ingress.dispatch import Dispatcher
from disagg.kvtransfer.ticket import KVTicket
from disagg.links.fleet_links import report_interval_s
from disagg.messages import (
    GenerateRequest,
    Prefetch,
    PutDelta,
    Role,
    SamplingParams,
    Start,
    TokenDelta,
    WorkerRecord,
    WorkerStatus,
)
from disagg.router.fleet import Fleet, FleetView, Reservation
from disagg.router.worker_view import Pool
from disagg.tools.sim import virtual_time
from disagg.tools.sim.baselines import ADMIT_ALL, ALL_WORKERS, NO_REFUSALS, OURS, new_policy
from disagg.tools.sim.config import MODEL, Fault, SimConfig
from disagg.tools.sim.ingresses import EveryIngress, SimulatedReports, ingress_id_of
from disagg.tools.sim.network import SimulatedNetwork
from disagg.tools.sim.report import Outcome, SimReport, WorkDone, summarise
from disagg.tools.sim.scaling import Scaling
from disagg.tools.sim.simulated_worker import SimulatedWorker, WorkerSpec
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest

NEVER_S = 1e12


def simulate(config: SimConfig, trace: Sequence[TraceRequest]) -> SimReport:
    """Simulate serving `trace`. Equal arguments give equal reports.

    Raises:
        RequestError: a fault names a worker that does not exist.
    """
    return virtual_time.run(_Simulation.play(config, trace))


def simulate_all(
    plays: Sequence[tuple[SimConfig, Sequence[TraceRequest]]], num_processes: int
) -> list[SimReport]:
    """The reports of several simulations, in their order; so many run at once."""
    if num_processes <= 1:
        return [simulate(*play) for play in plays]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        return pool.starmap(simulate, plays, chunksize=1)


class _WatchedFleet(Fleet):
    """The router's view of the fleet. Workers report their ended steps before each access."""

    def __init__(
        self,
        tpot_slo_s: float,
        workers: Mapping[str, SimulatedWorker],
        ingress_id: str,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(None, self._loop.time, {MODEL: tpot_slo_s}, ingress_id)
        self._workers = workers
        self._looked_s = -1.0

    def view(self) -> FleetView:
        self._catch_up()
        return super().view()

    def sent(self, reservation: Reservation) -> None:
        self._catch_up()  # steps that ended before do not include the request
        super().sent(reservation)

    def _catch_up(self) -> None:
        now = self._loop.time()
        if now != self._looked_s:
            self._looked_s = now
            for worker in self._workers.values():
                worker.report_progress()


class _Ingress:
    """One ingress: its view of the workers, and its router; an `ingress.workers.Workers`."""

    def __init__(
        self,
        config: SimConfig,
        workers: Mapping[str, SimulatedWorker],
        number: int,
        tpot_slo_s: float,
        interval_s: float | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        chunk = config.max_num_batched_tokens
        chunks = chunk, config.decode_max_num_batched_tokens or chunk
        self._workers = workers
        self.fleet = _WatchedFleet(tpot_slo_s, workers, ingress_id_of(number))
        self.reports = SimulatedReports(loop, self.fleet, interval_s)
        self.queue = AdmissionQueue(self.fleet, now=loop.time)
        self.dispatcher = Dispatcher(
            self,
            self.fleet,
            now=loop.time,
            rng=random.Random(config.seed + number),
            choose=new_policy(config.policy, (config.ttft_slo_s, config.tpot_slo_s), chunks),
            admission_queue=self.queue if config.fair_queue else None,
            wakes=(MODEL,),
        )

    async def run(self, worker_id: str, start: Start, put: PutDelta, *, timeout_s: float) -> None:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise WorkerLost(f"Worker {worker_id} is gone.")
        if not start.is_prefix_request:  # which no step computes
            self.reports.request_arrived(worker_id)
        await worker.run(start, put)

    def release(self, ticket: KVTicket) -> None:
        worker = self._workers.get(ticket.source_id)
        if worker is not None:
            worker.release(ticket.ticket_id)

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.prefetch(asked)

    def introduce(self, worker_id: str, source_id: str) -> None:
        worker, source = self._workers.get(worker_id), self._workers.get(source_id)
        if worker is not None and source is not None and worker is not source:
            worker.meet(source)


class _Simulation:
    def __init__(self, config: SimConfig, trace: Sequence[TraceRequest]) -> None:
        self._config = config
        self._trace = trace
        self._loop = loop = virtual_time.running_loop()
        has_ttft_slo = config.fair_queue and config.policy not in (ADMIT_ALL, NO_REFUSALS)
        ttft_slo_s = config.ttft_slo_s if has_ttft_slo else math.inf
        uses_slo = config.policy in (OURS, ADMIT_ALL, ALL_WORKERS)
        self._slo_s = (ttft_slo_s, config.tpot_slo_s if uses_slo else math.inf)
        self._network = SimulatedNetwork(loop, config.latency_s, config.bytes_per_s)
        self._workers: dict[str, SimulatedWorker] = {}
        self._past: list[SimulatedWorker] = []  # workers that died
        self._longest = max(each.num_prompt_tokens + each.num_output_tokens for each in trace)
        self._nums_started: Counter[Role] = Counter()
        interval_s = None
        if config.num_ingress > 1:
            interval_s = report_interval_s(config.num_prefill + config.num_decode)
        self._ingresses = [
            _Ingress(config, self._workers, number, self._slo_s[1], interval_s)
            for number in range(config.num_ingress)
        ]
        self._heard = EveryIngress([each.reports for each in self._ingresses])
        for role, pool in config.tier.pools.items():
            for _ in range(pool.num_replicas):
                self._join((MODEL, role))
        first = self._ingresses[0]
        self._scaling = Scaling(
            config.tier,
            config.max_num_workers,
            first.dispatcher.demand,
            first.queue,
            self._reports,
            loop.call_at,
            self._join,
            self._leave,
            lambda: self._workers,
        )
        self._outcomes: list[Outcome] = []

    @classmethod
    async def play(cls, config: SimConfig, trace: Sequence[TraceRequest]) -> SimReport:
        self = cls(config, trace)
        for fault in config.faults:
            if fault.worker_id not in self._workers:
                raise RequestError(f"There is no worker {fault.worker_id!r}.", param="fault")
            self._loop.call_at(fault.at_s, self._kill, fault)
        self._scaling.begin(
            ((MODEL, worker.spec.role), worker_id) for worker_id, worker in self._workers.items()
        )
        async with asyncio.TaskGroup() as clients:
            for number, each in enumerate(trace):
                await asyncio.sleep(each.arrival_s / config.speed - self._loop.time())
                clients.create_task(self._ask(number, each))
        for worker in self._workers.values():
            worker.check()
        self._scaling.pay(self._loop.time())
        return summarise(config, self._outcomes, self._work(), self._scaling.worker_hours)

    async def _ask(self, number: int, traced: TraceRequest) -> None:
        """Send one request, again if it is refused, and record the outcome."""
        arrival_s = self._loop.time()
        outcome = Outcome(arrival_s, 0.0, 0.0, traced.num_prompt_tokens, 0, 0, "", traced.tenant)
        for num_left in range(self._config.num_retries, -1, -1):
            try:
                outcome = await self._read(number, traced, outcome)
                break
            except Overloaded as refusal:
                outcome = msgspec.structs.replace(outcome, error=refusal.code)
                if num_left:
                    await asyncio.sleep(max(1.0, math.ceil(refusal.retry_after_s)))
            except DisaggError as failure:
                outcome = msgspec.structs.replace(outcome, error=failure.code)
                break
        self._outcomes.append(outcome)

    async def _read(self, number: int, traced: TraceRequest, outcome: Outcome) -> Outcome:
        """Send a request and read its answer. Returns `outcome` with what came."""
        dispatcher = self._ingresses[number % len(self._ingresses)].dispatcher
        request = request_of(number, traced, self._config.block_size, *self._slo_s)
        first_s = last_s = 0.0
        num_cached_tokens = num_output_tokens = 0

        def take(delta: TokenDelta) -> None:
            nonlocal first_s, last_s, num_cached_tokens, num_output_tokens
            last_s = self._loop.time()
            if delta.token_ids and not num_output_tokens:
                first_s, num_cached_tokens = last_s, delta.num_cached_tokens
            num_output_tokens += len(delta.token_ids)

        await dispatcher.generate(request, take)
        return msgspec.structs.replace(
            outcome,
            first_s=first_s,
            last_s=last_s,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
            error="",
        )

    def _kill(self, fault: Fault) -> None:
        worker = self._workers.pop(fault.worker_id, None)
        if worker is None:
            return
        worker.die()
        self._past.append(worker)
        epoch = worker.transport.peer.epoch + 1
        self._loop.call_later(fault.for_s, partial(self._replace, worker.spec, epoch))

    def _replace(self, spec: WorkerSpec, epoch: int) -> None:
        worker = SimulatedWorker(spec, epoch, self._network, self._heard)
        self._workers[spec.worker_id] = worker

    def _reports(self) -> list[tuple[WorkerRecord, WorkerStatus]]:
        fleet = self._ingresses[0].fleet
        fleet.view()
        return fleet.reports()

    def _join(self, pool: Pool) -> str:
        """Add one worker to a pool. Returns its id."""
        role = pool[1]
        spec = self._config.worker(role, self._nums_started[role], self._longest + 1)
        self._nums_started[role] += 1
        self._replace(spec, epoch=1)
        return spec.worker_id

    def _leave(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            worker.die()
            self._past.append(worker)

    def _work(self) -> list[WorkDone]:
        """The work of all workers, including those that died.

        A worker that replaced another one is counted together with it.
        """
        done: dict[str, WorkDone] = {}
        for worker in [*self._past, *self._workers.values()]:
            spec, num_tokens, busy_s = worker.spec, worker.num_prompt_tokens, worker.busy_s
            alive_s, before = worker.alive_s, done.get(spec.worker_id)
            if before is not None:
                num_tokens += before.num_prompt_tokens
                busy_s, alive_s = busy_s + before.busy_s, alive_s + before.alive_s
            done[spec.worker_id] = WorkDone(spec.role, num_tokens, busy_s, alive_s)
        return list(done.values())


def request_of(
    number: int,
    traced: TraceRequest,
    block_size: int,
    ttft_slo_s: float = 0.0,
    tpot_slo_s: float = 0.0,
) -> GenerateRequest:
    """Make a `GenerateRequest` from a trace's request. All its tokens are one id, unique to it."""
    num_full = traced.num_prompt_tokens // block_size
    per_name = TRACE_BLOCK_TOKENS // block_size
    if traced.block_names:
        hashes = [_hash(name, part) for name in traced.block_names for part in range(per_name)]
    else:
        hashes = [_hash(number, ~part & 0xFFFFFFFF) for part in range(num_full)]
    return GenerateRequest(
        request_id=str(number),
        model=MODEL,
        token_ids=(number,) * traced.num_prompt_tokens,
        num_prompt_tokens=traced.num_prompt_tokens,
        hash_root=_hash(number, 0xFFFFFFFF),
        block_hashes=tuple(hashes[:num_full]),
        sampling=SamplingParams(max_tokens=traced.num_output_tokens),
        deadline_unix_s=NEVER_S,
        tenant=traced.tenant,
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
    )


def _hash(name: int, part: int) -> BlockHash:
    return (name << 32 | part).to_bytes(HASH_NBYTES, "little")
