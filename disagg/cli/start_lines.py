"""Progress lines of a start: how far the workers of each pool are, for a terminal and a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from disagg.messages import StartPhase, StartsByPool, StartStep

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_LINES_PER_LOAD = 10


def one_line(pools: StartsByPool, sizes: Mapping[str, int]) -> str:
    """The latest phase of each pool.

    Args:
        sizes: number of workers that each pool will have.
    """
    states = []
    for pool, size in sizes.items():
        workers = pools.get(pool, {})
        lines = [line for _, line in _reached_phases(workers, size)]
        state = lines[-1] if lines else f"{len(workers)} of {size} workers started"
        states.append(f"{pool}: {state}")
    return "; ".join(states)


class StartLog:
    """Makes few log lines: one per phase, and one for every tenth of the weights.

    Args:
        sizes: number of workers that each pool will have.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._printed: set[tuple[str, str, int]] = set()

    def news(self, pools: StartsByPool) -> list[str]:
        """The lines that were not returned before."""
        lines = []
        for pool, size in self._sizes.items():
            for step, line in _reached_phases(pools.get(pool, {}), size):
                key = (pool, step.phase, int(_fraction(step) * _LINES_PER_LOAD))
                if key not in self._printed:
                    self._printed.add(key)
                    lines.append(f"{pool}: {line}")
        return lines


def _reached_phases(
    workers: Mapping[str, Mapping[StartPhase, StartStep]], size: int
) -> Iterator[tuple[StartStep, str]]:
    """The phases that all workers of a pool have reached, with a line on the slowest worker."""
    slowest = f"slowest of {size}: " if size > 1 else ""
    for phase in get_args(StartPhase):
        found = [steps[phase] for steps in workers.values() if phase in steps]
        if len(found) >= max(size, len(workers)):
            step = min(found, key=_fraction)
            yield step, slowest + _words(step)


def _fraction(step: StartStep) -> float:
    return step.num_done / step.num_total if step.num_total else 0.0


def _words(step: StartStep) -> str:
    match step.phase:
        case "weights":
            unit, nbytes = next((u for u in _UNITS if step.num_total >= u[1]), _UNITS[-1])
            done, total = step.num_done / nbytes, step.num_total / nbytes
            return f"weights {done:.1f} of {total:.1f} {unit} ({int(100 * _fraction(step))} %)"
        case "kv_blocks":
            sizes = f"{step.max_num_seqs} sequences and {step.max_num_batched_tokens:,} tokens"
            steps = f"; steps of up to {sizes}" if step.max_num_seqs else ""
            return f"allocating {step.num_total:,} KV blocks{steps}"
        case "warm_up":
            return "warming up"
        case "ready":
            return "ready"
