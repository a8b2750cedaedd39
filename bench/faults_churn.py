"""Tests that each request ends once and with the right tokens while workers come and go.

    python -m bench.faults churn

One process without Ray has the dispatcher, fleet and links of an ingress. Workers behind loopback
connections have real engines, KV import and export, and a fake model that shows every wrong KV
block (tests/engine/fake_runner.py). Workers join, drain and leave, or vanish. Links are cut, and
engines stand still. Clients leave, and some have short deadlines. It is held if every request had
exactly one terminal event, all text was right, and everything allocated was freed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from disagg import local
from disagg.config import PoolConfig, ServeConfig, TierConfig
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.step import Sampled, StepPlan
from disagg.errors import DisaggError
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.local import LocalCluster
from disagg.messages import GenerateRequest, TokenDelta
from disagg.router.worker_view import RequestLoad
from disagg.worker import kv_export
from disagg.worker.parts import Parts
from disagg.worker.worker import Worker
from tests.engine.fake_runner import FakeKV, FakeRunner, expected_tokens
from tests.engine.workload import STOP_IDS
from tests.generate_requests import new_request

BLOCK_SIZE, NUM_BLOCKS = 4, 512
STEP_S, PROMPT_TOKEN_S = 2e-3, 5e-5  # what a step takes, and each of its tokens
HOLD_S = 3.0  # short, so that holds expire and are missed by their readers
TIME_S, GRACE_S = 60.0, 30.0  # that a request has; that it may take beyond it
TOO_LATE = ("ok", "deadline_exceeded", "overloaded")  # how requests with little time may end
NUM_CLIENTS = 16
EVENT_S = 0.06  # at least, from one trouble to the next
LEAST_WORKERS, MOST_WORKERS = 5, 11
TIER = TierConfig(
    model="demo-small",  # for its tokenizer, which nobody asks here
    prefill=PoolConfig(num_replicas=2),
    decode=PoolConfig(num_replicas=5),
)
CONFIG = ServeConfig(tiers=(TIER,), transport="local", cluster_key="churn", cold_tier_nbytes=0)


class FakePacedRunner(FakeRunner):
    """Takes its time, and stands still while its gate is closed."""

    def __init__(self, kv: FakeKV) -> None:
        super().__init__(kv)
        self.gate = threading.Event()
        self.gate.set()

    def run(self, plan: StepPlan) -> list[Sampled]:
        self.gate.wait(GRACE_S)
        time.sleep(STEP_S + PROMPT_TOKEN_S * plan.num_new_tokens)
        return super().run(plan)


class CountingTransport(LocalTransport):
    """Says how pulls ended."""

    met: Counter[str]

    def poll(self) -> list[PullDone | TicketReleased]:
        events = super().poll()
        for event in events:
            if isinstance(event, PullDone):
                self.met["pulled" if event.error is None else "pull failed"] += 1
        return events


@dataclass
class Tally:
    """met: faults that took effect. ends: how requests ended, as their clients saw it."""

    met: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_without_end: int = 0
    num_with_two_ends: int = 0
    num_failed: int = 0


class Churn:
    """Clients and trouble, for one cluster."""

    def __init__(self, seed: int) -> None:
        self.tally = Tally()
        self._rng = random.Random(seed)
        self._sides = LocalFleet()
        self._runners: dict[str, FakePacedRunner] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._steady: list[Worker] = []  # workers that nobody has told to go
        prompts = random.Random(seed)
        self._prefixes = [
            tuple(prompts.randrange(4, 200) for _ in range(prompts.randrange(8, 120)))
            for _ in range(24)
        ]

    def build(
        self, config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int, *_: object
    ) -> Parts:
        """In the place of `worker.parts.build_parts`."""
        stamps = Stamps(NUM_BLOCKS, worker_id, epoch)
        kv = FakeKV(NUM_BLOCKS, BLOCK_SIZE)
        scheduler = Scheduler(
            BlockPool(NUM_BLOCKS, BLOCK_SIZE, stamps.generations),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=1000,
        )
        runner = self._runners[worker_id] = FakePacedRunner(kv)
        slab = Slab(kv.base_address, NUM_BLOCKS, kv.block_nbytes, kv.layout, owner=kv)
        transport = CountingTransport(self._sides, slab, stamps, clock=time.monotonic)
        transport.met = self.tally.met
        engine = Engine(scheduler, runner)
        return Parts(engine, stamps, transport, None, kv.read_blocks, kv.write_block)

    async def run(self, num_requests: int, num_joins: int, num_leaves: int) -> dict[str, Any]:
        """Until there were that many of each. Returns the figures."""
        async with local.running(CONFIG, build=self.build) as cluster:
            self._steady = list(cluster.workers)
            numbers = iter(range(sys.maxsize))
            is_over = False

            async def client() -> None:
                while not is_over:
                    await self._ask(cluster, next(numbers))

            clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
            num_per_event = num_requests / (2.5 * max(num_joins, num_leaves, 1))
            num_events, met, ends = 0, self.tally.met, self.tally.ends
            while (
                ends.total() < num_requests
                or met["join"] < num_joins
                or met["drain"] + met["crash"] < num_leaves
            ):
                if ends.total() < num_events * num_per_event:
                    await asyncio.sleep(0.005)
                    continue
                num_events += 1
                await self._trouble(cluster)
                await asyncio.sleep(EVENT_S)
            is_over = True
            await asyncio.gather(*clients)
            await asyncio.gather(*self._leaving)
            return await self._rest(cluster)

    async def _rest(self, cluster: LocalCluster) -> dict[str, Any]:
        """Wait until every block is back, and look whether the ingress has forgotten all."""
        began_s = time.monotonic()
        num_held = 0
        for worker in cluster.workers:
            while not (is_empty := await worker._ask(partial(_is_empty, worker))):
                await worker.check()
                if time.monotonic() > began_s + HOLD_S + GRACE_S:
                    break
                await asyncio.sleep(0.02)
            num_held += not is_empty
        fleet = cluster.ingress.fleet
        await _until(lambda: set(fleet.view().workers) == {_name(w) for w in cluster.workers})
        return {
            "workers_with_blocks_held": num_held,
            "all_back_s": round(time.monotonic() - began_s, 2),
            "workers_unknown_to_router": len(cluster.workers) - len(fleet.view().workers),
            "reservations_left": sum(
                fleet._ledger.coming_to(name) != RequestLoad() for name in fleet.view().workers
            ),
        }

    # Trouble.

    async def _trouble(self, cluster: LocalCluster) -> None:
        num_workers, rng = len(self._steady), self._rng
        what = rng.choices(["join", "drain", "crash", "cut", "stall"], weights=[40, 20, 20, 12, 8])[
            0
        ]
        if num_workers <= LEAST_WORKERS and what in ("drain", "crash"):
            what = "join"
        elif num_workers >= MOST_WORKERS and what == "join":
            what = rng.choice(["drain", "crash"])
        if what == "join":
            role = rng.choice(["prefill", "decode", "decode"])
            self._steady.append(await cluster.start_worker(TIER, role))  # type: ignore[arg-type]
            self.tally.met["join"] += 1
            return
        victim = rng.choice(self._steady)
        if what == "cut":
            links = list(victim._server._links.values())
            for link in links:
                link.abort()
            self.tally.met["cut"] += bool(links)
            return
        if what == "stall":
            self._leaving.add(asyncio.create_task(self._stall(victim, rng.uniform(0.05, 0.5))))
            return
        self._steady.remove(victim)
        if what == "crash":  # nothing that was said arrives any more
            for link in list(victim._server._links.values()):
                link.abort()
        self._leaving.add(asyncio.create_task(self._leave(cluster, victim, what)))

    async def _leave(self, cluster: LocalCluster, worker: Worker, how: str) -> None:
        self.tally.met[how] += 1
        await cluster.stop_worker(worker, 10.0 if how == "drain" else None)
        del self._runners[_name(worker)]

    async def _stall(self, worker: Worker, seconds: float) -> None:
        runner = self._runners[_name(worker)]
        runner.gate.clear()
        await asyncio.sleep(seconds)
        runner.gate.set()
        self.tally.met["stall"] += 1

    # Requests.

    async def _ask(self, cluster: LocalCluster, number: int) -> None:
        """One request, to whatever end; what came of it is counted."""
        rng = random.Random(f"{number}")
        prompt = rng.choice(self._prefixes) + tuple(
            rng.randrange(4, 200) for _ in range(rng.randrange(1, 40))
        )
        max_tokens, seed = rng.randrange(1, 60), rng.randrange(4)
        is_short = rng.random() < 0.08
        time_s = rng.uniform(0.0, 0.3) if is_short else TIME_S
        request = _request(f"r{number}", prompt, max_tokens, seed, time.time() + time_s)
        leaves_s = rng.uniform(0.0, 0.3) if rng.random() < 0.1 else None
        got: list[int] = []
        ends: list[str] = []
        task = asyncio.create_task(_read(cluster, request, got, ends))
        if leaves_s is not None:
            asyncio.get_running_loop().call_later(leaves_s, task.cancel)
        _, hanging = await asyncio.wait([task], timeout=time_s + GRACE_S)
        if hanging:
            task.cancel()
            self.tally.num_without_end += 1
        self._count(ends, is_short=is_short, was_cancelled=task.cancelled())
        expected = expected_tokens(prompt, max_tokens, STOP_IDS, seed)
        is_whole = ends == ["ok"]
        self.tally.num_wrong += got != (expected if is_whole else expected[: len(got)])
        moves = len(cluster.ingress.dispatcher.decision(request.request_id)) - 1
        self.tally.met["move"] += max(moves, 0)

    def _count(self, ends: list[str], *, is_short: bool, was_cancelled: bool) -> None:
        tally = self.tally
        tally.num_with_two_ends += len(ends) > 1
        if was_cancelled and not ends:
            tally.ends["client left"] += 1
            return
        tally.num_without_end += not ends
        for end in ends:
            tally.ends[end] += 1
            tally.num_failed += end not in (TOO_LATE if is_short else ("ok",))


async def _read(
    cluster: LocalCluster, request: GenerateRequest, got: list[int], ends: list[str]
) -> None:
    def take(delta: TokenDelta) -> None:
        got.extend(delta.token_ids)
        if delta.is_last:
            ends.append("ok" if delta.finish_reason else "neither end nor error")

    try:
        await cluster.ingress.dispatcher.generate(request, take)
    except DisaggError as error:
        ends.append(error.code)


def _request(
    request_id: str, prompt: tuple[int, ...], max_tokens: int, seed: int, deadline_unix_s: float
) -> GenerateRequest:
    return new_request(
        prompt,
        block_size=BLOCK_SIZE,
        request_id=request_id,
        model=TIER.name,
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=tuple(sorted(STOP_IDS)),
        deadline_unix_s=deadline_unix_s,
    )


def _name(worker: Worker) -> str:
    return worker.record.worker_id


def _is_empty(worker: Worker) -> bool:
    core = worker._core
    status = core.status()
    return core.is_idle and not status.num_waiting and status.num_free_blocks == status.num_blocks


async def _until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + GRACE_S
    while not condition() and time.monotonic() < ends_s:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _standing() -> dict[str, int]:
    """What this process has open."""
    return {"threads": threading.active_count(), "fds": len(os.listdir("/proc/self/fd"))}


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of what is broken on purpose."""
    log = logging.getLogger("disagg")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


