"""Workers for a fleet in one thread: worker cores without threads and sockets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from disagg.engine.engine import Engine
from disagg.engine.engine_thread import StepResult
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.errors import EngineFailed, WorkerLost
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.messages import StepFrame, TokenDelta, decode_to_ingress, encode
from disagg.store.cold_tier import ColdTier
from disagg.store.host_tier import HostTier
from disagg.time_model import TransferTimeModel
from disagg.worker.core import WorkerCore
from disagg.worker.parts import Parts
from tests.engine.fake_runner import FakeKV
from tests.store.fake_store import FakeStore
from tests.worker.fates import (
    BreakableRunner,
    DeviceLost,
    FatefulTransport,
    Fates,
    SteppedCopier,
    SteppedStoreThread,
)
from tests.worker.plays import Play

STEP_S = 0.05


class World:
    """What the members of a fleet share.

    met: how often what happened, of what is worth happening.
    """

    def __init__(self, play: Play) -> None:
        self.play = play
        self.now = 0.0
        self.met: Counter[str] = Counter()
        self.fates = Fates(play.fates, self.met)
        self.sides = LocalFleet()
        self.store = FakeStore(play.store_nbytes) if play.store_nbytes else None
        self.epochs = count(1)


class Member:
    """One worker without its thread and its sockets."""

    def __init__(self, world: World, index: int) -> None:
        play, num_blocks = world.play, world.play.num_blocks[index]
        self.name = f"worker-{index}"
        self._world = world
        epoch = next(world.epochs)
        stamps = Stamps(num_blocks, self.name, epoch)
        kv = FakeKV(num_blocks, play.block_size, play.windows)
        self.pool = BlockPool(
            num_blocks,
            play.block_size,
            stamps.generations,
            enable_prefix_caching=play.caching,
            windows=play.windows,
        )
        scheduler = Scheduler(
            self.pool,
            max_num_seqs=play.max_num_seqs,
            max_num_batched_tokens=play.max_num_batched_tokens,
            max_model_len=1000,
        )
        self.runner = BreakableRunner(kv)
        self.engine = Engine(scheduler, self.runner)
        slab = Slab(kv.base_address, num_blocks, kv.block_nbytes, kv.layout, owner=kv)
        clock = partial(getattr, world, "now")
        self.transport = FatefulTransport(world.fates, world.sides, slab, stamps, clock=clock)
        self.tier = None
        if world.store is not None and play.caching:
            self.tier = new_tier(world.fates, world.store, kv.block_nbytes, clock)
        self.host_tier = None
        if play.host_blocks and play.caching:
            copier = SteppedCopier(world.fates, kv, play.host_blocks)
            offer = partial(self.tier.offer, in_host=True) if self.tier is not None else None
            self.host_tier = HostTier(
                copier,
                play.host_blocks,
                kv.block_nbytes,
                stamps.generations,
                offer,
                self.engine.pool.groups.reported,
            )
        self.parts = Parts(
            self.engine,
            stamps,
            self.transport,
            self.tier,
            kv.read_blocks,
            kv.write_block,
            host_tier=self.host_tier,
        )
        self.core = WorkerCore(self.parts)
        self.link_ids = count(1)
        self.links = [next(self.link_ids), next(self.link_ids)]
        self.stream_ids: dict[int, Iterator[int]] = defaultdict(partial(count, 1))
        self.is_broken = False
        self._findable: set[bytes] = set()
        self._in_host: set[bytes] = set()

    def turn(self) -> dict[int, list[TokenDelta]]:
        """What `EngineThread` and `Worker` do in one turn. Returns deltas by link."""
        now = self._world.now
        self.core.advance(now)
        self.engine.expire(now)
        try:
            events = tuple(self.engine.step())
        except DeviceLost as error:
            return self._fail(EngineFailed(str(error)))
        plan, kv_events = self.engine.last_plan, self.pool.take_events()
        has_tier = self.tier is not None or self.host_tier is not None
        features = plan.features if plan.sequences and has_tier else None
        result = StepResult(events, kv_events, self.engine.status(), features, STEP_S)
        deltas = self.core.take(result, now)
        kv_events += self.core.take_host_events()
        for event in kv_events:
            names = self._findable if event.tier == "cache" else self._in_host
            if event.kind == "stored":
                names.update(event.block_hashes)
            else:
                names.difference_update(event.block_hashes)
        assert self._findable == set(self.pool.hashes()), "the events tell another story"
        assert self._in_host == set(self.core.host_hashes()), "of host memory, too"
        frame = StepFrame(
            1,
            tuple(d for link in deltas.values() for d in link),
            kv_events,
            self.core.status(result.status),
        )
        assert decode_to_ingress(encode(frame)) == frame
        self.core.check()
        return deltas

    def is_empty(self) -> bool:
        is_free = self.pool.num_free == self.pool.num_blocks
        return is_free and self.core.is_idle and self.core.status().num_waiting == 0

    def note(self) -> None:
        """Add to the world's count what happened here."""
        met = self._world.met
        met["computed"] += self.runner.num_computed
        scheduler = self.engine.scheduler
        met["preempted"] += scheduler.num_preempted
        met["draft accepted"] += scheduler.num_accepted
        met["draft refused"] += scheduler.num_drafted - scheduler.num_accepted
        holds = self.core._kv_export.counts
        met["hold expired"] += holds.num_expired
        met["hold broken"] += holds.num_broken
        met["released in vain"] += holds.num_unknown
        if self.tier is not None:
            met["hit in the store"] += self.tier.stats.num_hits
        if self.host_tier is not None:
            counts = self.host_tier.counts()
            met["hit in host memory"] += counts.num_loaded
            met["host copy torn"] += counts.num_torn
            met["no host memory"] += counts.num_dropped

    def _fail(self, failure: EngineFailed) -> dict[int, list[TokenDelta]]:
        """What `EngineThread` does when the engine breaks: everybody hears of it, nobody waits."""
        self.is_broken = True
        lost = WorkerLost(failure.message)
        events = tuple(self.engine.abandon(failure, lost))
        result = StepResult(events, (), self.engine.status(), failure=lost)
        deltas = self.core.take(result, self._world.now)
        assert not self.core._streams.num_open, "a stream outlives its engine"
        return deltas


def new_tier(
    fates: Fates, store: FakeStore, block_nbytes: int, clock: Callable[[], float]
) -> ColdTier:
    """A tier without a thread of its own."""
    thread = SteppedStoreThread(fates, store, block_nbytes, clock)
    return ColdTier(thread, TransferTimeModel(), clock=clock)
