"""Sends the requests of a load test when they are due, and never because others have ended late.

In an open loop the schedule is made before the run. If the generator, or its limit of requests in
flight, sends one later than that, its latencies count from when it was due (no coordinated
omission), and it is counted as late.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from disagg.tools.bench.endpoint import RequestTiming
from disagg.tools.bench.prompts import Session, body_of

Ask: TypeAlias = Callable[[bytes, RequestTiming], Awaitable[str]]


def arrivals(rate: float, burstiness: float, num: int, seed: int) -> list[float]:
    """Seconds at which `num` sessions begin, on average `rate` a second.

    Args:
        burstiness: shape of the gamma distribution of the pauses: 1 is a Poisson process, less is
            burstier, as in `vllm bench serve`. The last pause ends at `num / rate`.
    """
    rng = random.Random(seed)
    pauses = [rng.gammavariate(burstiness, 1.0) for _ in range(num)]
    scale = num / rate / sum(pauses)
    due_s, schedule = 0.0, []
    for pause in pauses:
        schedule.append(due_s)
        due_s += pause * scale
    return schedule


class Generator:
    """Runs sessions; `timings` has a request once it has ended.

    Args:
        fields: of every request's body; with `prompt` for `/v1/completions`.
        max_concurrency: the most requests in flight; None: no limit.
    """

    def __init__(
        self,
        ask: Ask,
        fields: dict[str, Any],
        now: Callable[[], float],
        max_concurrency: int | None = None,
    ) -> None:
        self.timings: list[RequestTiming] = []
        self.num_in_flight = 0
        self._ask = ask
        self._body = functools.partial(body_of, fields=fields)
        self._now = now
        self._num_at_once = max_concurrency
        self._room = (
            asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        )

    async def open_loop(self, schedule: Sequence[float], sessions: Iterable[Session]) -> None:
        """Begin each session at its time."""
        async with asyncio.TaskGroup() as running:
            for due_s, session in zip(schedule, sessions, strict=False):
                body = self._body(session[0].messages, session[0].num_output_tokens)
                await asyncio.sleep(max(0.0, due_s - self._now()))
                running.create_task(self._run(session, due_s, body))

    async def closed_loop(self, sessions: Iterable[Session]) -> None:
        """Begin a session when another one has ended, with `max_concurrency` of them at a time."""
        waiting = iter(sessions)
        await asyncio.gather(*(self._run_all(waiting) for _ in range(self._num_at_once or 1)))

    async def _run_all(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            body = self._body(session[0].messages, session[0].num_output_tokens)
            await self._run(session, self._now(), body)

    async def _run(self, session: Session, due_s: float, body: bytes) -> None:
        messages = [*session[0].messages]
        for number, turn in enumerate(session):
            if number:
                due_s = self._now() + turn.think_s
                messages += turn.messages
                body = self._body(messages, turn.num_output_tokens)
                await asyncio.sleep(max(0.0, due_s - self._now()))
            timing = RequestTiming(due_s=due_s)
            async with self._room:
                self.num_in_flight += 1
                text = await self._ask(body, timing)
                self.num_in_flight -= 1
            self.timings.append(timing)
            if timing.error:
                return
            messages.append({"role": "assistant", "content": text})
