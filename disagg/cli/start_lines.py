"""The progress lines of a start: how far each pool's workers are, for a terminal and for a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from disagg.messages import StartPhase, StartsByPool, StartStep

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_LINES_PER_LOAD = 10


def one_line(pools: StartsByPool, sizes: Mapping[str, int]) -> str:
    """Where each pool is now.

    Args:
        sizes: how many workers each pool is to have.
    """
    now = []
    for pool, size in sizes.items():
        workers = pools.get(pool, {})
        said = [words for _, words in _said(workers, size)]
        now.append(f"{pool}: {said[-1] if said else f'{len(workers)} of {size} workers began'}")
    return "; ".join(now)


class StartLog:
    """Makes lines of a log, few of them: one a phase, and one for every tenth of the weights.

    Args:
        sizes: how many workers each pool is to have.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._told: set[tuple[str, str, int]] = set()

    def news(self, pools: StartsByPool) -> list[str]:
        """What to print that was not printed before."""
        lines = []
        for pool, size in self._sizes.items():
            for step, words in _said(pools.get(pool, {}), size):
                key = (pool, step.phase, int(_fraction(step) * _LINES_PER_LOAD))
                if key not in self._told:
                    self._told.add(key)
                    lines.append(f"{pool}: {words}")
        return lines


def _said(
    workers: Mapping[str, Mapping[StartPhase, StartStep]], size: int
) -> Iterator[tuple[StartStep, str]]:
    """The phases that a whole pool has reached, in the words of the slowest worker in each."""
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
            steps = f"; a step has up to {sizes}" if step.max_num_seqs else ""
            return f"allocating {step.num_total:,} KV blocks{steps}"
        case "warm_up":
            return "warming up"
        case "ready":
            return "ready"
