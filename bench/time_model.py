"""Measures how well the time model predicts this machine's engine under a mixed load.

    python -m bench.time_model [--clock cpu|wall] [--requests 400] [--tiny]

One real engine (demo-large) serves prompts of 16 to 1,500 tokens that come at random and get
answers of 16 to 128 tokens. The real fit, fleet view and routing costs run beside it.

- `TTFT`: what the router predicts when a request arrives, from the status after the last step,
  beside the measured time to its first token.
- `TTFT, steps known`: the same model, told what was done until the first token: the rest of the
  running step, and what each later step computed. Its error is the model's own; the rest of TTFT's
  error comes from requests that arrived in between.
- `decode step`: the fit's prediction just before it learns from a step; also `mixed step`.
- `noise`: equal steps again and again, beside their median; no model can be better.

Errors are fractions of what was measured. The first requests warm up the fit and do not count. With
the clock `cpu` (the default) time is the CPU time of the thread, so other programs on a shared
machine do not count. The engine then has one thread.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench.report import finish, print_table
from disagg.blocks import hash_blocks
from disagg.capacity.prior import step_times
from disagg.capacity.shapes import shape_of
from disagg.config import ASSETS, EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.kvtransfer.ticket import Peer
from disagg.messages import GenerateRequest, SamplingParams, WorkerRecord, WorkerStatus
from disagg.models.description import describe_model
from disagg.router.fleet import Fleet, Reservation
from disagg.router.policy import choose_route
from disagg.router.worker_view import RequestLoad
from disagg.time_model import StepTimeFit, StepTimeModel
from disagg.worker.first_steps import first_steps

MODEL, WORKER = "demo-large", "w"
PROMPT_TOKENS, ANSWER_TOKENS = (16, 1500), (16, 128)
BUSY = 0.6  # of the time, if each request took its share of so many usual ones together
NUM_TOGETHER = 2
WARM_UP = 0.1  # of the requests
NUM_REPEATS, NUM_REPEATED_SEQUENCES, REPEATED_TOKENS = 200, 16, 256
NUM_REPEATED_PROMPTS, REPEATED_PROMPT_TOKENS = 40, 512
GOAL = {"median": 0.10, "p95": 0.30}


class Clock:
    """Seconds that pass as `source` says, and by `skip`."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._skipped_s = -source()

    def __call__(self) -> float:
        return self._source() + self._skipped_s

    def skip_to(self, moment_s: float) -> None:
        self._skipped_s += max(0.0, moment_s - self())


class Rig:
    """A worker's engine and what an ingress knows of it."""

    def __init__(self, clock: Clock) -> None:
        config = EngineConfig(num_threads=1, device="cpu", kv_cache_memory_bytes=256 << 20)
        self.model = describe_model(ASSETS / MODEL)
        self.engine, _ = build_engine(config, self.model)
        self.clock = clock
        prior, _ = step_times(shape_of(self.model), "")
        self.fit = StepTimeFit(first_steps(self.engine, clock, prior))  # as `worker.parts` does
        self.fleet = Fleet(now=clock)
        self.rng = random.Random(1)
        pool, scheduler = self.engine.pool, self.engine.scheduler
        record = WorkerRecord(
            worker_id=WORKER,
            role="decode",
            model=MODEL,
            host="",
            port=0,
            epoch=1,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            max_model_len=scheduler.max_model_len,
            peer=Peer(WORKER, 1, "local", "bench", pool.num_blocks, 1, 0, 0, -1, b""),
            pid=0,
            max_num_seqs=scheduler.max_num_seqs,
        )
        self.fleet.worker_synced(record, (), self.status())

    def status(self) -> WorkerStatus:
        return msgspec.structs.replace(self.engine.status(), step_costs=self.fit.to_costs())

    def request(self, name: str, num_tokens: int, num_output: int) -> GenerateRequest:
        root = b"bench"
        tokens = tuple(
            self.rng.randrange(3, self.model.config.vocab_size) for _ in range(num_tokens)
        )
        return GenerateRequest(
            request_id=name,
            model=MODEL,
            token_ids=tokens,
            num_prompt_tokens=num_tokens,
            hash_root=root,
            block_hashes=tuple(hash_blocks(root, tokens, self.engine.pool.block_size)),
            sampling=SamplingParams(max_tokens=num_output, temperature=0.0),
            deadline_unix_s=math.inf,
        )


class Visit(msgspec.Struct):
    """A request until its first token.

    times: the model when it came.
    known_s: what that says of the steps since, after the true rest of the one under way.
    """

    arrived_s: float
    predicted_s: float
    reservation: Reservation
    times: StepTimeModel
    known_s: float


class Played(msgspec.Struct):
    """Predicted and measured seconds."""

    ttft: list[tuple[float, float]] = []
    ttft_steps_known: list[tuple[float, float]] = []
    decode_steps: list[tuple[float, float]] = []
    mixed_steps: list[tuple[float, float]] = []
    busy_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    answered: list[Reservation] = []  # in the last step


