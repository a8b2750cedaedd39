"""The soak of `bench.faults`: how the memory of each process grows when all prompts are new.

Every process of the system counts: the command, ingresses, workers, Serve's controller and proxies,
and Ray's own. The store is measured as well; it fills up to `maxmemory`, as intended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import numpy as np
import psutil

from bench.faults_gates import Gates, row
from tests.faults.clients import load

SAMPLE_S = 5.0
RATE = 10.0  # requests a second
WARM_UP_S = 300.0  # caches, arenas and pools of threads find their size
WARM_UP_SHARE = 1 / 3  # of a soak that is shorter than that
MB_PER_MIN = 1.0
STORE = "store"

# A word of a process's command line, and what the process is called here; the first that is found.
KINDS = (
    ("disagg:Ingress", "ingress"),
    ("ServeReplica:disagg", "worker"),
    ("ServeController", "controller"),
    ("ProxyActor", "Serve's proxy"),
    ("HAProxyManager", "HAProxy's manager"),
    ("haproxy", "HAProxy"),
    ("raylet/raylet", "raylet"),  # whose command line has those of its agents
    ("raylet_agent.py", "an agent's stand-in"),
    ("gcs_server", "Ray's GCS"),
    ("cluster_process", "command"),
    ("valkey-server", STORE),
    ("redis-server", STORE),
)


def kind_of(command_line: str) -> str:
    """What a process is, in a word or two."""
    found = next((kind for word, kind in KINDS if word in command_line), None)
    return found or command_line.split(" ")[0].rpartition("/")[2][:24] or "?"


def slope(times_s: list[float], sizes_mb: list[float], warm_up_s: float) -> float:
    """MB a minute, by a straight line through what was measured after the first `warm_up_s`."""
    first = next((i for i, at in enumerate(times_s) if at - times_s[0] >= warm_up_s), 0)
    times, sizes = times_s[first:], sizes_mb[first:]
    return float(60 * np.polyfit(times, sizes, 1)[0]) if len(times) > 1 else 0.0


def judge(
    times_s: list[float], sizes_mb: dict[str, list[float]], warm_up_s: float
) -> list[dict[str, Any]]:
    """A row of the table for each process that was there all the time, and one for all."""
    slopes = {name: slope(times_s, sizes, warm_up_s) for name, sizes in sizes_mb.items()}
    rows = []
    for name, sizes in sizes_mb.items():
        figure = f"{slopes[name]:+.2f} MB/min, {sizes[0]:.0f} to {sizes[-1]:.0f} MB"
        is_store = name.startswith(STORE)
        goal = "fills up to maxmemory" if is_store else f"< {MB_PER_MIN:g} MB/min"
        rows.append(row(f"  {name}", goal, figure, is_store or slopes[name] < MB_PER_MIN))
    judged = [name for name in slopes if not name.startswith(STORE)]
    worst = max(judged, key=lambda name: slopes[name])
    minutes = (times_s[-1] - times_s[0]) / 60
    name = f"memory over {minutes:.0f} minutes of new prompts, after {warm_up_s / 60:.1f}"
    measured = f"at most {slopes[worst]:+.2f} MB/min ({worst})"
    goal = f"each of {len(judged)} processes < {MB_PER_MIN:g} MB/min"
    return [row(name, goal, measured, slopes[worst] < MB_PER_MIN), *rows]


async def soak(gates: Gates) -> list[dict[str, Any]]:
    """Load with prompts that nobody sent before, while the size of every process is noted."""
    processes = _processes(gates)
    times_s: list[float] = []
    sizes_mb: dict[str, list[float]] = {name: [] for name in processes}
    async with load(gates.system.port, gates.questions(num_prefixes=0), RATE) as running:
        ends_at = time.monotonic() + gates.sizes.soak_s
        while time.monotonic() < ends_at:
            await asyncio.sleep(SAMPLE_S)
            times_s.append(time.monotonic())
            gone = []
            for name, process in processes.items():
                try:
                    sizes_mb[name].append(process.memory_info().rss / 1e6)
                except psutil.Error:
                    gone.append(name)
            if gone:
                return [row("memory of the same processes", "all live", f"{gone} ended", False)]
            gates.tally.take(running.take_done())
    gates.tally.take(await running.answers())
    return judge(times_s, sizes_mb, min(WARM_UP_S, WARM_UP_SHARE * gates.sizes.soak_s))


def _processes(gates: Gates) -> dict[str, psutil.Process]:
    """Those that stay. What Ray keeps idle for later, and what lives for a moment, is left out."""
    system = gates.system
    found = [system.root, *system.root.children(recursive=True), psutil.Process(system.redis.pid)]
    numbers: Counter[str] = Counter()
    named: dict[str, psutil.Process] = {}
    for process in dict.fromkeys(found):
        try:
            command_line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if not command_line or "ray::IDLE" in command_line:
            continue
        kind = kind_of(command_line)
        numbers[kind] += 1
        named[f"{kind} {numbers[kind]}"] = process
    return named
