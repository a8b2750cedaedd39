"""Shows where the time of an engine's step goes, without Nsight or hardware counters.

Host times come from clocks around the engine's own calls, device times from torch's profiler.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from disagg.engine.engine import Engine
from disagg.engine.sched.step import Choose

NUM_SKIPPED = 5  # steps before those that count
NUM_PROFILED = 4
MOST_NAMES = 16
MOST_EVENTS = 800  # of the one step that is listed
MICRO = 1e6
# The profiler of a process with captured graphs must not let go of CUPTI between two uses: the
# second one crashes (torch.profiler says so, and sets these for torch.compile's own graphs). So
# whatever is timed after it is timed with CUPTI attached.
CUPTI_STAYS = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


class _Clocks:
    """Seconds in calls of an engine, by name, until `restore`."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._restored: list[tuple[object, str, object]] = []
        scheduler, launcher = engine.scheduler, engine.launcher
        for owner, name in (
            (scheduler, "plan"),
            (scheduler, "plan_following"),
            (scheduler, "apply"),
            (engine.runner, "run"),
        ):
            self._replace(owner, name, self._timed(name, getattr(owner, name)))
        if launcher is not None:
            launch = self._timed("launch", launcher.launch)

            def launch_and_wait(*arguments: Any) -> Choose:
                choose = self._timed("choose", launch(*arguments))
                return lambda: self._timed("wait", choose())

            self._replace(launcher, "launch", launch_and_wait)

    def _replace(self, owner: object, name: str, timed: object) -> None:
        self._restored.append((owner, name, getattr(owner, name)))
        setattr(owner, name, timed)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds[name].append(time.perf_counter() - begin_s)

        return timed

    def restore(self) -> None:
        for owner, name, _ in self._restored:
            delattr(owner, name)  # of the object: its class has the method


def host_timeline(
    engine: Engine, steps: Iterator[None], is_full: Callable[[], bool]
) -> dict[str, Any]:
    """Median microseconds of a step in each of the engine's calls, and of all of it.

    Args:
        steps: makes one step each time.
        is_full: whether the last step had all sequences.
    """
    clocks = _Clocks(engine)
    rows: list[dict[str, float]] = []
    try:
        while True:
            clocks.seconds.clear()
            begin_s = time.perf_counter()
            if next(steps, False) is False:
                break
            took_s = time.perf_counter() - begin_s
            if is_full():
                each = {name: sum(times) for name, times in clocks.seconds.items()}
                rows.append({**each, "step": took_s, "rest": took_s - sum(each.values())})
    finally:
        clocks.restore()
    rows = rows[NUM_SKIPPED:-1]
    names = sorted({name for row in rows for name in row})
    return {
        f"host {name} us": statistics.median(row.get(name, 0.0) for row in rows) * MICRO
        for name in names
    }


def device_timeline(
    device: torch.device, steps: Iterator[None], is_full: Callable[[], bool]
) -> dict[str, Any]:
    """Microseconds of a step in which the device works, in which it does not, and in what.

    `kernels` has the names that take the most time, with calls and microseconds a step; `events`
    one step's start, length and name, one after the other. A CPU's operators stand for kernels.
    """
    is_cuda = device.type == "cuda"
    os.environ.update(CUPTI_STAYS)
    wanted = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    num_full = 0
    while num_full < NUM_SKIPPED and next(steps, False) is not False:
        num_full += is_full()
    if is_cuda:
        torch.cuda.synchronize()
    with profile(activities=[wanted]) as profiled:
        for _ in range(NUM_PROFILED):
            next(steps)
        if is_cuda:
            torch.cuda.synchronize()
    for _ in steps:  # to the end: the next row finds an empty engine
        pass
    spans = sorted(
        (float(event.time_range.start), float(event.time_range.end), str(event.name))
        for event in profiled.events() or []
        if (event.device_type.name == "CUDA" if is_cuda else event.cpu_parent is None)
    )
    if not spans:
        return {"device": "the profiler saw no events"}
    first, last = spans[0][0], max(end for _, end, _ in spans)
    busy = _covered(spans)
    by_name: dict[str, list[float]] = defaultdict(list)
    for start, end, name in spans:
        by_name[name].append(end - start)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST_NAMES]
    num_events = len(spans) // NUM_PROFILED
    return {
        "device step us": (last - first) / NUM_PROFILED,
        "device busy us": busy / NUM_PROFILED,
        "device idle us": (last - first - busy) / NUM_PROFILED,
        "device events": num_events,
        "kernels": [
            {
                "name": name[:90],
                "calls": len(times) / NUM_PROFILED,
                "us": sum(times) / NUM_PROFILED,
            }
            for name, times in most
        ],
        "events": [
            [round(start - spans[num_events][0], 2), round(end - start, 2), name[:60]]
            for start, end, name in spans[num_events : 2 * num_events][:MOST_EVENTS]
        ],
    }


def _covered(spans: list[tuple[float, float, str]]) -> float:
    """Length of the union."""
    covered, reached = 0.0, float("-inf")
    for start, end, _ in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
