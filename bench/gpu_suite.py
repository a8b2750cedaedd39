"""Runs the parts of the GPU suite within a time limit; `bench/gpu_suite.sh` starts it.

Each part is a process with a share of the time, and each row of it has a limit. A row that hangs is
killed with its process, and the process starts again with the next row. Results are on disk after
every row, as `gpu_suite.json`. The most valuable rows come first. Rows that found no time are
named, and run at the end if time is left. This module imports neither torch nor disagg.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_rows import one_line

BUDGET_S = 500.0  # of nine minutes, some are for the start of the machine's Python and for wheels
LEAST_S = 10.0  # with less left, no part is begun
MAX_STARTS = 4  # of one part: each loses a model and its graphs
BETWEEN_S = 30.0  # from one row to the next
TRACEBACK = "Traceback (most recent call last):"
LOOK_S = 0.05
MSGSPEC = (
    "msgspec is missing, which the engine's messages are made of: fetch its wheel into wheels/ with"
    " `python -m bench.gpu_wheels` where there is a network. Only kernels are measured without it."
)


class Part(NamedTuple):
    """Rows of one process: those of `bench.<module>` whose names begin with `only`."""

    module: str
    only: str = ""
    share_s: float = 60.0  # until the others have had their turn
    start_s: float = 90.0  # until it names its rows
    needs: str = ""  # a package

    @property
    def name(self) -> str:
        return f"{self.module}: {self.only}" if self.only else self.module


FORMATS = ("bfloat16", "fp8", "int8", "int4")
# One stage after the other; the parts of a stage run side by side, so that kernels are compiled at
# once. The first ones compile what the timed rows use.
STAGES: tuple[tuple[Part, ...], ...] = (
    (Part("gpu_device", share_s=90),),  # a fresh machine reads torch from its disk first
    (
        *(Part("gpu_parity", f"llama KV {each}", share_s=75) for each in FORMATS),
        Part("gpu_parity", "rows", share_s=75),
        Part("gpu_sampling", "tokens", share_s=75, needs="msgspec"),
        Part("gpu_answers", share_s=75, needs="msgspec"),
    ),
    (Part("gpu_engine", share_s=150, start_s=60, needs="msgspec"),),
    (Part("gpu_kernels", share_s=100),),
    (Part("experts", share_s=55),),
    (Part("gpu_packed", share_s=45),),
    (Part("gpu_transfer", share_s=90, needs="msgspec"),),
    (Part("gpu_sampling", "step", share_s=30, needs="msgspec"),),
    (Part("gpu_peers", share_s=80),),
    tuple(Part("gpu_parity", f"odd KV {each}", share_s=60) for each in FORMATS),
)


@dataclass
class Progress:
    """Of one part."""

    names: list[str] | None = None  # of its rows, once it has named them
    ended: list[str] = field(default_factory=list)
    is_over: bool = False  # nothing of it will run any more

    @property
    def left(self) -> list[str]:
        return [name for name in self.names or [] if name not in self.ended]


class Suite:
    """What was measured so far, and what is still to be."""

    def __init__(self, out: Path, flags: list[str], budget_s: float) -> None:
        self.began_s = time.monotonic()
        self.until_s = self.began_s + budget_s
        self.failed = False
        self._is_stopped = False  # from outside, or at the end
        self._out, self._flags = out, flags
        self._progress: dict[Part, Progress] = {}
        self._found: dict[str, Any] = {
            "bench": "gpu_suite",
            "command": flags,
            "budget_s": budget_s,
            "rows": [],
            "failed": [],
            "absent": [],
            "cut": [],
            "seconds": 0.0,
            "is_over": False,
        }
        self._ceilings: dict[str, Any] = {}
        self._lock = threading.Lock()  # parts of a stage end rows at the same time
        self._processes: list[subprocess.Popen[bytes]] = []
        out.mkdir(parents=True, exist_ok=True)
        self._log = (out / "gpu_suite.log").open("wb")

    def run(self, stages: tuple[tuple[Part, ...], ...]) -> None:
        """All stages within their shares, then what is left of them in the time that is left."""
        try:
            for is_second in (False, True):
                for stage in stages:
                    self._run_stage(stage, is_second)
        finally:
            self._is_stopped = True
            for process in self._processes:
                _kill(process)
            self._name_what_was_cut(stages)
            self._write(is_over=True)
            self._log.close()

    def _run_stage(self, stage: tuple[Part, ...], is_second: bool) -> None:
        now_s = time.monotonic()
        parts = [part for part in stage if not self._of(part).is_over]
        if not parts or now_s > self.until_s - LEAST_S:
            return
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(parts)) as pool:
            for number, part in enumerate(parts):
                until_s = self.until_s if is_second else min(now_s + part.share_s, self.until_s)
                pool.submit(self._run_part, part, Path(folder) / str(number), until_s)

    def _of(self, part: Part) -> Progress:
        return self._progress.setdefault(part, Progress())

    def _run_part(self, part: Part, folder: Path, until_s: float) -> None:
        progress = self._of(part)
        try:
            if part.needs and importlib.util.find_spec(part.needs) is None:
                progress.is_over = True
                self._end_row(part, "start", {"failed": MSGSPEC})
                return
            for _ in range(MAX_STARTS):
                if not self._run_process(part, progress, folder, until_s):
                    return
            progress.is_over = True
        except Exception as error:  # of this program: the other parts go on
            progress.is_over = True
            self._end_row(part, "start", {"failed": f"{type(error).__name__}: {error}"})

    def _run_process(self, part: Part, progress: Progress, folder: Path, until_s: float) -> bool:
        """Measure the rows that have not ended. True: the part should be started once more."""
        skips = [flag for name in progress.ended for flag in ("--skip", name)]
        arguments = ["--out", str(folder), "--only", part.only, *skips]
        arguments += ["--ceilings", json.dumps(self._ceilings)]
        folder.mkdir(exist_ok=True)
        records, output = folder / f"{part.module}.jsonl", folder / "output"
        records.unlink(missing_ok=True)
        with output.open("wb") as opened:
            process = subprocess.Popen(
                [sys.executable, "-m", f"bench.{part.module}", *self._flags, *arguments],
                stdout=opened,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes.append(process)
        try:
            lost = self._follow(process, _new_lines(records), part, progress, until_s)
        finally:
            _kill(process)
            said = output.read_bytes()
            with self._lock:
                self._log.write(f"== {part.name}\n".encode() + said)
        if lost is None:
            return False
        row, why = lost
        if row == "start" and progress.ended and progress.left:
            return True  # after a row that failed and left the device broken
        if why.startswith("its process ended"):
            why += _cause(said.decode(errors="replace"), progress.ended)
        return self._lose(part, progress, row, why)

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        reading: Iterator[list[dict[str, Any]]],
        part: Part,
        progress: Progress,
        until_s: float,
    ) -> tuple[str, str] | None:
        """Keep what it measures. Returns the row that was lost, and why; None if none was."""
        row, limit_s = "start", part.start_s
        limit_at_s = time.monotonic() + limit_s
        while True:
            status = process.poll()  # before reading: whatever it wrote is then there
            for record in next(reading):
                if "rows" in record:
                    progress.names = [*progress.ended, *record["rows"]]
                    limit_s = BETWEEN_S
                elif "begin" in record:
                    row, limit_s = record["begin"], record["limit_s"]
                else:
                    progress.ended.append(record.pop("row"))
                    self._end_row(part, progress.ended[-1], record)
                    row, limit_s = "start", BETWEEN_S
                limit_at_s = time.monotonic() + limit_s
            now_s = time.monotonic()
            if self._is_stopped:
                return None
            if status is not None:
                progress.is_over = status == 0
                return None if status == 0 else (row, f"its process ended with status {status}")
            if now_s > until_s:
                return None
            if now_s > limit_at_s:
                return row, f"killed: it took more than {limit_s:.0f} s"
            time.sleep(LOOK_S)

    def _lose(self, part: Part, progress: Progress, row: str, why: str) -> bool:
        """A row is lost with its process; a part that fails at its start has no more rows."""
        self._end_row(part, row, {"failed": why})
        if row == "start":
            progress.is_over = True
            return False
        progress.ended.append(row)
        progress.is_over = not progress.left
        return not progress.is_over

    def _end_row(self, part: Part, row: str, record: dict[str, Any]) -> None:
        with self._lock:
            named = {"part": part.name, "row": row, **record}
            how = next((each for each in ("failed", "absent") if each in record), "rows")
            self._found[how].append(named)
            self.failed = self.failed or how == "failed"
            if part.module == "gpu_device" and how == "rows":
                self._ceilings |= record["measured"]
            took = {key: value for key, value in record.items() if key != "seconds"}
            print(f"[{self._now():5.0f} s] {part.module}: {row}: {one_line(took)}", flush=True)
            self._write()

    def _name_what_was_cut(self, stages: tuple[tuple[Part, ...], ...]) -> None:
        for part in (part for stage in stages for part in stage):
            progress = self._of(part)
            if progress.names is None and not progress.is_over:
                self._found["cut"].append({"part": part.name, "row": "all"})
            self._found["cut"] += [{"part": part.name, "row": name} for name in progress.left]

    def _now(self) -> float:
        return time.monotonic() - self.began_s

    def _write(self, is_over: bool = False) -> None:
        """Whole and at once: whoever stops this program finds everything up to then."""
        self._found |= {"seconds": self._now(), "is_over": is_over}
        temporary = self._out / ".gpu_suite.json"
        temporary.write_text(json.dumps(self._found))
        temporary.replace(self._out / "gpu_suite.json")

    def report(self) -> None:
        """What did not run, and the last line for programs."""
        for how in ("failed", "absent", "cut"):
            for each in self._found[how]:
                print(f"{how}: {each['part']}, {each['row']}: {str(each.get(how, ''))[:200]}")
        counts = {how: len(self._found[how]) for how in ("rows", "failed", "absent", "cut")}
        seconds = round(self._found["seconds"], 1)
        print(json.dumps({"bench": "gpu_suite", **counts, "seconds": seconds}), flush=True)


def _new_lines(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Each time, the records that were appended since."""
    rest, offset = "", 0
    while True:
        if path.exists():
            with path.open(encoding="utf-8") as file:
                file.seek(offset)
                rest += file.read()
                offset = file.tell()
        *lines, rest = rest.split("\n")
        yield [json.loads(line) for line in lines]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and all that it started. One that waits for a hung kernel may outlive this a while."""
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def _cause(said: str, ended: Sequence[str]) -> str:
    """The exception that ended a process, or its last line; empty if it said nothing.

    Args:
        said: its output; the last line may be the JSON of all rows.
        ended: names of the rows that ended; what is before their lines is theirs.
    """
    lines = [each for each in said.splitlines() if each.strip() and not each.startswith("{")]
    rows = tuple(f"{name}: " for name in ended)
    last = max((place for place, each in enumerate(lines) if each.startswith(rows)), default=-1)
    lines = lines[last + 1 :]
    if TRACEBACK in lines:
        after = lines[len(lines) - lines[::-1].index(TRACEBACK) :]  # of the last one
        lines = [each for each in after if not each[0].isspace()][:1]
    return "".join(f": {each[:300]}" for each in lines[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of few minutes")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of everything")
    parser.add_argument("--parts", nargs="*", metavar="PREFIX", help="only these, by their names")
    arguments = parser.parse_args()
    if importlib.util.find_spec("msgspec") is None:
        print(f"== {MSGSPEC}", flush=True)
    flags = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    prefixes = tuple(arguments.parts or [""])
    stages = tuple(
        tuple(part for part in stage if part.name.startswith(prefixes)) for stage in STAGES
    )
    suite = Suite(arguments.out, flags, arguments.budget_s)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that parts end with it
    suite.run(stages)
    suite.report()
    sys.exit(1 if suite.failed else 0)


if __name__ == "__main__":
    main()
