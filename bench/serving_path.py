"""Measures the CPU time of serving around the engine, in every process on a token's way.

    python -m bench.serving_path [--streams 32 128 256] [--rounds 3] [--window 6] [--tiny]
    python -m bench.serving_path --haproxy-only --streams 64 256 --before COMMIT

The application on Ray Serve is real (ingress, router, links, worker, scheduler). Its fake model
only keeps time: 50 tokens/s for each stream. With `--before`, the application of an older commit
takes turns, in a cluster of its own.

`long` streams last for the whole measurement. `128` and `1` are requests of so many tokens, one
after the other, and include the cost of requests. CPU time is user and system time, in microseconds
for each token that arrived at the clients. The clients' own time is not counted. TARGET_US is the
goal for our application behind HAProxy.

First it measures what the same processes take while nothing is asked: Ray, Serve and health checks
go on, so with few streams a good part of a token's cost has nothing to do with it. `idle us` is
that cost divided by the tokens of so many streams.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.paced_worker import ENGINE_THREAD, STEP_S
from bench.report import finish, print_table
from bench.serving_cluster import MODEL
from bench.trees import ROOT, checked_out, environment_of
from disagg.host import free_port
from disagg.server_address import Address
from disagg.tools.bench.endpoint import Endpoint, RequestTiming
from disagg.tools.bench.generator import Generator
from disagg.tools.bench.prompts import Session, Turn

TARGET_US = 40
LONG = 8000  # tokens: longer than any measurement
PROMPT = "a request that has about as many tokens as words in it and says nothing at all " * 5
SETTLE_S = 1.0


FIELDS = {
    "model": MODEL,
    "prompt": "",
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
# What the titles of a part's processes contain.
PROCESSES = {
    "ingress": "ServeReplica:disagg:Ingress",
    "worker": f"ServeReplica:disagg:{MODEL}-decode",
}
PROXIES = {True: "haproxy", False: "ProxyActor"}


class Clients:
    """Each asks for one stream of `num_tokens` tokens after the other."""

    def __init__(self, port: int, num_tokens: int, fields: dict[str, Any] = FIELDS) -> None:
        address = Address("http", "127.0.0.1", port, "")
        self._endpoint = Endpoint(address, "/v1/completions", now=time.perf_counter)
        self._generator = Generator(self._ask, fields, time.perf_counter)
        self._num_tokens = num_tokens
        self._timings: list[RequestTiming] = []
        self._numbers = itertools.count()
        self._running: list[asyncio.Task[None]] = []

    def start(self, num_streams: int, over_s: float) -> None:
        """Begin all streams, spread over `over_s` seconds."""
        for number in range(num_streams):
            client = self._begin(number * over_s / num_streams)
            self._running.append(asyncio.create_task(client))

    async def wait_first_tokens(self, timeout_s: float) -> None:
        """Until every client has had a token."""
        async with asyncio.timeout(timeout_s):
            while len(self.first_token_s) < len(self._running):
                self.check()
                await asyncio.sleep(0.05)

    @property
    def num_tokens(self) -> int:
        """As the server counts; of streams that go on, their events."""
        return sum(each.num_output_tokens or len(each.event_s) for each in self._timings)

    @property
    def num_ended(self) -> int:
        return len(self._generator.timings)

    @property
    def first_token_s(self) -> list[float]:
        return [each.ttft_s for each in self._timings if each.event_s]

    def check(self) -> None:
        for each in self._generator.timings:
            if each.error:
                raise SystemExit(f"{each.error}: {each.message}")

    async def stop(self) -> None:
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._endpoint.close()

    async def _begin(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._generator.closed_loop(self._sessions())

    def _sessions(self) -> Iterator[Session]:
        for number in self._numbers:
            prompt = {"role": "user", "content": f"{number} {PROMPT}"}
            yield [Turn((prompt,), self._num_tokens)]

    async def _ask(self, body: bytes, timing: RequestTiming) -> str:
        self._timings.append(timing)
        return await self._endpoint.ask(body, timing)


class Cluster:
    """The application, running."""

    def __init__(self, process: subprocess.Popen[str], port: int, haproxy: bool) -> None:
        self.port = port
        self.haproxy = haproxy
        self._root = psutil.Process(process.pid)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Those of each part.

        Raises:
            SystemExit: a part has none; says which there are.
        """
        titles = {each: title(each) for each in self._root.children(recursive=True)}
        found = {}
        for part, mark in {"proxy": PROXIES[self.haproxy], **PROCESSES}.items():
            found[part] = [each for each, text in titles.items() if mark in text]
            if not found[part]:
                listed = "\n".join(text[:100] for text in titles.values())
                raise SystemExit(f"no process is titled {mark!r} among\n{listed}")
        return found