def share_s(rig: Rig) -> float:
    """What each of some usual requests takes of an engine that has them together."""
    for place in range(NUM_TOGETHER):
        request = rig.request(f"usual {place}", sum(PROMPT_TOKENS) // 2, sum(ANSWER_TOKENS) // 2)
        rig.engine.submit(EngineSequence(request))
    began_s = rig.clock()
    end_all(rig.engine)
    return (rig.clock() - began_s) / NUM_TOGETHER


def arrivals(rig: Rig, num_requests: int) -> list[tuple[float, int, int]]:
    """When, prompt tokens, answer tokens; so many that the engine is busy for `BUSY` of it."""
    rng, rate = random.Random(2), BUSY / share_s(rig)
    found, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        found.append((now, rng.randint(*PROMPT_TOKENS), rng.randint(*ANSWER_TOKENS)))
    return found


def arrive(rig: Rig, moment_s: float, request: GenerateRequest) -> Visit:
    """As in the dispatcher: predict, choose, claim, send."""
    view, index = rig.fleet.view(), rig.fleet.index
    route = choose_route(request, view, index, moment_s, rig.rng, ttft_slo_s=None)
    num_tokens = len(request.token_ids)
    claim = rig.fleet.reserve(WORKER, RequestLoad(num_tokens, 1, num_tokens))
    rig.fleet.sent(claim)
    rig.engine.submit(EngineSequence(request))
    times = view.workers[WORKER].times
    return Visit(moment_s, route.predicted_s, claim, times, rig.clock() - moment_s)


def play(rig: Rig, num_requests: int) -> Played:
    """What comes during a step is routed by what was known before it, and computed after it."""
    played = Played()
    coming = arrivals(rig, num_requests)[::-1]
    num_warm_up = int(WARM_UP * num_requests)
    visits: dict[str, Visit] = {}
    began_s = rig.clock()
    while coming or rig.engine.has_work:
        if not rig.engine.has_work:
            rig.clock.skip_to(began_s + coming[-1][0])
        events, status = rig.engine.pool.take_events(), rig.status()
        while coming and began_s + coming[-1][0] <= rig.clock():
            moment_s, num_tokens, num_output = coming.pop()
            name = str(num_requests - len(coming))
            request = rig.request(name, num_tokens, num_output)
            visits[name] = arrive(rig, began_s + moment_s, request)
            if num_requests - len(coming) == num_warm_up:
                played = Played(began_s=rig.clock(), answered=played.answered)
        rig.fleet.worker_stepped(WORKER, events, status)
        for claim in played.answered:
            rig.fleet.release(claim)
        played.answered.clear()
        step(rig, visits, played)
    played.ended_s = rig.clock()
    return played


def step(rig: Rig, visits: dict[str, Visit], played: Played) -> None:
    began_s = rig.clock()
    events = rig.engine.step()
    ended_s = rig.clock()
    took_s = ended_s - began_s
    features = rig.engine.last_plan.features
    played.busy_s += took_s
    kind = played.mixed_steps if features.num_new_tokens else played.decode_steps
    kind.append((rig.fit.model.step_s(features), took_s))
    rig.fit.observe(features, took_s)
    for visit in visits.values():
        visit.known_s += visit.times.step_s(features)
    for event in events:
        first = visits.pop(event.sequence.request_id, None) if event.token_ids else None
        if first is not None:
            ttft_s = ended_s - first.arrived_s
            played.ttft.append((first.predicted_s, ttft_s))
            played.ttft_steps_known.append((first.known_s, ttft_s))
            played.answered.append(first.reservation)


def repeated_steps(rig: Rig, num_repeats: int) -> list[tuple[float, float]]:
    """Each decode step of a batch that hardly changes."""
    for place in range(NUM_REPEATED_SEQUENCES):
        request = rig.request(f"repeat {place}", REPEATED_TOKENS, num_repeats + 8)
        rig.engine.submit(EngineSequence(request))
    while rig.engine.scheduler.waiting or rig.engine.last_plan.features.num_new_tokens:
        rig.engine.step()
    took_s = [timed_step(rig) for _ in range(num_repeats)]
    end_all(rig.engine)
    return beside_median(took_s)


def repeated_prompts(rig: Rig, num_repeats: int) -> list[tuple[float, float]]:
    """Prompts of one length, each alone in its step."""
    took_s = []
    for place in range(num_repeats):
        request = rig.request(f"prompt {place}", REPEATED_PROMPT_TOKENS, 1)
        rig.engine.submit(EngineSequence(request))
        took_s.append(timed_step(rig))
    return beside_median(took_s)


def timed_step(rig: Rig) -> float:
    began_s = rig.clock()
    rig.engine.step()
    return rig.clock() - began_s


def beside_median(took_s: Sequence[float]) -> list[tuple[float, float]]:
    """Each beside the median of its neighbours and itself."""
    spans = (took_s[max(0, at - 10) : at + 11] for at in range(len(took_s)))
    return [(statistics.median(span), took) for span, took in zip(spans, took_s, strict=True)]


def end_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def row(what: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    errors = sorted(abs(predicted - took) / took for predicted, took in pairs)
    signed = statistics.median([predicted / took - 1.0 for predicted, took in pairs])
    return {
        "what": what,
        "number": len(errors),
        "measured p50 ms": statistics.median(took for _, took in pairs) * 1e3,
        "error p50 %": statistics.median(errors) * 100,
        "error p95 %": errors[min(len(errors) - 1, int(0.95 * len(errors)))] * 100,
        "bias p50 %": signed * 100,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    rig = Rig(Clock(time.thread_time if arguments.clock == "cpu" else time.perf_counter))
    num_requests = 12 if arguments.tiny else arguments.requests
    played = play(rig, num_requests)
    share = 0.1 if arguments.tiny else 1.0
    rows = [
        row("TTFT", played.ttft),
        row("TTFT, steps known", played.ttft_steps_known),
        row("decode step", played.decode_steps),
        row("mixed step", played.mixed_steps),
        row("noise of decode steps", repeated_steps(rig, int(share * NUM_REPEATS))),
        row("noise of prompts", repeated_prompts(rig, int(share * NUM_REPEATED_PROMPTS))),
    ]
    print_table(rows)
    busy = played.busy_s / (played.ended_s - played.began_s)
    finish("time_model", rows, goal=GOAL, clock=arguments.clock, busy=busy)


if __name__ == "__main__":
    main()
