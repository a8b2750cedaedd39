"""Measures the CPU time of an ingress and a worker's links, without a proxy or Ray.

    python -m bench.ingress_alone [--streams 64 256] [--rounds 40] [--before COMMIT] [--tiny]

The ingress and the worker have a process each, and a model that computes nothing. With `--before`,
an older commit is up at the same time and takes short turns with this tree, so other programs on
the machine matter little. A figure is the lower quartile of the turns. `us` is CPU time (user and
system) of the ingress and of the worker, without the client.

Tokens: a step of the worker gives each stream one token. The next step begins when all tokens have
reached the client, so every step is handled at once. Requests: each connection sends requests of
one token, one after the other, with steps of `STEP_S`, which limit `requests/s`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from bench.ingress_processes import FREE, HOLD, STEP
from bench.processes import process_cpu_s
from bench.report import finish, print_table
from bench.serving_path import LONG, WAYS
from bench.sse_clients import Clients
from bench.trees import ROOT, checked_out, environment_of

STEPS_A_TURN = 20
REQUESTS_A_TURN = 4  # by each connection
POLL_S = 0.0005
STILL_S = 0.2
PROCESSES = Path(__file__).with_name("ingress_processes.py")
GOAL_US = 2.0  # of CPU for a token more than the older commit


class Contender:
    """A worker and an ingress of one tree, running."""

    def __init__(self, port: int, gate: int, pids: tuple[int, int]) -> None:
        self.port = port
        self._gate = gate
        self._pids = pids

    def tell(self, word: bytes) -> None:
        os.write(self._gate, word)

    def cpu_s(self) -> list[float]:
        """Of the ingress and the worker."""
        return [process_cpu_s(pid) for pid in self._pids]

    def clients(self, num_tokens: int) -> Clients:
        return WAYS[0].clients(self.port, num_tokens)


@contextmanager
def running(root: Path) -> Iterator[Contender]:
    """
    Args:
        root: of the files that it runs.
    """
    gate, told = os.pipe()
    with ExitStack() as started:
        started.callback(os.close, told)

        def start(role: str, given: str) -> tuple[int, str]:
            process = subprocess.Popen(
                [sys.executable, "-P", str(PROCESSES), role, given],
                stdout=subprocess.PIPE,
                text=True,
                cwd=root,
                env=environment_of(root),
                pass_fds=[gate],
            )
            started.callback(process.wait)
            started.callback(process.kill)
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                raise SystemExit(f"the {role} of {root} did not start; its words are above")
            return process.pid, line

        try:
            worker, record = start("worker", str(gate))
            ingress, port = start("ingress", record)
        finally:
            os.close(gate)
        yield Contender(int(port), told, (ingress, worker))


async def token_turns(
    contenders: Sequence[Contender], num_streams: int, rounds: int
) -> list[list[tuple[float, ...]]]:
    """For each contender and turn: us of ingress and worker for a token, and tokens/s."""
    clients = [each.clients(LONG) for each in contenders]
    for contender, asking in zip(contenders, clients, strict=True):
        await asking.start(num_streams, over_s=0.5)
        await asking.wait_first_tokens(60)
        contender.tell(HOLD)
        before = -1
        while before != asking.num_tokens:
            before = asking.num_tokens
            await asyncio.sleep(STILL_S)

    async def turn(number: int) -> tuple[float, ...]:
        contender, asking = contenders[number], clients[number]
        cpu_s, began_s = contender.cpu_s(), time.perf_counter()
        for _ in range(STEPS_A_TURN):
            wanted = asking.num_tokens + num_streams
            contender.tell(STEP)
            while asking.num_tokens < wanted:
                asking.check()
                await asyncio.sleep(POLL_S)
        return figures(contender, cpu_s, began_s, STEPS_A_TURN * num_streams)

    turns = await taken(len(contenders), rounds, turn)
    for contender, asking in zip(contenders, clients, strict=True):
        asking.stop()
        contender.tell(FREE)
    await asyncio.sleep(STILL_S)
    return turns


async def request_turns(
    contenders: Sequence[Contender], num_streams: int, rounds: int
) -> list[list[tuple[float, ...]]]:
    """As `token_turns`, of requests."""

    async def turn(number: int) -> tuple[float, ...]:
        contender = contenders[number]
        asking = contender.clients(1)
        await asking.start(num_streams, over_s=0.0)
        await asking.wait_first_tokens(60)
        cpu_s, began_s, ended = contender.cpu_s(), time.perf_counter(), asking.num_ended
        while asking.num_ended < ended + REQUESTS_A_TURN * num_streams:
            asking.check()
            await asyncio.sleep(POLL_S)
        found = figures(contender, cpu_s, began_s, asking.num_ended - ended)
        asking.stop()
        await asyncio.sleep(STILL_S)
        return found

    return await taken(len(contenders), rounds, turn)


async def taken(
    num_contenders: int, rounds: int, turn: Callable[[int], Coroutine[Any, Any, tuple[float, ...]]]
) -> list[list[tuple[float, ...]]]:
    """The results of each contender's turns, in an order that changes from round to round."""
    turns: list[list[tuple[float, ...]]] = [[] for _ in range(num_contenders)]
    for number in range(rounds):
        order = range(num_contenders)
        for each in order if number % 2 else reversed(order):
            turns[each].append(await turn(each))
    return turns


def figures(
    contender: Contender, cpu_s: Sequence[float], began_s: float, num: int
) -> tuple[float, ...]:
    seconds = time.perf_counter() - began_s
    spent = [1e6 * (now - then) / num for now, then in zip(contender.cpu_s(), cpu_s, strict=True)]
    return (*spent, num / seconds)


def row_of(turns: Sequence[tuple[float, ...]], what: str) -> dict[str, float]:
    """Lower quartiles of CPU times, and the upper one of the speed."""
    ingress, worker, speed = (sorted(column) for column in zip(*turns, strict=True))
    quarter = len(turns) // 4
    row = {
        f"ingress us/{what}": ingress[quarter],
        f"worker us/{what}": worker[quarter],
        f"us/{what}": ingress[quarter] + worker[quarter],
    }
    return {**row, f"{what}s/s": speed[-1 - quarter]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--before", metavar="COMMIT", help="takes turns with this tree")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    streams, rounds = ([4], 2) if arguments.tiny else (arguments.streams, arguments.rounds)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        roots = {"disagg": ROOT}
        if arguments.before:
            roots["before"] = stack.enter_context(checked_out(arguments.before))
        contenders = [stack.enter_context(running(root)) for root in roots.values()]
        # Before any step was held up: the router would take the worker for a slow one.
        few = max(2, rounds // 4)
        of_requests = [uvloop.run(request_turns(contenders, each, few)) for each in streams]
        for num_streams, requests in zip(streams, of_requests, strict=True):
            of_tokens = uvloop.run(token_turns(contenders, num_streams, rounds))
            for name, tokens, ended in zip(roots, of_tokens, requests, strict=True):
                figures_of = row_of(tokens, "token") | row_of(ended, "request")
                rows.append({"files": name, "streams": num_streams, **figures_of})
    print_table(rows)
    finish("ingress_alone", rows, unit="CPU us", goal_us_more=GOAL_US)


if __name__ == "__main__":
    main()
