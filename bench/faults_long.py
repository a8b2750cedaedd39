"""The gate of `bench.faults` that overloads a pool."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.faults_gates import Gates, row, verdict, why
from tests.faults.clients import Answer, ask, load

RUSH = "rush"  # the pool that is overloaded: 1 + 1 slow workers
RUSH_SLO_S = 3.0
OVERLOAD = 3.0
NUM_AT_ONCE = 32  # more than the overloaded pool runs at once: to find out what it can do
LEAST_S = 15.0  # of that


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
