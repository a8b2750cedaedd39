"""The gates of `bench.faults` that take long: memory under a soak, and an overload."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from bench.faults_gates import CREW, Gates, row, verdict, why
from tests.faults.clients import Answer, ask, load

RUSH = "rush"  # the pool that is overloaded: 1 + 1 slow workers
RUSH_SLO_S = 3.0
SAMPLE_S = 5.0
SOAK_RATE = 10.0
WARM_UP = 1 / 3  # of a soak
MB_PER_MIN = 1.0
OVERLOAD = 3.0
NUM_AT_ONCE = 32  # more than the overloaded pool runs at once: to find out what it can do
LEAST_S = 15.0  # of that


async def soak(gates: Gates) -> list[dict[str, Any]]:
    """How the memory of each process grows under prompts that nobody sent before."""
    system = gates.system
    processes = {"router": system.ingress()} | {
        f"worker {member.pid}": member.process for member in system.members(CREW)
    }
    times: list[float] = []
    sizes: dict[str, list[float]] = {name: [] for name in processes}
    async with load(system.port, gates.questions(num_prefixes=0), SOAK_RATE) as running:
        ends_at = time.monotonic() + gates.sizes.soak_s
        while time.monotonic() < ends_at:
            await asyncio.sleep(SAMPLE_S)
            times.append(time.monotonic())
            gone = [name for name, process in processes.items() if not process.is_running()]
            if gone:
                return [row("memory of the same processes", "all live", f"{gone} ended", False)]
            for name, process in processes.items():
                sizes[name].append(process.memory_info().rss / 1e6)
            gates.tally.take(running.take_done())
    gates.tally.take(await running.answers())
    first = int(len(times) * WARM_UP)
    slopes = {name: _per_min(times[first:], size[first:]) for name, size in sizes.items()}
    worst = max(slopes, key=lambda name: slopes[name])
    workers = [slope for name, slope in slopes.items() if name != "router"]
    measured = f"router {slopes['router']:.2f}, workers at most {max(workers):.2f} MB/min"
    name = f"memory over {gates.sizes.soak_s / 60:g} minutes of new prefixes"
    return [row(name, f"< {MB_PER_MIN:g} MB/min", measured, slopes[worst] < MB_PER_MIN)]


def _per_min(times: list[float], sizes: list[float]) -> float:
    return float(60 * np.polyfit(times, sizes, 1)[0]) if len(times) > 1 else 0.0


async def overload(gates: Gates) -> list[dict[str, Any]]:
    """Three times the requests that the pool can answer."""
    capacity = await _capacity(gates)
    async with load(gates.system.port, gates.questions(RUSH), OVERLOAD * capacity) as running:
        await asyncio.sleep(gates.sizes.overload_s)
    answers = await running.answers()
    verdicts = gates.tally.take(answers)
    refused = [answer for answer in answers if verdict(answer) == "refused"]
    hinted = sum("retry-after" in answer.headers for answer in refused)
    waits = sorted(_ttft_s(answer) for answer in answers if verdict(answer) == "ok")
    p95_s = waits[int(0.95 * len(waits))] if waits else float("inf")
    others = len(answers) - verdicts["ok"] - len(refused)
    surplus = (
        f"{len(refused)} of {len(answers)} refused, {hinted} with Retry-After, {others} others"
    )
    if others:
        surplus += f": {why(each for each in answers if verdict(each) != 'refused')}"
    name = f"{OVERLOAD:g} x {capacity:.1f} requests/s for {gates.sizes.overload_s:g} s"
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


async def _capacity(gates: Gates) -> float:
    """Requests a second that the pool answers when some always wait."""
    questions, ends_at = gates.questions(RUSH), time.monotonic() + LEAST_S
    answers: list[Answer] = []

    async def client() -> None:
        while time.monotonic() < ends_at:
            answer = await ask(gates.system.port, questions.next())
            answers.append(answer)
            if answer.error is not None:
                await asyncio.sleep(0.5)

    began_s = time.monotonic()
    await asyncio.gather(*[client() for _ in range(NUM_AT_ONCE)])
    gates.tally.take(answers)
    num_ok = sum(verdict(answer) == "ok" for answer in answers)
    return max(num_ok, 1) / (time.monotonic() - began_s)


def _ttft_s(answer: Answer) -> float:
    return answer.came_at[0] - answer.asked_at