def title(process: psutil.Process) -> str:
    """As Ray gives it; empty for a process that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """User and system time, to the nanosecond: /proc has hundredths of a second."""
    # The clocks that clock_getcpuclockid(3) names.
    return sum(time.clock_gettime((~each.pid << 3) | 2) for each in processes)


@contextmanager
def cluster(haproxy: bool, root: Path = ROOT) -> Iterator[Cluster]:
    """
    Args:
        root: of the files that it runs.
    """
    port = free_port()
    flags = ["--port", str(port), *(["--haproxy"] if haproxy else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.serving_cluster", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=environment_of(root),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for line in process.stdout:
            if line.strip() == "ready":
                break
        else:
            raise SystemExit("the cluster did not start; its words are above")
        yield Cluster(process, port, haproxy)
    finally:
        process.stdin.close()
        process.wait(120)


def engine_thread_s(processes: list[psutil.Process]) -> float:
    """CPU seconds of the engines' threads, which schedule and make deltas."""
    total = 0.0
    for process in processes:
        for thread in process.threads():
            comm = Path(f"/proc/{process.pid}/task/{thread.id}/comm")
            if comm.read_text().strip() == ENGINE_THREAD:
                total += thread.user_time + thread.system_time
    return total


def measure_idle(where: Cluster, window_s: float) -> dict[str, float]:
    """Milliseconds of CPU a second for each part, while nothing is asked."""
    parts = where.processes()
    before = {part: cpu_s(processes) for part, processes in parts.items()}
    time.sleep(window_s)
    spent = {part: cpu_s(processes) - before[part] for part, processes in parts.items()}
    figures = {part: 1e3 * each / window_s for part, each in spent.items()}
    return {**figures, "sum": sum(figures.values())}


async def measure(
    where: Cluster, num_streams: int, num_tokens: int, window_s: float
) -> dict[str, float]:
    """Microseconds of CPU a token for each part, tokens/s and the median wait for a first token."""
    clients = Clients(where.port, num_tokens)
    spread_s = min(num_tokens * STEP_S, 1.0)
    clients.start(num_streams, spread_s)
    await clients.wait_first_tokens(60)
    await asyncio.sleep(SETTLE_S)
    parts = where.processes()
    before = {part: cpu_s(processes) for part, processes in parts.items()}
    engine_s = engine_thread_s(parts["worker"])
    tokens, requests = clients.num_tokens, clients.num_ended
    own_s, began_s = time.process_time(), time.perf_counter()
    await asyncio.sleep(window_s)
    clients.check()
    num, num_ended = clients.num_tokens - tokens, clients.num_ended - requests
    seconds = time.perf_counter() - began_s
    spent = {part: cpu_s(processes) - before[part] for part, processes in parts.items()}
    spent["engine thread"] = engine_thread_s(parts["worker"]) - engine_s
    spent["client"] = time.process_time() - own_s
    await clients.stop()
    await asyncio.sleep(SETTLE_S)
    figures = {part: 1e6 * each / max(num, 1) for part, each in spent.items()}
    figures["sum"] = figures["proxy"] + figures["ingress"] + figures["worker"]
    figures["tokens/s"] = num / seconds
    figures["requests/s"] = num_ended / seconds
    figures["of ideal"] = num / seconds * STEP_S / num_streams
    figures["first token ms"] = 1e3 * statistics.median(clients.first_token_s)
    return figures


def measure_mode(
    haproxy: bool,
    streams: list[int],
    lengths: list[int],
    rounds: int,
    window_s: float,
    older: Path | None = None,
) -> list[dict[str, Any]]:
    """A row for each version, number of streams and length; medians of `rounds`.

    Args:
        older: the files of an older commit, which take turns.
    """
    rows = []
    with ExitStack() as clusters:
        contenders = {"now": clusters.enter_context(cluster(haproxy))}
        if older is not None:
            contenders["before"] = clusters.enter_context(cluster(haproxy, older))
        for name, where in contenders.items():
            idle = measure_idle(where, window_s)
            us = {f"idle us, {num}": 1e3 * idle["sum"] * STEP_S / num for num in streams}
            print_table([{"version": name, "unit": "CPU ms/s", **idle, **us}])
        for num_streams in streams:
            for num_tokens in lengths:
                taken: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
                for _ in range(rounds):
                    for name, where in contenders.items():
                        figures = measure(where, num_streams, num_tokens, window_s)
                        taken[name].append(asyncio.run(figures))
                for name, turns in taken.items():
                    row: dict[str, Any] = {
                        "proxy in front": PROXIES[haproxy],
                        "version": name,
                        "streams": num_streams,
                        "tokens": "long" if num_tokens == LONG else num_tokens,
                    }
                    for key in turns[0]:
                        row[key] = statistics.median(turn[key] for turn in turns)
                    rows.append(row)
                    print_table([row])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=6.0, help="seconds of one measurement")
    parser.add_argument("--haproxy-only", action="store_true")
    parser.add_argument("--before", metavar="COMMIT", help="measured beside, behind HAProxy")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, without HAProxy")
    arguments = parser.parse_args(argv)
    if arguments.tiny and arguments.before:
        parser.error("--tiny measures no older commit; leave out --tiny or --before")
    if arguments.tiny:
        rows = measure_mode(False, [4], [16], 1, 1.0)
    else:
        with ExitStack() as files:
            older = files.enter_context(checked_out(arguments.before)) if arguments.before else None
            lengths, rounds, window_s = [LONG, 128, 1], arguments.rounds, arguments.window
            rows = measure_mode(True, arguments.streams, lengths, rounds, window_s, older)
        if not arguments.haproxy_only:
            rows += measure_mode(False, arguments.streams[:1], [LONG], 1, arguments.window)
    print_table(rows)
    finish("serving_path", rows, unit="CPU us per token", target=TARGET_US)


if __name__ == "__main__":
    main()
