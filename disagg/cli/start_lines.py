"""The words of a start: how far each pool's workers are, for a terminal and for a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from disagg.messages import StartPhase, StartsByPool, StartStep

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_LINES_PER_LOAD = 10


def one_line(pools: StartsByPool) -> str:
    """Where each pool is now."""
    return "; ".join(
        f"{title}: {_words(steps[-1])}" for _, title, steps in _reached(pools) if steps
    )


class StartLog:
    """Makes lines of a log, few of them: one a phase, and one for every tenth of the weights."""

    def __init__(self) -> None:
        self._told: set[tuple[str, StartPhase, int]] = set()

    def news(self, pools: StartsByPool) -> list[str]:
        """What to print that was not printed before."""
        lines = []
        for pool, title, steps in _reached(pools):
            for step in steps:
                tenth = int(_fraction(step) * _LINES_PER_LOAD) if step.phase == "weights" else 0
                key = (pool, step.phase, tenth)
                if key not in self._told:
                    self._told.add(key)
                    lines.append(f"{title}: {_words(step)}")
        return lines


def _reached(pools: StartsByPool) -> Iterator[tuple[str, str, list[StartStep]]]:
    """Each pool, its title, and the phases that all of its workers are in: the slowest's word."""
    for pool, workers in sorted(pools.items()):
        title = pool if len(workers) == 1 else f"{pool} (slowest of {len(workers)})"
        slowest = []
        for phase in get_args(StartPhase):
            found = [steps[phase] for steps in workers.values() if phase in steps]
            if len(found) == len(workers):
                slowest.append(min(found, key=_fraction))
        yield pool, title, slowest


def _fraction(step: StartStep) -> float:
    return step.num_done / step.num_total if step.num_total else 0.0


def _words(step: StartStep) -> str:
    match step.phase:
        case "weights":
            unit, nbytes = next((u for u in _UNITS if step.num_total >= u[1]), _UNITS[-1])
            done, total = step.num_done / nbytes, step.num_total / nbytes
            return f"weights {done:.1f} of {total:.1f} {unit} ({int(100 * _fraction(step))} %)"
        case "kv_blocks":
            return f"allocating {step.num_total:,} KV blocks"
        case "warm_up":
            return "warming up"
        case "ready":
            return "ready"
