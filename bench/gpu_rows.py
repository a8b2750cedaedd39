"""One part of the GPU suite: its rows are measured and written one by one.

A part is a module with a `main` that gives its rows to `run_part`. Each row's record is one line of
JSON, on disk before the next row begins. So a reader of the file knows what was measured until now
and which row is running. `gpu_suite` reads it, and ends a part whose row takes too long.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 30.0  # of a row that says nothing else
BROKEN_DEVICE = 3  # exit status: every later call would fail as well


class Row(NamedTuple):
    """`limit_s` is of the first row that needs what several share, its making included."""

    name: str
    measure: Callable[[], Mapping[str, Any]]
    limit_s: float = LIMIT_S


class Absent(Exception):
    """What the row would measure is not installed, or cannot run on this device."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With what every part is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the rows")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="not this row")
    parser.add_argument(
        "--ceilings",
        type=json.loads,
        default={},
        metavar="JSON",
        help="the row of bench.gpu_device: what this device's memory and matrix units were seen"
        " to give",
    )
    return parser


def run_part(name: str, rows: Iterable[Row], arguments: argparse.Namespace) -> None:
    """Measure the rows that were asked for, in order; those that fail say why.

    Records are lines of `<out>/<name>.jsonl`: the names of all rows, then for each one that it
    begins, and how it ended: `measured`, or `failed` with the reason, or `absent`. The last line of
    output has all rows in JSON.
    """
    asked = [
        row
        for row in rows
        if row.name.startswith(arguments.only) and row.name not in arguments.skip
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:

        def write(**record: Any) -> None:
            file.write(json.dumps(finite(record)) + "\n")
            file.flush()

        results: dict[str, Any] = {}
        write(rows=[row.name for row in asked])
        for row in asked:
            write(begin=row.name, limit_s=row.limit_s)
            began_s = time.perf_counter()
            ended = _measure(row)
            write(row=row.name, seconds=time.perf_counter() - began_s, **ended)
            results[row.name] = ended
            print(f"{row.name}: {one_line(ended)}", flush=True)
            if "failed" in ended and not _device_answers(arguments.device):
                print("the device answers no more", flush=True)
                os._exit(BROKEN_DEVICE)
    print(json.dumps(finite({"bench": name, "device": arguments.device, "rows": results})))


def _measure(row: Row) -> dict[str, Any]:
    try:
        return {"measured": dict(row.measure())}
    except Absent as absent:
        return {"absent": str(absent)}
    except ModuleNotFoundError as error:
        return {"absent": str(error)}
    except Exception as error:  # whatever it is, the next row is to run
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}


def _device_answers(device: str) -> bool:
    """An illegal access, for one, is final for the process."""
    if device != "cuda":
        return True
    import torch  # here, since the suite reads this file where torch may be broken

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:  # of whatever kind the driver's error is
        return False
    return True


def finite(value: Any) -> Any:
    """The same without NaN and infinities, which are no JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def one_line(measured: Mapping[str, Any]) -> str:
    """Figures for people: what is long, or a row of its own, stays in the file."""
    (how, found), *_ = measured.items()
    if not isinstance(found, Mapping):
        return f"{how}: {found}"
    shown = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
        if value is not None and not isinstance(value, list | dict)
    )
    return ", ".join(shown)
