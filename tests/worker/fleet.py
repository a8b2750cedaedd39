"""A whole fleet in one thread: workers and a small ingress, stepped in any order.

What happens is drawn beforehand as a `Play`, so that it can be repeated and shrunk. After every
action each block of the worker is recounted, and each token is compared with what it must be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.ingress.request_state import RequestState, append_tokens
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import (
    GenerateRequest,
    Prefetch,
    Start,
    TokenDelta,
    WireError,
    decode_to_worker,
    encode,
)
from disagg.worker.kv_export import HOLD_TTL_S
from tests.engine.fake_runner import FakeKV, FakeRunner, expected_tokens
from tests.engine.workload import STOP_IDS
from tests.worker.members import Member, World
from tests.worker.plays import NUM_WORKERS, Play, Trip, request_of, spoiled

HOLD_S = HOLD_TTL_S + 1


class WrongTokens(AssertionError):
    """A sequence read KV that is not its own, or none."""


class BlocksLost(AssertionError):
    """Not everything that was allocated came back."""


class NeverEnded(AssertionError):
    """A request waits for ever."""


@dataclass(eq=False)
class Journey:
    """How far a trip has come; what `ingress.dispatch` knows of a request."""

    trip: Trip
    request: GenerateRequest
    expected: list[int]
    output: list[int] = field(default_factory=list)
    ticket: KVTicket | None = None
    place: tuple[int, int, int] | None = None  # worker, link and stream, while one serves it
    last_worker: int = 0
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
            request = request_of(trip, f"trip-{i}", play.block_size, play.windows)
            expected = expected_tokens(
                trip.prompt, trip.max_tokens, STOP_IDS, trip.seed, play.windows
            )
            self.journeys.append(Journey(trip, request, expected))
        self._serving: dict[tuple[int, int, int], Journey] = {}
        self._presented: set[KVTicket] = set()
        self._draining: int | None = None  # one at a time, so that somebody takes requests
        self.ends: Counter[str] = Counter()
        self.met = self.world.met

    def run(self) -> None:
        """The whole play; then quiet, in which everything must end and come back."""
        starts = sorted(self.journeys, key=lambda journey: journey.trip.at)
        for place, action in enumerate(self.play.schedule):
            while starts and starts[0].trip.at <= place:
                self._start(starts.pop(0))
            self._act(action % 32, action // 32)
        self._calm_down(starts)
        for member in self.members:
            member.note()

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
                self.met["cancelled"] += self._cancel(journey)
                self._end(journey, "gone")
            case 27 | 28:
                self._move(journey, arg // 2)
            case 29 if arg < NUM_WORKERS:
                self._close_link(worker, arg % 2)
            case 30 if arg < 3:
                self.met["worker died"] += self._replace(worker)
            case 30 if arg < 6:
                self.members[worker].runner.breaks = True
            case 31 if self._draining is None:
                self._draining = worker
                self.members[worker].core.drain(self.world.now + 3.0 * (arg > 5))
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
        if member.is_broken:
            self.met["engine broke"] += 1
            self._replace(worker)
        elif self._draining == worker and member.core.is_idle:
            self.met["drained"] += 1
            assert not self._replace(worker), "a worker left before its streams had ended"

    # Requests on their way.

    def _start(self, journey: Journey) -> None:
        if not journey.end:
            if journey.trip.prefix_source is not None:
                self._pull_prefix(journey, journey.trip.prefix_source)
            self._visit(journey, journey.trip.first, hand_over=journey.trip.hand_over)

    def _pull_prefix(self, journey: Journey, worker: int) -> None:
        """A ticket for what a worker has of the prompt, or none; and what becomes of it."""
        member, trip = self.members[worker], journey.trip
        request = RequestState(journey.request).prefix_request(self.play.block_size)
        link_id = member.links[0]
        start = decode_to_worker(
            encode(Start(next(member.stream_ids[link_id]), request, hand_over=True))
        )
        assert isinstance(start, Start) and start.is_prefix_request
        delta = member.core.prefix_ticket(link_id, start, self.world.now)
        member.core.check()
        if delta.ticket is None:
            assert delta.error is not None and delta.error.code == "unavailable"
            return
        self.met["granted"] += 1
        match trip.ticket:
            case "leave" | "lose":
                pass
            case "give back":
                member.core.release(delta.ticket.ticket_id)
            case "spoil":
                journey.ticket = spoiled(delta.ticket, trip.seed + len(trip.prompt))
            case _:
                journey.ticket = delta.ticket

    def _visit(self, journey: Journey, worker: int, *, hand_over: bool = False) -> None:
        member = self.members[worker]
        new = list(journey.output[len(journey.request.token_ids) - len(journey.trip.prompt) :])
        if new:
            journey.request = append_tokens(journey.request, new, self.play.block_size)
        ticket = journey.ticket
        if ticket is not None:
            self.met["ticket shown twice"] += ticket in self._presented
            self._presented.add(ticket)
        link_id = member.links[len(journey.request.token_ids) % 2]
        stream_id = next(member.stream_ids[link_id])
        start = decode_to_worker(encode(Start(stream_id, journey.request, hand_over, ticket)))
        assert isinstance(start, Start)
        journey.place = worker, link_id, stream_id
        journey.last_worker = worker
        self._serving[journey.place] = journey
        member.core.start(link_id, start, self.world.now)
        member.core.check()

    def _take(self, journey: Journey, delta: TokenDelta) -> None:
        output, expected = journey.output, journey.expected
        output.extend(delta.token_ids)
        if output != expected[: len(output)]:
            raise WrongTokens(f"{output} instead of {expected[: len(output)]}")
        if delta.early_ticket is not None:
            self._prefetch(journey, delta.early_ticket)
        assert 0 <= delta.num_cached_tokens < len(journey.trip.prompt) + len(output)
        if delta.ticket is None and delta.token_ids:
            journey.ticket = None
        if not delta.is_last:
            return
        assert journey.place is not None
        del self._serving[journey.place]
        journey.place = None
        if delta.error is not None:
            self._take_error(journey, delta.error)
        elif delta.finish_reason is not None:
            assert output == expected and self.world.now < journey.trip.deadline_s
            assert delta.finish_reason == ("stop" if output[-1] in STOP_IDS else "length")
            self._end(journey, delta.finish_reason)
        else:
            assert delta.ticket is not None
            journey.ticket = delta.ticket
            self._hand_on(journey, delta.ticket)

    def _prefetch(self, journey: Journey, ticket: KVTicket) -> None:
        """What is ready goes ahead, to where the request will go, unless it is lost on the way."""
        trip = journey.trip
        if trip.ticket == "spoil":
            ticket = spoiled(ticket, trip.seed + len(trip.prompt))
        elif trip.ticket == "lose":
            return
        self.met["prefetched"] += 1
        names = journey.request.block_hashes[: len(ticket.block_ids)]
        message = decode_to_worker(encode(Prefetch(ticket, names)))
        assert isinstance(message, Prefetch)
        member = self.members[trip.second]
        member.core.prefetch(message, self.world.now)
        member.core.check()

    def _take_error(self, journey: Journey, error: WireError) -> None:
        """Too late is too late, and who may have broken an engine breaks no other; whatever else a
        worker says, another one may not."""
        is_broken = self.members[journey.last_worker].is_broken
        if error.code in ("deadline_exceeded", "engine_failed"):
            is_late = self.world.now >= journey.trip.deadline_s
            assert is_broken if error.code == "engine_failed" else is_late, error
            self._end(journey, error.code)
            return
        assert error.code == "unavailable" or (is_broken and error.code == "worker_lost"), error
        self.met[f"moved, {error.code}"] += 1
        self._visit(journey, (journey.last_worker + 1) % NUM_WORKERS)

    def _hand_on(self, journey: Journey, ticket: KVTicket) -> None:
        self.met[f"ticket: {journey.trip.ticket}"] += 1
        self.met["left in mid-answer"] += len(journey.output) > 1
        match journey.trip.ticket:
            case "leave":
                self._end(journey, "gone")
            case "give back":
                source = next(each for each in self.members if each.name == ticket.source_id)
                source.core.release(ticket.ticket_id)
                self._end(journey, "gone")
            case "late":
                journey.postponed = True
            case "lose":
                journey.ticket = None
                self._go_on(journey, journey.trip.second)
            case "spoil":
                journey.ticket = spoiled(ticket, journey.trip.seed + len(journey.trip.prompt))
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

    def _cancel(self, journey: Journey) -> bool:
        """Whether there was anything to cancel."""
        if journey.place is None:
            return False
        worker, link_id, stream_id = journey.place
        del self._serving[journey.place]
        journey.place = None
        self.members[worker].core.cancel(link_id, stream_id, self.world.now)
        self.members[worker].core.check()
        return True

    def _move(self, journey: Journey, worker: int) -> None:
        """As if the worker had answered with an error that another one may not have."""
        if self._cancel(journey):
            self.met["moved, cancelled"] += 1
            self._visit(journey, worker, hand_over=worker < 2 and journey.ticket is None)

    def _close_link(self, worker: int, which: int) -> None:
        member = self.members[worker]
        link_id, member.links[which] = member.links[which], next(member.link_ids)
        member.core.close_link(link_id, self.world.now)
        member.core.check()
        self.met["link cut"] += self._lose(worker, link_id) > 0

    def _replace(self, worker: int) -> bool:
        """The process is gone; another one takes its place. Whether any request was on it."""
        old = self.members[worker]
        old.note()
        old.transport.close()
        self.members[worker] = Member(self.world, worker)
        if self._draining == worker:
            self._draining = None
        self._introduce()
        return sum(self._lose(worker, link_id) for link_id in old.links) > 0

    def _lose(self, worker: int, link_id: int) -> int:
        """All streams of a link go elsewhere. Returns how many these were."""
        places = [place for place in self._serving if place[:2] == (worker, link_id)]
        for place in places:
            journey = self._serving.pop(place)
            journey.place = None
            self._visit(journey, (worker + 1) % NUM_WORKERS)
        return len(places)

    def _introduce(self) -> None:
        peers = [member.transport.peer for member in self.members]
        for member in self.members:
            member.core.add_peers(peers)

    # The end.

    def _calm_down(self, starts: list[Journey]) -> None:
        """Nothing goes wrong any more, and no lease ends: everybody must reach the end so."""
        self.world.fates.calm = True
        for member in self.members:
            member.runner.breaks = False
        rounds = 100 + sum(len(trip.prompt) + 4 * trip.max_tokens + 8 for trip in self.play.trips)
        for _ in range(4 * rounds):
            if all(journey.end for journey in self.journeys):
                break
            if starts:
                self._start(starts.pop(0))
            for worker in range(NUM_WORKERS):
                self._turn(worker)
        if not all(journey.end for journey in self.journeys):
            raise NeverEnded(str([each for each in self.journeys if not each.end]))
        self.world.now += HOLD_S
        for _ in range(4):
            for worker in range(NUM_WORKERS):
                self._turn(worker)
        for member in self.members:
            if not member.is_empty():
                raise BlocksLost(f"{member.name}: {member.pool.num_free} free")


def outputs_of_one_engine(play: Play) -> list[list[int]]:
    """What one engine with all the room in the world answers to the same requests."""
    kv = FakeKV(num_blocks := 512, play.block_size, play.windows)
    pool = BlockPool(num_blocks, play.block_size, [0] * num_blocks, windows=play.windows)
    scheduler = Scheduler(
        pool, max_num_seqs=len(play.trips), max_num_batched_tokens=64, max_model_len=1000
    )
    engine = Engine(scheduler, FakeRunner(kv))
    outputs: dict[str, list[int]] = {}
    for i, trip in enumerate(play.trips):
        request = request_of(trip, f"trip-{i}", play.block_size, play.windows)
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
        is_whole = journey.end in ("stop", "length")
        if journey.output != (output if is_whole else output[: len(journey.output)]):
            raise WrongTokens(f"{journey.output} where one engine answers {output}")
    return fleet


def assert_thrifty(play: Play) -> None:
    """Every ticket is used, so that the fleet computes each token's KV once, wherever it is."""
    fleet = Fleet(play)
    fleet.run()
    assert fleet.met["pull failed"] == 0
    wanted = sum(len(each.trip.prompt) + len(each.output) - 1 for each in fleet.journeys)
    assert fleet.met["computed"] == wanted
