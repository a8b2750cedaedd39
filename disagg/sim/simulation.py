"""One simulation: a fleet of simulated workers, the product's dispatcher, and the load of a trace.

Decides what a fleet is made of and when requests come. What happens to them is decided by the
product's own files.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from disagg.blocks import HASH_NBYTES, BlockHash
from disagg.config import AutoscalingConfig, PoolConfig, TierConfig
from disagg.errors import DisaggError, RequestError, WorkerLost
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import (
    GenerateRequest,
    Role,
    SamplingParams,
    TokenDelta,
    WorkerRecord,
    WorkerStatus,
)
from disagg.router.baselines import OURS, POLICIES, new_policy
from disagg.router.dispatch import Dispatcher
from disagg.router.fleet import Fleet, FleetView
from disagg.router.turns import Turns
from disagg.sim import virtual_time
from disagg.sim.network import SimulatedNetwork
from disagg.sim.report import Outcome, Report, WorkDone, in_time_percent, summarise
from disagg.sim.scaling import Scaling, check_slos
from disagg.sim.simulated_worker import SimulatedWorker, WorkerSpec
from disagg.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest
from disagg.time_model import StepTimeModel, TransferTimeModel

MODEL = "simulated"
NEVER_S = 1e12

# A model of 8 billion parameters on one H100, at half of its arithmetic (989 TFLOP/s) and 70 % of
# its memory bandwidth (3.35 TB/s): reading the weights; 16 GFLOP a prompt token; 4 x 32 layers x
# 4,096 FLOP for each earlier token it attends to; a decoding sequence's own arithmetic; and 128 KiB
# of KV for each token of context.
H100_8B = StepTimeModel((6.8e-3, 3.2e-5, 1.06e-9, 3.2e-5, 5.6e-8))
H100_8B_KV_NBYTES = 128 << 10  # of one token


class Fault(msgspec.Struct, frozen=True):
    """A worker dies, and another one takes its place with an empty cache."""

    worker_id: str
    at_s: float
    for_s: float


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and how it is used.

    num_decode: 0 lets each prefill worker decode what it prefilled.
    num_blocks: of each worker; each holds `block_size` tokens.
    speed: how much faster than in the trace requests come.
    bytes_per_s, latency_s: of a transfer between two workers.
    fair_queue: whether requests wait in the ingress for their tenants' turns, as they do when
        serving; without, policies are compared by what they do themselves.
    ttft_slo_s, tpot_slo_s: what requests are to get, and what pools are scaled by; with
        `fair_queue`, who would wait longer is refused.
    scale_prefill, scale_decode: let that pool follow the load, beginning with the number above.
    max_num_workers: of both pools together, if they do.
    """

    num_prefill: int = 4
    num_decode: int = 4
    num_blocks: int = 1024
    block_size: int = TRACE_BLOCK_TOKENS
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    times: StepTimeModel = H100_8B
    kv_nbytes: int = H100_8B_KV_NBYTES
    bytes_per_s: float = 25e9
    latency_s: float = 1e-3
    speed: float = 1.0
    policy: str = OURS
    faults: tuple[Fault, ...] = ()
    fair_queue: bool = False
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    scale_prefill: AutoscalingConfig | None = None
    scale_decode: AutoscalingConfig | None = None
    max_num_workers: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_prefill, self.num_blocks, self.max_num_seqs, self.kv_nbytes)
        if min(counts) < 1 or self.num_decode < 0:
            raise RequestError("A simulation needs workers, and these need blocks and places.")
        if self.block_size < 1 or TRACE_BLOCK_TOKENS % self.block_size:
            raise RequestError(
                f"block_size is {self.block_size}; traces name blocks of {TRACE_BLOCK_TOKENS}"
                " tokens, so it must divide that.",
                param="block_size",
            )
        if min(self.speed, self.bytes_per_s) <= 0 or self.latency_s < 0:
            raise RequestError("Speeds are greater than 0, and a latency is at least 0.")
        if self.scale_prefill is not None or self.scale_decode is not None:
            check_slos(tier_of(self), self.times)
        if self.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise RequestError(
                f"There is no policy {self.policy!r}; there are {known}.", param="policy"
            )


