"""Lines that the command prints: sentences on a terminal, one JSON object per line elsewhere.

Of a start they say how far the workers of each pool are.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from rich.console import Console
from rich.markup import escape
from rich.status import Status

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

    def __init__(
        self, form: LogFormat = "auto", file: Path | None = None, console: Console | None = None
    ) -> None:
        self._console = console or Console(highlight=False)
        self._is_json = form == "json" or (form == "auto" and not self._console.is_terminal)
        self._file: TextIO | None = None
        if file is not None:
            with contextlib.suppress(OSError):
                self._file = file.open("a", encoding="utf-8")
        self._status: Status | None = None

    @property
    def is_live(self) -> bool:
        """Whether the output can show a status line that changes in place."""
        return self._console.is_terminal and not self._is_json

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
            if self._is_json:
                print(line, flush=True)
            else:
                self._console.print(message, markup=False, soft_wrap=True)
                sys.stdout.flush()

    def show(self, message: str) -> None:
        """Update the status line; an empty message removes it. Does nothing unless `is_live`."""
        if not self.is_live:
            return
        if not message and self._status is not None:
            self._status.stop()
            self._status = None
        elif message and self._status is None:
            self._status = self._console.status(escape(message))
            self._status.start()
        elif self._status is not None:
            self._status.update(escape(message))

    def close(self) -> None:
        self.show("")
        if self._file is not None:
            with contextlib.suppress(OSError):  # flushing the last line fails if the disk is full
                self._file.close()


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
