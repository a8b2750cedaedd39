"""How benches report: a table for people, then one line of JSON for programs."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Name = TypeVar("Name")

ENOUGH_S = 30.0  # of turns: whoever took so long in a case has said what there is to say


def take_turns(
    contenders: Mapping[Name, Callable[[], float]], rounds: int, enough: float = math.inf
) -> dict[Name, float]:
    """Median result of each; all run once in every round, after a round that does not count.

    Turns, because a shared machine is slower in one minute than in the next.

    Args:
        enough: a contender whose results add up to this has no more turns.
    """
    results: dict[Name, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            if sum(results[name]) >= enough:
                continue
            result = run()
            if turn:
                results[name].append(result)
    return {name: statistics.median(values) for name, values in results.items()}


def machine() -> str:
    """Processor, cores and memory of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    amx = ", AMX bf16" if "amx_bf16" in text else ""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{os.cpu_count()} x {name}{amx}, {gib:.0f} GiB"


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys as aligned columns."""
    if not rows:
        return
    header = list(rows[0])
    lines = [header, *([_cell(row[key]) for key in header] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = zip(line, widths, strict=True)
        print("  ".join(cell.rjust(width) for cell, width in cells), flush=True)


def finish(bench: str, rows: Sequence[Mapping[str, Any]], **figures: Any) -> None:
    """The last line of a bench."""
    line = {"bench": bench, "machine": machine(), **figures, "rows": rows}
    print(json.dumps(line), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)
