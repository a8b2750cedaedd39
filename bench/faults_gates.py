"""The gates of `bench.faults`: each puts a load and a fault on the running system, and measures.

A gate returns its row of the table. All answers go through `Tally`, which checks the text, the end
and the number of ends of every answer of the run.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.faults.clients import Answer, Load, Questions, ask, load
from tests.faults.faults import Fault, Frozen, Killed, RedisDown, suffered
from tests.faults.oracles import Oracle
from tests.faults.system import Member, System

CREW, LONE = "crew", "lone"  # names of the pools that gates use: 1 + 4 workers, 0 + 1
RATE = 10.0  # requests a second
SETTLE_S = 3.0  # of load before a fault, and after it
BURST = 16
LONG = 400  # tokens of streams that a fault is to hit
RUSH = "rush"  # the pool that is overloaded: 1 + 1 slow workers
RUSH_SLO_S = 3.0
OVERLOAD = 3.0
NUM_AT_ONCE = 32  # more than the overloaded pool runs at once: to find out what it can do
LEAST_S = 15.0  # of that


@dataclass(frozen=True)
class Sizes:
    """How long and how large the gates are.

    num_steps: of the property test.
    churn: requests, joins and leaves.
    """

    num_steps: int = 100_000
    churn: tuple[int, int, int] = (1536, 250, 150)
    num_streams: int = 500
    num_scale_downs: int = 10
    redis_down_s: float = 60.0
    soak_s: float = 1800.0
    overload_s: float = 300.0
    is_rehearsal: bool = False


REHEARSAL = Sizes(2000, (100, 16, 10), 60, 1, 3.0, 60.0, 20.0, is_rehearsal=True)


@dataclass
class Tally:
    """Judges answers. `wrong` are texts that are not what they must be, over all gates."""

    counts: Counter[str] = field(default_factory=Counter)

    def take(self, answers: Iterable[Answer]) -> Counter[str]:
        """What became of these answers, by verdict."""
        verdicts = Counter(map(verdict, answers))
        self.counts += verdicts
        return verdicts


def verdict(answer: Answer) -> str:
    expected = answer.question.expected
    if not expected.startswith(answer.text):
        return "wrong"
    if answer.has_left:
        return "left"
    if answer.trouble or not answer.is_done or answer.num_ends != 1:
        return "without end"
    if answer.error is not None:
        return "refused" if answer.status in (429, 503) else "failed"
    return "ok" if answer.text == expected else "wrong"


def num_failed(verdicts: Counter[str]) -> int:
    return verdicts.total() - verdicts["ok"] - verdicts["left"]


def row(gate: str, goal: str, measured: str, is_held: bool) -> dict[str, Any]:
    held = "yes" if is_held else "NO"
    return {"gate": gate, "goal": goal, "measured": measured, "held": held, "minutes": ""}


class Gates:
    """All gates share a system; each begins when it is whole and at rest."""

    def __init__(self, system: System, sizes: Sizes) -> None:
        self.system = system
        self.sizes = sizes
        self.tally = Tally()
        self._seeds = iter(range(1 << 30))

    def questions(self, model: str = CREW, num_prefixes: int = 4) -> Questions:
        return Questions(random.Random(next(self._seeds)), model, num_prefixes=num_prefixes)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Load]:
        async with load(self.system.port, self.questions(), RATE) as running:
            await asyncio.sleep(SETTLE_S)
            yield running
            await asyncio.sleep(SETTLE_S)

    async def busiest(self, model: str, role: str, least: int = 1) -> Member:
        while True:
            num_streams = await asyncio.to_thread(self.system.num_streams, model, role)
            found = max(num_streams, key=lambda member: num_streams[member])
            if num_streams[found] >= least:
                return found
            await asyncio.sleep(0.02)

    # Deaths and freezes.

    async def decode_killed(self) -> list[dict[str, Any]]:
        return await self._worker_hit("1 of 4 decode workers killed", "decode", Killed, 1.0)

    async def prefill_killed(self) -> list[dict[str, Any]]:
        return await self._worker_hit("the only prefill worker killed", "prefill", Killed, 1.0)

    async def decode_frozen(self) -> list[dict[str, Any]]:
        return await self._worker_hit("1 of 4 decode workers frozen", "decode", Frozen, 5.0)

    async def _worker_hit(
        self, name: str, role: str, kind: type[Killed] | type[Frozen], goal_s: float
    ) -> list[dict[str, Any]]:
        async with self.load() as running:
            # At once, so that somebody is there when it happens; prompts are over soon.
            questions, number = self.questions(), BURST if role == "decode" else 8 * BURST
            burst = [
                asyncio.create_task(ask(self.system.port, questions.next())) for _ in range(number)
            ]
            victim = await self.busiest(CREW, role, least=2)
            worker_id, at = victim.state()["worker_id"], time.time()
            async with suffered(kind(victim.process)):
                await asyncio.sleep(2 * goal_s + SETTLE_S)
                hit = [*await running.answers(), *await asyncio.gather(*burst)]
        answers = [*await running.answers(), *await asyncio.gather(*burst)]
        verdicts = self.tally.take(answers)
        chosen_s, known_s, num_moved = self._decisions(hit, worker_id, at)
        failed = num_failed(verdicts)
        rows = [
            row(name, "0 failed", f"{failed} of {len(answers)} failed", failed == 0),
            row(
                "  new work routed away",
                f"<= {goal_s:g} s",
                f"{chosen_s:.2f} s after it was last chosen",
                chosen_s <= goal_s,
            ),
        ]
        known = f"{known_s:.2f} s, {num_moved} moved" if num_moved else "nobody was there"
        is_known = num_moved > 0 and known_s <= goal_s
        return [*rows, row("  failure known to its streams", f"<= {goal_s:g} s", known, is_known)]

    def _decisions(
        self, answers: Iterable[Answer], worker_id: str, at: float
    ) -> tuple[float, float, int]:
        """After a fault at Unix time `at`: when the victim was chosen last, when the last request
        that was there then was moved (both as seconds since), and how many were moved."""
        chosen_s, known_s, num_moved = 0.0, 0.0, 0
        with httpx.Client(base_url=self.system.url) as client:
            for answer in answers:
                reply = client.get(f"/debug/requests/{answer.request_id}")
                decisions = reply.json()["routes"] if reply.status_code == 200 else []
                for number, decision in enumerate(decisions):
                    route = decision["route"]
                    if worker_id not in (route["prefill"], route["decode"]):
                        continue
                    chosen_s = max(chosen_s, decision["unix_s"] - at)
                    after = decisions[number + 1 :][:1]
                    if decision["unix_s"] < at and after and after[0]["unix_s"] > at:
                        known_s = max(known_s, after[0]["unix_s"] - at)
                        num_moved += 1
        return chosen_s, known_s, num_moved

    async def only_decode_killed(self) -> list[dict[str, Any]]:
        questions = self.questions(LONE)
        streams = [
            asyncio.create_task(ask(self.system.port, questions.next(LONG))) for _ in range(16)
        ]
        victim = await self.busiest(LONE, "decode", least=16)
        async with suffered(Killed(victim.process)):
            died_at = time.monotonic()
            answers = await asyncio.gather(*streams)
        verdicts = self.tally.take(answers)
        again_s = [
            min(at for at in answer.came_at if at > died_at) - died_at
            for answer in answers
            if any(at > died_at for at in answer.came_at)
        ]
        measured = f"{verdicts['ok']} of {len(answers)} resumed"
        if again_s:
            measured += f", after {max(again_s):.1f} s"
        goal = "all resume on its replacement"
        return [row("the only decode worker killed", goal, measured, not num_failed(verdicts))]

    # Planned leaves.

    async def scale_downs(self) -> list[dict[str, Any]]:
        num, system = self.sizes.num_scale_downs, self.system
        async with self.load() as running:
            for _ in range(num):
                for size in (3, 4):
                    await asyncio.to_thread(system.scale, CREW, "decode", size)
                    await asyncio.to_thread(system.wait_whole)
        return [self._failures(f"{num} scale-downs at constant load", await running.answers())]

    async def rolling_update(self) -> list[dict[str, Any]]:
        async with self.load() as running:
            await asyncio.to_thread(self.system.deploy_again)
            await asyncio.to_thread(self.system.wait_whole)
        return [self._failures("a rolling update at constant load", await running.answers())]

    def _failures(self, name: str, answers: list[Answer]) -> dict[str, Any]:
        verdicts = self.tally.take(answers)
        failed = num_failed(verdicts)
        measured = f"{failed} of {len(answers)} failed"
        if failed:
            measured += f": {why(answers)}"
        return row(name, "0 failed", measured, failed == 0)

    # Redis, clients.

    async def redis_down(self) -> list[dict[str, Any]]:
        down_s = self.sizes.redis_down_s
        kinds: list[tuple[str, Fault]] = [
            ("down", RedisDown(self.system.redis)),
            ("frozen", Frozen(psutil.Process(self.system.redis.pid))),
        ]
        rows = []
        for what, fault in reversed(kinds):
            async with self.load() as running, suffered(fault):
                await asyncio.sleep(down_s)
            answers = await running.answers()
            rows.append(self._failures(f"Redis {what} for {down_s:g} s", answers))
        return rows

    async def streams_dropped(self) -> list[dict[str, Any]]:
        num, questions, rng = self.sizes.num_streams, self.questions(), random.Random(0)
        oracle, ingress = Oracle(self.system, CREW), self.system.ingress()
        cpu_s = _cpu_s(ingress)
        answers = await asyncio.gather(
            *[
                ask(self.system.port, questions.next(LONG), leaves_after_s=rng.uniform(0.1, 4.0))
                for _ in range(num)
            ]
        )
        left_at = time.monotonic()
        await asyncio.to_thread(oracle.check_rest)
        seconds = time.monotonic() - left_at
        cpu_s = _cpu_s(ingress) - cpu_s
        verdicts = self.tally.take(answers)
        is_held = seconds <= 2.0 and verdicts["left"] == num
        measured = (
            f"{verdicts['left']} dropped, all blocks back after {seconds:.2f} s; the ingress worked"
            f" for {cpu_s:.1f} s"
        )
        return [row(f"{num} streams dropped at random", "<= 2 s", measured, is_held)]

    # Overload.

    async def overload(self) -> list[dict[str, Any]]:
        """Three times the requests that the pool can answer."""
        capacity = await self._capacity()
        async with load(self.system.port, self.questions(RUSH), OVERLOAD * capacity) as running:
            await asyncio.sleep(self.sizes.overload_s)
        answers = await running.answers()
        verdicts = self.tally.take(answers)
        refused = [answer for answer in answers if verdict(answer) == "refused"]
        hinted = sum("retry-after" in answer.headers for answer in refused)
        waits = sorted(
            answer.came_at[0] - answer.asked_at for answer in answers if verdict(answer) == "ok"
        )
        p95_s = waits[int(0.95 * len(waits))] if waits else float("inf")
        others = len(answers) - verdicts["ok"] - len(refused)
        surplus = (
            f"{len(refused)} of {len(answers)} refused, {hinted} with Retry-After, {others} others"
        )
        if others:
            surplus += f": {why(each for each in answers if verdict(each) != 'refused')}"
        name = f"{OVERLOAD:g} x {capacity:.1f} requests/s for {self.sizes.overload_s:g} s"
        is_refused = bool(refused) and hinted == len(refused) and not others
        return [
            row(name, "surplus refused with Retry-After", surplus, is_refused),
            row(
                "  first token of accepted ones",
                f"p95 <= {RUSH_SLO_S:g} s",
                f"p95 {p95_s:.2f} s of {len(waits)}",
                p95_s <= RUSH_SLO_S,
            ),
        ]

    async def _capacity(self) -> float:
        """Requests a second that the pool answers when some always wait."""
        questions, ends_at = self.questions(RUSH), time.monotonic() + LEAST_S
        answers: list[Answer] = []

        async def client() -> None:
            while time.monotonic() < ends_at:
                answer = await ask(self.system.port, questions.next())
                answers.append(answer)
                if answer.error is not None:
                    await asyncio.sleep(0.5)

        began_s = time.monotonic()
        await asyncio.gather(*[client() for _ in range(NUM_AT_ONCE)])
        self.tally.take(answers)
        num_ok = sum(verdict(answer) == "ok" for answer in answers)
        return max(num_ok, 1) / (time.monotonic() - began_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def why(answers: Iterable[Answer]) -> str:
    """The commonest reasons of answers that did not come to their end."""
    reasons = Counter(
        answer.trouble or f"{answer.status} {(answer.error or {}).get('code')}"
        for answer in answers
        if verdict(answer) not in ("ok", "left")
    )
    return ", ".join(f"{num} x {reason}" for reason, num in reasons.most_common(3))
