"""Real engines and the real router under an open-loop load, in virtual seconds.

Only the model is left out: a step takes as long as `COEFFICIENTS` say, with noise that the time
models of the workers have to live with. A request is routed or refused when it comes, reaches its
worker a little later, and each worker reports after every step.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from dataclasses import dataclass, field

from disagg.blocks import hash_blocks
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import SampledToken, StepPlan
from disagg.errors import Overloaded
from disagg.messages import GenerateRequest, SamplingParams
from disagg.router.fleet import Fleet, Reservation
from disagg.router.policy import choose_route
from disagg.router.route import Candidate
from disagg.router.worker_view import RequestLoad
from disagg.time_model import StepTimeFit, StepTimeModel
from tests.router.fakes import BLOCK_SIZE, ROOT, make_record, make_status

COEFFICIENTS = (8e-3, 1e-4, 1e-8, 4e-4, 2e-7, 4e-3)
TRAVEL_S = 2e-3
NUM_BLOCKS = 1000


@dataclass(frozen=True)
class Traffic:
    """Requests for one kind of work. The longest answers are twice the mean."""

    per_s: float
    num_prompt_tokens: int
    num_output_tokens: int


class NoModel:
    def run(self, plan: StepPlan) -> list[SampledToken | None]:
        return [
            SampledToken(7) if num_tokens == sequence.num_uncomputed else None
            for sequence, num_tokens in zip(plan.sequences, plan.query_lens, strict=True)
        ]


@dataclass
class Served:
    """One accepted request."""

    began_s: float
    reservation: Reservation
    max_tokens: int
    way: Candidate
    num_tokens: int = 0


@dataclass
class Outcome:
    refused: list[Overloaded] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)  # to first tokens, of accepted requests
    num_tokens: int = 0
    max_num_queued_tokens: int = 0

    def wait_s(self, fraction: float) -> float:
        """A percentile, once the first half has shown how far off predictions are."""
        learned = sorted(self.waits_s[len(self.waits_s) // 2 :])
        return learned[int(fraction * len(learned))]

    @property
    def share_refused(self) -> float:
        return len(self.refused) / (len(self.refused) + len(self.waits_s))


class TimedWorker:
    """An engine whose steps take what they are said to take."""

    def __init__(self, worker_id: str, max_num_seqs: int, rng: random.Random) -> None:
        self.worker_id = worker_id
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, array("Q", bytes(8 * NUM_BLOCKS)))
        scheduler = Scheduler(
            pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=1024, max_model_len=8192
        )
        self.engine = Engine(scheduler, NoModel())
        self.is_stepping = False
        self._times = StepTimeModel.of(COEFFICIENTS)
        self._fit = StepTimeFit()
        self._rng = rng

    def begin_step(self) -> tuple[list[tuple[str, int]], float] | None:
        """What it will have gained, and how long it takes; None without work."""
        events = self.engine.step()
        features = self.engine.last_plan.features
        if not self.engine.last_plan.sequences:
            return None
        seconds = self._times.step_s(features) * self._rng.uniform(0.85, 1.15)
        self._fit.observe(features, seconds)
        gained = [(event.sequence.request_id, len(event.token_ids)) for event in events]
        return gained, seconds

    def report(self, fleet: Fleet) -> None:
        status = self.engine.status()
        changes = {name: getattr(status, name) for name in status.__struct_fields__}
        fleet.worker_stepped(
            self.worker_id,
            self.engine.pool.take_events(),
            make_status(**changes | {"step_costs": self._fit.to_costs()}),
        )


@dataclass(frozen=True)
class Arrival:
    worker: TimedWorker
    sequence: Sequence


@dataclass(frozen=True)
class Stepped:
    worker: TimedWorker
    gained: list[tuple[str, int]]


class OverloadedFleet:
    """Plays traffic against workers that prefill and decode."""

    def __init__(self, num_workers: int, max_num_seqs: int, slo_s: float, seed: int) -> None:
        self.outcome = Outcome()
        self.now = 0.0
        self._rng = random.Random(seed)
        self._slo_s = slo_s
        self._fleet = Fleet()
        self._workers: dict[str, TimedWorker] = {}
        for number in range(num_workers):
            record = make_record(f"d{number}", max_num_seqs=max_num_seqs, max_model_len=8192)
            self._fleet.worker_synced(record, [], make_status(step_costs=None))
            self._workers[record.worker_id] = TimedWorker(record.worker_id, max_num_seqs, self._rng)
        self._served: dict[str, Served] = {}
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = itertools.count()

    def play(self, traffic: list[Traffic], seconds: float, timeout_s: float = 600.0) -> Outcome:
        """Requests come for `seconds`; then those that were accepted end."""
        for kind in traffic:
            self._at(self._rng.expovariate(kind.per_s), "come", kind)
        while self._events:
            now, _, what, subject = heapq.heappop(self._events)
            self.now = now
            if what == "come":
                assert isinstance(subject, Traffic)
                self._come(now, subject, timeout_s)
                later = now + self._rng.expovariate(subject.per_s)
                if later < seconds:
                    self._at(later, "come", subject)
            elif what == "arrive":
                assert isinstance(subject, Arrival)
                subject.worker.engine.submit(subject.sequence)
                self._step(now, subject.worker)
            else:
                assert isinstance(subject, Stepped)
                subject.worker.is_stepping = False
                self._gain(now, subject.gained)
                subject.worker.report(self._fleet)
                self._step(now, subject.worker)
        return self.outcome

    def _come(self, now: float, kind: Traffic, timeout_s: float) -> None:
        number = next(self._numbers)
        tokens = tuple(self._rng.randbytes(kind.num_prompt_tokens))
        request = GenerateRequest(
            request_id=str(number),
            model="toy",
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            hash_root=ROOT,
            block_hashes=tuple(hash_blocks(ROOT, tokens, BLOCK_SIZE)),
            sampling=SamplingParams(max_tokens=1 + self._rng.randrange(2 * kind.num_output_tokens)),
            deadline_unix_s=now + timeout_s,
        )
        fleet = self._fleet
        try:
            route = choose_route(
                request, fleet.view(), fleet.index, now, self._rng, (), self._slo_s
            )
        except Overloaded as error:
            self.outcome.refused.append(error)
            return
        num_new = len(tokens) - route.num_cached_tokens
        reservation = fleet.reserve(route.decode, RequestLoad(num_new, 1, len(tokens)))
        fleet.sent(reservation)
        max_tokens = request.sampling.max_tokens
        self._served[request.request_id] = Served(now, reservation, max_tokens, route.chosen)
        arrival = Arrival(self._workers[route.decode], Sequence(request))
        self._at(now + TRAVEL_S, "arrive", arrival)

    def _step(self, now: float, worker: TimedWorker) -> None:
        if worker.is_stepping:
            return
        step = worker.begin_step()
        num_queued = worker.engine.status().num_uncomputed_tokens
        outcome = self.outcome
        outcome.max_num_queued_tokens = max(outcome.max_num_queued_tokens, num_queued)
        if step is not None:
            worker.is_stepping = True
            self._at(now + step[1], "stepped", Stepped(worker, step[0]))

    def _gain(self, now: float, gained: list[tuple[str, int]]) -> None:
        for request_id, num_tokens in gained:
            served = self._served[request_id]
            if not served.num_tokens:
                self.outcome.waits_s.append(now - served.began_s)
                self._fleet.release(served.reservation)
                learned, way = self._fleet.first_tokens["toy"], served.way
                learned.observe(way.own_s + way.wait_s, now - served.began_s, self._slo_s)
            served.num_tokens += num_tokens
            self.outcome.num_tokens += num_tokens
            if served.num_tokens == served.max_tokens:
                self._fleet.answers.observe("toy", served.num_tokens)

    def _at(self, when: float, what: str, subject: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, subject))
