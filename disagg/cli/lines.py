"""Lines that the command prints: sentences on a terminal, one JSON object per line elsewhere.

Of a start they say how far the workers of each pool are.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from disagg.messages import StartPhase, StartsByPool, StartStep

LogFormat = Literal["auto", "text", "json"]
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_LINES_PER_LOAD = 10


class Lines:
    """Writes lines to standard output, and all of them as JSON to a file.

    Args:
        form: "auto" is text on a terminal and JSON elsewhere.
        file: the run's log file; None writes to standard output only.
    """

    def __init__(self, form: LogFormat = "auto", file: Path | None = None) -> None:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
        self._is_json = form == "json" or (form == "auto" and not is_terminal)
        self._file: TextIO | None = None
        if file is not None:
            with contextlib.suppress(OSError):
                self._file = file.open("a", encoding="utf-8")

    def say(self, event: str, message: str, **fields: Any) -> None:
        """Print one event.

        Args:
            event: the event's name, for programs.
            message: a sentence for people.
            fields: further values for programs, in JSON only.
        """
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        # On a terminal, empty lines and indentation set a message apart.
        line = json.dumps({"time": time, "event": event, "message": message.strip(), **fields})
        # Neither a closed output nor a full disk may end the service.
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                print(line, file=self._file, flush=True)
        with contextlib.suppress(OSError, ValueError):
            print(line if self._is_json else message, flush=True)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # flushing the last line fails if the disk is full
                self._file.close()


class StartLog:
    """Makes few log lines: one per phase, and one for every tenth of the weights.

    Args:
        sizes: number of workers that each pool will have.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._printed: set[tuple[str, str, int]] = set()

    def news(self, pools: StartsByPool) -> list[str]:
        """The lines that were not returned before, each on the slowest worker of a pool."""
        lines = []
        for pool, size in self._sizes.items():
            workers = pools.get(pool, {})
            slowest = f"slowest of {size}: " if size > 1 else ""
            for phase in get_args(StartPhase):
                steps = [reached[phase] for reached in workers.values() if phase in reached]
                if len(steps) < max(size, len(workers)):  # not all of them have reached it
                    continue
                step = min(steps, key=_fraction)
                key = (pool, phase, int(_fraction(step) * _LINES_PER_LOAD))
                if key not in self._printed:
                    self._printed.add(key)
                    lines.append(f"{pool}: {slowest}{_words(step)}")
        return lines


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
