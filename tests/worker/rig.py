"""Real workers, threads and links over loopback; a fake model, whose KV can be checked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from disagg.config import ServeConfig, TierConfig
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.links.client import Link
from disagg.messages import GenerateRequest, Peers, Role, TokenDelta
from disagg.worker.parts import Parts
from disagg.worker.worker import Worker
from tests.deltas import open_stream
from tests.engine.fake_runner import FakeKV, FakeRunner
from tests.links.fakes import RecordingObserver, linked, until

KEY = "the cluster's key"
BLOCK_SIZE = 4
TIER = TierConfig(model="fake")
CONFIG = ServeConfig(tiers=(TIER,), transport="local", cluster_key=KEY)


class GatedRunner(FakeRunner):
    """Computes while its gate is open, and closes it after `num_runs_left`; breaks on request.

    A step takes `step_s` and what the fake model does.
    """

    def __init__(self, kv: FakeKV) -> None:
        super().__init__(kv)
        self.gate = threading.Event()
        self.gate.set()
        self.num_runs_left = -1  # as many as there are
        self.breaks = False
        self.is_waiting = False
        self.step_s = 0.0

    def run(self, plan: StepPlan) -> list[Sampled]:
        if self.num_runs_left == 0:
            self.gate.clear()
        self.num_runs_left -= 1
        self.is_waiting = True
        assert self.gate.wait(60)
        self.is_waiting = False
        if self.breaks:
            raise RuntimeError("the device fell off the bus")
        time.sleep(self.step_s)
        return super().run(plan)


class GatedTransport(LocalTransport):
    """Pulls hang while `hangs`; notifications pass."""

    hangs = False

    def poll(self) -> list[PullDone | TicketReleased]:
        pulls, self._pulls = self._pulls, [] if self.hangs else self._pulls
        events = super().poll()
        if self.hangs:
            self._pulls = pulls
        return events


class Rig:
    """Starts workers, links to them, and closes everything at the end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.observer = RecordingObserver()
        self.runners: dict[str, GatedRunner] = {}
        self.transports: dict[str, GatedTransport] = {}
        self.workers: dict[str, Worker] = {}
        self.links: dict[str, Link] = {}
        self._stack = stack
        self._sides = LocalFleet()

    async def start(
        self,
        role: Role,
        *,
        worker_id: str = "",
        epoch: int = 1,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
    ) -> str:
        """A worker with a link; its id is its role, unless another one is given."""
        name = worker_id or role

        def build(config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int) -> Parts:
            stamps = Stamps(num_blocks, worker_id, epoch)
            kv = FakeKV(num_blocks, BLOCK_SIZE)
            scheduler = Scheduler(
                BlockPool(num_blocks, BLOCK_SIZE, stamps.generations),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=16,
                max_model_len=1000,
            )
            runner = self.runners[worker_id] = GatedRunner(kv)
            slab = Slab(kv.base_address, num_blocks, kv.block_nbytes, kv.layout, owner=kv)
            transport = self.transports[worker_id] = GatedTransport(
                self._sides, slab, stamps, clock=time.monotonic
            )
            engine = Engine(scheduler, runner)
            return Parts(engine, stamps, transport, None, kv.read_blocks, kv.write_block)

        worker = await Worker.start(
            CONFIG, TIER, role, worker_id=name, epoch=epoch, host="127.0.0.1", build=build
        )
        self.workers[name] = worker
        self._stack.push_async_callback(worker.close)
        self._stack.callback(self.runners[name].gate.set)
        link = await self._stack.enter_async_context(
            linked(worker.record, self.observer, KEY.encode())
        )
        self.links[name] = link
        await until(lambda: name in self.observer.held)
        peers = Peers(tuple(each.record.peer for each in self.workers.values()))
        for each in self.links.values():
            each.send(peers)
        return name

    async def all(
        self,
        worker_id: str,
        request: GenerateRequest,
        *,
        hand_over: bool = False,
        ticket: KVTicket | None = None,
    ) -> list[TokenDelta]:
        """A whole stream."""
        stream = open_stream(self.links[worker_id], request, hand_over, ticket)
        async with aclosing(stream):
            return [delta async for delta in stream]

    async def until_empty(self, worker_id: str) -> None:
        """Everything allocated came back, and the books are right."""
        worker = self.workers[worker_id]
        core = worker._core

        def is_empty() -> bool:
            pool, num_waiting = core._engine.pool, core.status().num_waiting
            return core.is_idle and not num_waiting and pool.num_free == pool.num_blocks

        while not await worker._ask(is_empty):
            await worker.check()
            await asyncio.sleep(0.005)  # otherwise both threads would be busy with this
        await worker.check()


@asynccontextmanager
async def rig(*roles: Role) -> AsyncIterator[Rig]:
    """With a worker of each role."""
    async with AsyncExitStack() as stack:
        r = Rig(stack)
        for role in roles:
            await r.start(role)
        yield r
