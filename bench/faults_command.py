"""The gates of `bench.faults` that kill what carries the workers: HAProxy, Serve's controller, the
raylet's agent, and the command itself.

They run on a whole `disagg serve` with a bundled model, because the command repairs these faults.
The right greedy answers are asked for before anything is broken.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.faults_gates import row
from disagg.app import raylet_agent
from tests.e2e.command import Command
from tests.faults.faults import Killed, suffered

FLAGS = "demo-small --decode 2 --dtype float32 --num-threads 1 --no-restart"
RATE = 10.0  # requests a second
SETTLE_S = 3.0
HEAL_S = 12.0  # of load after a fault that heals: five periods of Serve's health checks and more
PATIENCE_S = 60.0  # after which a stream counts as hung
NOTICED_S = 2.0  # in which somebody listens again
NUM_PROMPTS = 12
NUM_TOKENS = 48
NAMES = ("haproxy_killed", "controller_killed", "agent_killed", "command_killed")


@dataclass
class Asked:
    """One stream: when it began and ended (`time.monotonic()`), and what became of it.

    end: ok, wrong, cut, refused (503 with Retry-After), no connection, hung, or other words.
    """

    began_s: float
    ended_s: float = 0.0
    end: str = ""


async def stream(client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
    """Text and end of a greedy answer."""
    body = {"model": "demo-small", "prompt": prompt, "max_tokens": NUM_TOKENS}
    body |= {"stream": True, "temperature": 0, "ignore_eos": True}
    text, is_done = "", False
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                is_hinted = reply.status_code == 503 and "retry-after" in reply.headers
                return text, "refused" if is_hinted else f"status {reply.status_code}"
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    said = json.loads(line.removeprefix("data: "))
                    if "error" in said:
                        return text, "error"
                    text += said["choices"][0]["text"]
    except TimeoutError:
        return text, "hung"
    except httpx.ConnectError:
        return text, "no connection"
    except httpx.TransportError:
        return text, "cut"
    return text, "ok" if is_done else "cut"


class CommandGates:
    """Each gate has a command of its own, and leaves nothing of it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def run(self, name: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as home:
            command = await asyncio.to_thread(Command, FLAGS, Path(home))
            try:
                await asyncio.to_thread(command.wait_ready)
                gate = getattr(self, f"_{name}")
                rows: list[dict[str, Any]] = await gate(command)
            finally:
                if command.process.poll() is None:
                    command.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(command.ended)
            await asyncio.to_thread(command.assert_nothing_left)
            return rows

    @asynccontextmanager
    async def _load(self, command: Command) -> AsyncIterator[list[Asked]]:
        """Streams at a constant rate while the block runs; all have ended after it."""
        rng = random.Random(0)
        prompts = [f"a story about number {rng.randrange(10**6)}" for _ in range(NUM_PROMPTS)]
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=command.url, timeout=None, limits=limits) as client:  # noqa: S113
            expected = {prompt: await stream(client, prompt) for prompt in prompts}
            assert all(end == "ok" for _, end in expected.values()), expected
            asked: list[Asked] = []

            async def one(prompt: str) -> None:
                this = Asked(time.monotonic())
                asked.append(this)
                text, this.end = await stream(client, prompt)
                this.ended_s = time.monotonic()
                right, _ = expected[prompt]
                if not right.startswith(text) or (this.end == "ok" and text != right):
                    this.end = "wrong"

            async def keep_asking() -> None:
                for prompt in itertools.cycle(prompts):
                    tasks.append(asyncio.create_task(one(prompt)))
                    await asyncio.sleep(1 / RATE)

            tasks: list[asyncio.Task[None]] = []
            asking = asyncio.create_task(keep_asking())
            try:
                await asyncio.sleep(SETTLE_S)
                yield asked
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await asyncio.gather(*tasks)
                self.counts += Counter(each.end for each in asked)

    async def _haproxy_killed(self, command: Command) -> list[dict[str, Any]]:
        # Serve replaces its first HAProxy when it knows all routes.
        async with self._load(command) as asked, suffered(Killed(command.one("haproxy"))):
            died_s = time.monotonic()
            await asyncio.sleep(SETTLE_S + HEAL_S)
        assert command.events("haproxy_replaced"), command.output()
        ends = Counter(each.end for each in asked)
        # Streams that the dead one carried, and who came before another one listened.
        carried = sum(each.began_s <= died_s <= each.ended_s for each in asked)
        outside_s = [
            each.ended_s - died_s
            for each in asked
            if each.end in ("no connection", "cut") and each.began_s > died_s
        ]
        last_s = max(outside_s, default=0.0)
        others = len(asked) - sum(ends[end] for end in ("ok", "refused", "no connection", "cut"))
        lost = f"{ends['cut']} of {len(asked)} cut, {carried} were carried; {others} others: {ends}"
        return [
            row(
                "HAProxy killed",
                "lost: what it carried",
                lost,
                ends["cut"] <= carried + 1 and not others,
            ),
            row(
                "  somebody listens again",
                f"<= {NOTICED_S:g} s",
                f"{last_s:.2f} s, {ends['no connection']} without a connection",
                last_s <= NOTICED_S,
            ),
        ]

    async def _controller_killed(self, command: Command) -> list[dict[str, Any]]:
        def replicas() -> set[psutil.Process]:
            return set(command.named("ServeReplica"))

        before = replicas()
        controller = Killed(command.one("ray::ServeController"))
        async with self._load(command) as asked, suffered(controller):
            await asyncio.sleep(SETTLE_S + HEAL_S)
        failed = len(asked) - sum(each.end == "ok" for each in asked)
        is_held = not failed and before == replicas()
        measured = f"{failed} of {len(asked)} failed; {len(before - replicas())} replicas replaced"
        return [row("Serve's controller killed", "0 failed, the same replicas", measured, is_held)]

    async def _agent_killed(self, command: Command) -> list[dict[str, Any]]:
        async with (
            self._load(command) as asked,
            suffered(Killed(command.running(raylet_agent.__file__))),
        ):
            died_s = time.monotonic()
            status = await asyncio.to_thread(command.ended)
            ended_s = time.monotonic() - died_s
        return [self._all_ended("the raylet's agent killed", asked, status == 1, status, ended_s)]

    async def _command_killed(self, command: Command) -> list[dict[str, Any]]:
        async with (
            self._load(command) as asked,
            suffered(Killed(psutil.Process(command.process.pid))),
        ):
            died_s = time.monotonic()
            status = await asyncio.to_thread(command.ended)
            await asyncio.to_thread(command.assert_nothing_left)
            ended_s = time.monotonic() - died_s
        return [self._all_ended("the command killed", asked, True, status, ended_s)]

    def _all_ended(
        self, name: str, asked: list[Asked], is_right: bool, status: int, ended_s: float
    ) -> dict[str, Any]:
        """Nothing serves any more: every stream must know, and none may hang."""
        ends = Counter(each.end for each in asked)
        is_held = is_right and not ends["hung"] and not ends["wrong"]
        measured = (
            f"{ends['hung']} of {len(asked)} hung, {ends['cut'] + ends['error']} cut, status"
            f" {status}; all gone after {ended_s:.1f} s"
        )
        return row(name, "0 hung, nothing left", measured, is_held)
