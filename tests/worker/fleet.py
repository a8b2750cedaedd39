"""A whole fleet in one thread: engines, doors and a small ingress, stepped in any order.

What happens is drawn beforehand as a `Play`, so that it can be repeated and shrunk. After every
action each block of the worker is recounted, and each token is compared with what it must be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from unittest import mock

import msgspec

from disagg.engine.block_pool import BlockPool
from disagg.engine.engine import Engine
from disagg.engine.engine_thread import StepResult
from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import Sequence
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.kvtransfer.slab import Slab
from disagg.kvtransfer.stamps import Stamps
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import (
    GenerateRequest,
    Start,
    StepFrame,
    TokenDelta,
    decode_to_ingress,
    decode_to_worker,
    encode,
)
from disagg.prefill_worker.leaving import HOLD_TTL_S
from disagg.router.dispatch import grown
from disagg.store import cold_tier
from disagg.store.cold_tier import ColdTier
from disagg.store.memory_store import MemoryStore
from disagg.time_model import TransferTimeModel
from disagg.worker.doors import Doors
from disagg.worker.parts import Parts
from tests.engine.fake_runner import FakeKV, FakeRunner, expected_tokens
from tests.engine.workload import STOP_IDS
from tests.worker.fates import FatefulTransport, Fates, SteppedStoreThread
from tests.worker.plays import NUM_WORKERS, Play, Trip, request_of

STEP_S, HOLD_S = 0.05, HOLD_TTL_S + 1


class World:
    """What the members of a fleet share."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.now = 0.0
        self.fates = Fates(play.fates)
        self.sides = LocalFleet()
        self.store = MemoryStore(play.store_nbytes) if play.store_nbytes else None
        self.epochs = count(1)


class Member:
    """One worker without its thread and its sockets."""

    def __init__(self, world: World, index: int) -> None:
        play, num_blocks = world.play, world.play.num_blocks[index]
        self.name = f"worker-{index}"
        self._world = world
        epoch = next(world.epochs)
        stamps = Stamps(num_blocks, self.name, epoch)
        kv = FakeKV(num_blocks, play.block_size)
        self.pool = BlockPool(num_blocks, play.block_size, stamps.generations)
        scheduler = Scheduler(
            self.pool,
            max_num_seqs=play.max_num_seqs,
            max_num_batched_tokens=play.max_num_batched_tokens,
            max_model_len=1000,
            enable_prefix_caching=play.caching,
        )
        self.runner = FakeRunner(kv)
        self.engine = Engine(scheduler, self.runner)
        slab = Slab(kv.base_address, num_blocks, kv.block_nbytes, kv.layout, owner=kv)
        clock = partial(getattr, world, "now")
        self.transport = FatefulTransport(
            world.fates, world.sides, self.name, epoch, slab, stamps, clock=clock
        )
        self.tier = None
        if world.store is not None and play.caching:
            self.tier = new_tier(world.fates, world.store, kv.block_nbytes, clock)
        self.parts = Parts(
            self.engine, stamps, self.transport, self.tier, kv.read_block, kv.write_block
        )
        self.doors = Doors(self.parts)
        self.holds = self.doors._leaving._holds
        self.link_ids = count(1)
        self.links = [next(self.link_ids), next(self.link_ids)]
        self.stream_ids: dict[int, Iterator[int]] = defaultdict(partial(count, 1))
        self._findable: set[bytes] = set()

    def turn(self) -> dict[int, list[TokenDelta]]:
        """What `EngineThread` and `Worker` do in one turn. Returns deltas by link."""
        now = self._world.now
        self.doors.advance(now)
        self.engine.expire(now)
        events = tuple(self.engine.step())
        plan, kv_events = self.engine.last_plan, self.pool.take_events()
        features = plan.features if plan.work and self._world.store is not None else None
        result = StepResult(events, kv_events, self.engine.status(), features, STEP_S)
        deltas = self.doors.take(result, now)
        for event in kv_events:
            if event.kind == "stored":
                self._findable.update(event.block_hashes)
            else:
                self._findable.difference_update(event.block_hashes)
        assert self._findable == set(self.pool.hashes()), "the events tell another story"
        frame = StepFrame(
            1,
            tuple(d for link in deltas.values() for d in link),
            kv_events,
            self.doors.status(result.status),
        )
        assert decode_to_ingress(encode(frame)) == frame
        self.doors.check()
        return deltas

    def is_empty(self) -> bool:
        is_free = self.pool.num_free == self.pool.num_blocks
        return is_free and self.doors.is_idle and self.doors.status().num_waiting == 0


def new_tier(
    fates: Fates, store: MemoryStore, block_nbytes: int, clock: Callable[[], float]
) -> ColdTier:
    """A tier without a thread of its own."""

    def thread(
        store: MemoryStore, block_nbytes: int, clock: Callable[[], float], wake: object
    ) -> SteppedStoreThread:
        return SteppedStoreThread(fates, store, block_nbytes, clock)

    with mock.patch.object(cold_tier, "StoreThread", thread):
        return ColdTier(store, block_nbytes, TransferTimeModel(), clock=clock)