async def _run(seed: int, counts: tuple[int, int, int]) -> tuple[Tally, dict[str, Any]]:
    churn = Churn(seed)
    figures = await churn.run(*counts)
    figures["tasks_left"] = len(asyncio.all_tasks()) - 1
    return churn.tally, figures


def churn(
    num_requests: int = 1536, num_joins: int = 250, num_leaves: int = 150, seed: int = 0
) -> dict[str, Any]:
    """Run it, and return the figures; `is_held` says whether all of them are what they must be."""
    with quiet(), mock.patch.object(kv_export, "HOLD_TTL_S", HOLD_S):
        asyncio.run(_run(seed, (0, 0, 0)))  # what stays open after this stays open anyway
        before = _standing()
        began_s = time.monotonic()
        tally, figures = asyncio.run(_run(seed, (num_requests, num_joins, num_leaves)))
    after = _standing()
    gates = {
        "wrong_text": tally.num_wrong,
        "without_terminal_event": tally.num_without_end,
        "with_two_terminal_events": tally.num_with_two_ends,
        "failed": tally.num_failed,
        "workers_with_blocks_held": figures["workers_with_blocks_held"],
        "workers_unknown_to_router": figures["workers_unknown_to_router"],
        "reservations_left": figures["reservations_left"],
        "tasks_left": figures["tasks_left"],
        "threads_left": after["threads"] - before["threads"],
        "fds_left": after["fds"] - before["fds"],
    }
    return {
        "requests": tally.ends.total(),
        "joins": tally.met["join"],
        "leaves": tally.met["drain"] + tally.met["crash"],
        "faults": dict(tally.met),
        "ends": dict(tally.ends),
        **gates,
        "all_back_s": figures["all_back_s"],
        "seconds": round(time.monotonic() - began_s, 1),
        "is_held": not any(gates.values()),
    }
