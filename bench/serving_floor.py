"""Measures the least that a token costs around the model: only the system calls that it needs.

    python -m bench.serving_floor [--streams 32 64 256] [--rounds 3] [--window 6] [--tiny]

A worker in C writes one frame a step, an ingress in C writes one chunk to each stream for it, and
HAProxy forwards it as under `disagg serve`: one thread, and a Unix socket between the two. There is
no text, no scheduler, no router and no Ray. So `bench.serving_path` cannot get below these figures
on the same machine. They are CPU time as there.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.paced_worker import MARKER, STEP_S
from bench.processes import process_cpu_s
from bench.report import finish, print_table
from bench.sse_clients import Clients
from disagg.app.haproxy import find_haproxy
from disagg.cli.ports import free_port
from disagg.errors import StartupError

SOURCE = Path(__file__).with_suffix(".c")
FRAME_NBYTES = 400  # a step frame of 32 streams with the worker's load
SETTLE_S = 0.5
HAPROXY = """
global
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 600s
    option http-no-delay
frontend clients
    bind 127.0.0.1:{port}
    default_backend ingress
backend ingress
    server ingress unix@{socket}
"""


@contextmanager
def running(port: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The processes by part; clients connect to `port`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("There is no C compiler (cc, gcc).")
    try:
        haproxy = find_haproxy()
    except StartupError as error:
        raise SystemExit(str(error)) from None
    with ExitStack() as ends:
        scratch = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="floor-", dir="/tmp")))
        program, socket, config = (scratch / each for each in ("floor", "ingress.sock", "cfg"))
        subprocess.run([compiler, "-O2", "-o", str(program), str(SOURCE)], check=True)
        config.write_text(HAPROXY.format(port=port, socket=socket))
        link = str(free_port())
        step_us = str(round(1e6 * STEP_S))
        parts = {}
        for part, command in (
            ("ingress", [str(program), "ingress", str(socket), link]),
            ("worker", [str(program), "worker", link, step_us, str(FRAME_NBYTES)]),
            ("proxy", [haproxy, "-db", "-f", str(config)]),
        ):
            parts[part] = ends.enter_context(subprocess.Popen(command))
            ends.callback(parts[part].kill)
        yield parts


async def connected(port: int) -> None:
    """Return when HAProxy listens."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def measure(
    parts: dict[str, subprocess.Popen[bytes]], port: int, num_streams: int, window_s: float
) -> dict[str, float]:
    """Microseconds of CPU a token for each part."""
    await connected(port)
    clients = Clients(port, "/", {"prompt": ""}, MARKER)
    await clients.start(num_streams, min(1.0, window_s))
    await clients.wait_first_tokens(60)
    await asyncio.sleep(SETTLE_S)
    before = {part: process_cpu_s(each.pid) for part, each in parts.items()}
    num_before = clients.num_tokens
    await asyncio.sleep(window_s)
    clients.check()
    num = max(clients.num_tokens - num_before, 1)
    spent = {part: process_cpu_s(each.pid) - before[part] for part, each in parts.items()}
    clients.stop()
    await asyncio.sleep(SETTLE_S)
    figures = {part: 1e6 * spent[part] / num for part in ("proxy", "ingress", "worker")}
    return {**figures, "sum": sum(figures.values()), "tokens/s": num / window_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=6.0, help="seconds of one measurement")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    streams, rounds, window_s = arguments.streams, arguments.rounds, arguments.window
    if arguments.tiny:
        streams, rounds, window_s = [4], 1, 0.5
    rows: list[dict[str, Any]] = []
    port = free_port()
    with running(port) as parts:
        for num_streams in streams:
            turns = [
                asyncio.run(measure(parts, port, num_streams, window_s)) for _ in range(rounds)
            ]
            medians = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
            rows.append({"streams": num_streams, **medians})
    print_table(rows)
    finish("serving_floor", rows, unit="CPU us per token")


if __name__ == "__main__":
    main()