@dataclass(eq=False)
class Journey:
    """How far a trip has come; what `router.dispatch` knows of a request."""

    trip: Trip
    request: GenerateRequest
    expected: list[int]
    output: list[int] = field(default_factory=list)
    ticket: KVTicket | None = None
    place: tuple[int, int, int] | None = None  # worker, link and stream, while one serves it
    postponed: bool = False  # its ticket is on the way
    end: str = ""  # a finish reason, "deadline_exceeded", or "gone"


class Fleet:
    """Workers, and an ingress that carries trips from worker to worker."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.world = World(play)
        self.members = [Member(self.world, index) for index in range(NUM_WORKERS)]
        self._introduce()
        self.journeys: list[Journey] = []
        for i, trip in enumerate(play.trips):
            request = request_of(trip, f"trip-{i}", play.block_size)
            expected = expected_tokens(trip.prompt, trip.max_tokens, STOP_IDS, trip.seed)
            self.journeys.append(Journey(trip, request, expected))
        self._serving: dict[tuple[int, int, int], Journey] = {}
        self.ends: Counter[str] = Counter()

    def run(self) -> None:
        """The whole play; then quiet, in which everything must end and come back."""
        starts = sorted(self.journeys, key=lambda journey: journey.trip.at)
        for place, action in enumerate(self.play.schedule):
            while starts and starts[0].trip.at <= place:
                self._start(starts.pop(0))
            self._act(action % 32, action // 32)
        self._calm_down(starts)

    def _act(self, kind: int, arg: int) -> None:
        """One of 24 turns, or one of 8 ways to make trouble. `arg`: 0 to 7."""
        journey = self.journeys[arg % len(self.journeys)]
        worker = arg % NUM_WORKERS
        match kind:
            case 24:
                self.world.now += 1.0
            case 25:
                self.world.now += HOLD_S if arg == 0 else 0.1
            case 26 if arg < 3:
                self._cancel(journey)
                self._end(journey, "gone")
            case 27 | 28:
                self._move(journey, arg // 2)
            case 29 if arg < NUM_WORKERS:
                self._close_link(worker, arg % 2)
            case 30 if arg < 3:
                self._die(worker)
            case _:
                self._turn(worker)

    def _turn(self, worker: int) -> None:
        member = self.members[worker]
        for journey in self.journeys:
            if journey.postponed and journey.trip.second == worker:
                self._go_on(journey, worker)
        for link_id, deltas in member.turn().items():
            for delta in deltas:
                self._take(self._serving[worker, link_id, delta.stream_id], delta)

    def met(self) -> Counter[str]:
        """What happened in the play, of what is worth happening."""
        met: Counter[str] = Counter()
        for member in self.members:
            met["pulled"] += member.transport.num_done
            met["torn or failed"] += member.transport.num_failed
            met["preempted"] += member.engine.scheduler.num_preempted
            met["expired"] += member.holds.num_expired
            met["broken"] += member.holds.num_broken
            met["released in vain"] += member.holds.num_unknown
            if member.tier is not None:
                met["hits in the store"] += member.tier.stats.num_hits
        return met

    # Requests on their way.

    def _start(self, journey: Journey) -> None:
        if not journey.end:
            self._visit(journey, journey.trip.first, hand_over=journey.trip.hand_over)

    def _visit(self, journey: Journey, worker: int, *, hand_over: bool = False) -> None:
        member = self.members[worker]
        new = list(journey.output[len(journey.request.token_ids) - len(journey.trip.prompt) :])
        if new:
            journey.request = grown(journey.request, new, self.play.block_size)
        ticket = None if hand_over else journey.ticket
        link_id = member.links[len(journey.request.token_ids) % 2]
        stream_id = next(member.stream_ids[link_id])
        start = decode_to_worker(encode(Start(stream_id, journey.request, hand_over, ticket)))
        assert isinstance(start, Start)
        journey.place = worker, link_id, stream_id
        self._serving[journey.place] = journey
        member.doors.start(link_id, start, self.world.now)
        member.doors.check()

    def _take(self, journey: Journey, delta: TokenDelta) -> None:
        output, expected = journey.output, journey.expected
        output.extend(delta.token_ids)
        assert output == expected[: len(output)], "tokens from KV that is not the sequence's own"
        assert 0 <= delta.num_cached_tokens < len(journey.trip.prompt) + len(output)
        if delta.ticket is None and delta.token_ids:
            journey.ticket = None
        if not delta.is_last:
            return
        assert journey.place is not None
        del self._serving[journey.place]
        journey.place = None
        if delta.error is not None:
            assert delta.error.code == "deadline_exceeded", delta.error
            assert self.world.now >= journey.trip.deadline_s, "ended before its time"
            self._end(journey, "deadline_exceeded")
        elif delta.finish_reason is not None:
            assert output == expected and self.world.now < journey.trip.deadline_s
            assert delta.finish_reason == ("stop" if output[-1] in STOP_IDS else "length")
            self._end(journey, delta.finish_reason)
        else:
            journey.ticket = delta.ticket
            self._hand_on(journey)

    def _hand_on(self, journey: Journey) -> None:
        match journey.trip.ticket:
            case "leave":
                self._end(journey, "gone")
            case "late":
                journey.postponed = True
            case "lose":
                journey.ticket = None
                self._go_on(journey, journey.trip.second)
            case _:
                self._go_on(journey, journey.trip.second)

    def _go_on(self, journey: Journey, worker: int) -> None:
        journey.postponed = False
        self._visit(journey, worker)

    def _end(self, journey: Journey, end: str) -> None:
        if not journey.end:
            journey.end = end
            journey.postponed = False
            self.ends[end] += 1

    # Trouble.

    def _cancel(self, journey: Journey) -> None:
        if journey.place is not None:
            worker, link_id, stream_id = journey.place
            del self._serving[journey.place]
            journey.place = None
            self.members[worker].doors.cancel(link_id, stream_id)
            self.members[worker].doors.check()

    def _move(self, journey: Journey, worker: int) -> None:
        """As if the worker had answered with an error that another one may not have."""
        if journey.place is not None:
            self._cancel(journey)
            self._visit(journey, worker, hand_over=worker < 2 and journey.ticket is None)

    def _close_link(self, worker: int, which: int) -> None:
        member = self.members[worker]
        link_id, member.links[which] = member.links[which], next(member.link_ids)
        member.doors.close_link(link_id)
        member.doors.check()
        self._lose(worker, link_id)

    def _die(self, worker: int) -> None:
        """The process is gone; another one takes its place."""
        old = self.members[worker]
        old.transport.close()
        self.members[worker] = Member(self.world, worker)
        self._introduce()
        for link_id in old.links:
            self._lose(worker, link_id)

    def _lose(self, worker: int, link_id: int) -> None:
        for place in [place for place in self._serving if place[:2] == (worker, link_id)]:
            journey = self._serving.pop(place)
            journey.place = None
            self._visit(journey, (worker + 1) % NUM_WORKERS)

    def _introduce(self) -> None:
        peers = [member.transport.peer for member in self.members]
        for member in self.members:
            member.doors.add_peers(peers)

    # The end.

    def _calm_down(self, starts: list[Journey]) -> None:
        """Nothing goes wrong any more, and no lease ends: everybody must reach the end so."""
        self.world.fates.calm = True
        rounds = 100 + sum(len(trip.prompt) + 4 * trip.max_tokens + 8 for trip in self.play.trips)
        for _ in range(4 * rounds):
            if all(journey.end for journey in self.journeys):
                break
            if starts:
                self._start(starts.pop(0))
            for worker in range(NUM_WORKERS):
                self._turn(worker)
        assert all(journey.end for journey in self.journeys), "a request never ended"
        self.world.now += HOLD_S
        for _ in range(4):
            for worker in range(NUM_WORKERS):
                self._turn(worker)
        for member in self.members:
            assert member.is_empty(), "blocks were lost"


def outputs_of_one_engine(play: Play) -> list[list[int]]:
    """What one engine with all the room in the world answers to the same requests."""
    kv = FakeKV(num_blocks := 512, play.block_size)
    pool = BlockPool(num_blocks, play.block_size, [0] * num_blocks)
    scheduler = Scheduler(
        pool, max_num_seqs=len(play.trips), max_num_batched_tokens=64, max_model_len=1000
    )
    engine = Engine(scheduler, FakeRunner(kv))
    outputs: dict[str, list[int]] = {}
    for i, trip in enumerate(play.trips):
        request = request_of(trip, f"trip-{i}", play.block_size)
        outputs[request.request_id] = []
        engine.submit(Sequence(msgspec.structs.replace(request, deadline_unix_s=1e12)))
    while engine.has_work:
        for event in engine.step():
            outputs[event.sequence.request_id].extend(event.token_ids)
    return list(outputs.values())


def assert_equivalent(play: Play) -> Fleet:
    """Play it, and compare each answer with one engine's."""
    fleet = Fleet(play)
    fleet.run()
    for journey, output in zip(fleet.journeys, outputs_of_one_engine(play), strict=True):
        if journey.end in ("stop", "length"):
            assert journey.output == output
        else:
            assert journey.output == output[: len(journey.output)]
    return fleet


def assert_thrifty(play: Play) -> None:
    """Every ticket is used, so that the fleet computes each token's KV once, wherever it is."""
    fleet = Fleet(play)
    fleet.run()
    transports = [member.transport for member in fleet.members]
    assert sum(transport.num_failed for transport in transports) == 0
    wanted = sum(len(each.trip.prompt) + len(each.output) - 1 for each in fleet.journeys)
    assert sum(member.runner.num_computed for member in fleet.members) == wanted