def tier_of(config: SimConfig) -> TierConfig:
    """The pools as the autoscaler is told of them."""
    return TierConfig(
        model=MODEL,
        prefill=PoolConfig(num_replicas=config.num_prefill, autoscaling=config.scale_prefill),
        decode=PoolConfig(num_replicas=config.num_decode, autoscaling=config.scale_decode),
        ttft_slo_s=config.ttft_slo_s,
        tpot_slo_s=config.tpot_slo_s,
    )


def simulate(config: SimConfig, trace: Sequence[TraceRequest]) -> Report:
    """Serve `trace`. Equal arguments give equal reports.

    Raises:
        RequestError: a fault names a worker that is not there.
    """
    return virtual_time.run(_Simulation.play(config, trace))


class _WatchedFleet(Fleet):
    """What the router knows, made current before each look."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        super().__init__(now=self.loop.time)
        self.workers: dict[str, SimulatedWorker] = {}
        self._looked_s = -1.0

    def view(self) -> FleetView:
        now = self.loop.time()
        if now != self._looked_s:
            self._looked_s = now
            for worker in self.workers.values():
                worker.tell_progress()
        return super().view()


class _Simulation:
    def __init__(self, config: SimConfig, trace: Sequence[TraceRequest]) -> None:
        self._config = config
        self._trace = trace
        self._loop = loop = asyncio.get_running_loop()
        self._fleet = _WatchedFleet()
        times = TransferTimeModel(config.latency_s, config.bytes_per_s)
        self._network = SimulatedNetwork(loop, times)
        self._workers = self._fleet.workers
        self._past: list[SimulatedWorker] = []  # those that died
        longest = max(each.num_prompt_tokens + each.num_output_tokens for each in trace)
        self._specs = _specs(config, longest + 1)
        for spec in self._specs:
            self._workers[spec.worker_id] = self._new_worker(spec, epoch=1)
        self._introduce()
        slo_s = {MODEL: config.ttft_slo_s} if config.fair_queue else {}
        turns = Turns(self._fleet, now=loop.time, ttft_slo_s=slo_s)
        self._dispatcher = Dispatcher(
            self,
            self._fleet,
            now=loop.time,
            rng=random.Random(config.seed),
            ttft_slo_s=slo_s,
            choose=new_policy(config.policy),
            turns=turns if config.fair_queue else None,
            wakes=(MODEL,),
        )
        self._scaling = Scaling(
            tier_of(config),
            config.max_num_workers,
            self._dispatcher.demand,
            turns,
            self._reports,
            loop.call_at,
            self._join,
            self._leave,
            lambda: self._workers,
        )
        self._outcomes: list[Outcome] = []

    @classmethod
    async def play(cls, config: SimConfig, trace: Sequence[TraceRequest]) -> Report:
        self = cls(config, trace)
        for fault in config.faults:
            if fault.worker_id not in self._workers:
                raise RequestError(f"There is no worker {fault.worker_id!r}.", param="fault")
            self._loop.call_at(fault.at_s, self._kill, fault)
        self._scaling.begin([(spec.role, spec.worker_id) for spec in self._specs])
        async with asyncio.TaskGroup() as clients:
            for number, each in enumerate(trace):
                await asyncio.sleep(each.arrival_s / config.speed - self._loop.time())
                clients.create_task(self._ask(number, each))
        for worker in self._workers.values():
            worker.check()
        self._scaling.pay(self._loop.time())
        report = summarise(config.policy, config.speed, self._outcomes, self._work())
        return msgspec.structs.replace(
            report,
            worker_hours=self._scaling.worker_hours,
            in_time_percent=in_time_percent(self._outcomes, config.ttft_slo_s, config.tpot_slo_s),
        )

    # router.dispatch.Workers

    def stream(
        self,
        worker_id: str,
        request: GenerateRequest,
        *,
        timeout_s: float,
        hand_over: bool = False,
        ticket: KVTicket | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise WorkerLost(f"Worker {worker_id} is gone.")
        return worker.stream(request, hand_over, ticket)

    def release(self, ticket: KVTicket) -> None:
        worker = self._workers.get(ticket.source_id)
        if worker is not None:
            worker.release(ticket.ticket_id)

    async def _ask(self, number: int, each: TraceRequest) -> None:
        """One client, from question to answer."""
        request = request_of(number, each, self._config.block_size)
        arrival_s = self._loop.time()
        first_s = last_s = 0.0
        num_cached_tokens = num_output_tokens = 0
        error = ""
        try:
            async with aclosing(self._dispatcher.generate(request)) as deltas:
                async for delta in deltas:
                    last_s = self._loop.time()
                    if delta.token_ids and not num_output_tokens:
                        first_s, num_cached_tokens = last_s, delta.num_cached_tokens
                    num_output_tokens += len(delta.token_ids)
        except DisaggError as refusal:
            error = refusal.code
        self._outcomes.append(
            Outcome(
                arrival_s,
                first_s,
                last_s,
                each.num_prompt_tokens,
                num_cached_tokens,
                num_output_tokens,
                error,
                each.tenant,
            )
        )

    def _new_worker(self, spec: WorkerSpec, epoch: int) -> SimulatedWorker:
        return SimulatedWorker(spec, epoch, self._network, self._fleet)

    def _introduce(self) -> None:
        everybody = list(self._workers.values())
        for worker in everybody:
            worker.meet(everybody)

    def _kill(self, fault: Fault) -> None:
        worker = self._workers.pop(fault.worker_id, None)
        if worker is None:
            return
        worker.die()
        self._past.append(worker)
        epoch = worker.transport.peer.epoch + 1
        self._loop.call_later(fault.for_s, partial(self._replace, worker.spec, epoch))

    def _replace(self, spec: WorkerSpec, epoch: int) -> None:
        self._workers[spec.worker_id] = self._new_worker(spec, epoch)
        self._introduce()

    def _reports(self) -> list[tuple[WorkerRecord, WorkerStatus]]:
        self._fleet.view()
        return self._fleet.reports()

    def _join(self, role: Role) -> str:
        """One worker more, like the first one."""
        spec = msgspec.structs.replace(
            self._specs[0], worker_id=f"{role}-{len(self._specs)}", role=role
        )
        self._specs.append(spec)
        self._replace(spec, epoch=1)
        return spec.worker_id

    def _leave(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            worker.die()
            self._past.append(worker)

    def _work(self) -> list[WorkDone]:
        """Of everybody, those who died too."""
        return [
            WorkDone(worker.spec.role, worker.num_prompt_tokens, worker.busy_s)
            for worker in [*self._workers.values(), *self._past]
        ]


def request_of(number: int, each: TraceRequest, block_size: int) -> GenerateRequest:
    """A request as the router gets it. Its tokens are all the same and nobody else's."""
    num_full = each.num_prompt_tokens // block_size
    per_name = TRACE_BLOCK_TOKENS // block_size
    if each.block_names:
        hashes = [_hash(name, part) for name in each.block_names for part in range(per_name)]
    else:
        hashes = [_hash(number, ~part & 0xFFFFFFFF) for part in range(num_full)]
    return GenerateRequest(
        request_id=str(number),
        model=MODEL,
        token_ids=(number,) * each.num_prompt_tokens,
        num_prompt_tokens=each.num_prompt_tokens,
        hash_root=_hash(number, 0xFFFFFFFF),
        block_hashes=tuple(hashes[:num_full]),
        sampling=SamplingParams(max_tokens=each.num_output_tokens, ignore_eos=True),
        deadline_unix_s=NEVER_S,
        tenant=each.tenant,
    )


def _hash(name: int, part: int) -> BlockHash:
    return (name << 32 | part).to_bytes(HASH_NBYTES, "little")


def _specs(config: SimConfig, max_model_len: int) -> list[WorkerSpec]:
    roles: list[tuple[Role, int]] = [("prefill", config.num_prefill), ("decode", config.num_decode)]
    return [
        WorkerSpec(
            worker_id=f"{role}-{place}",
            role=role,
            model=MODEL,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            block_nbytes=config.block_size * config.kv_nbytes,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            times=config.times,
        )
        for role, num_workers in roles
        for place in range(num_workers)
    ]
