"""Runs benches one after another, each in its own process: `python -m bench [NAME...] [--tiny]`

Prints the tables of each bench, and at the end one line of JSON with all results. Without names,
all benches run that need no GPU (`bench/gpu_suite.sh` runs the others). `--no-peers` leaves out the
benches that install other systems first. Nothing else should run on the machine. `took_s` is the
time of each bench.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BENCHES = (
    "admission",
    "attention_cut",
    "autoscale",
    "batch",
    "cascade",
    "cold_start",
    "eviction",
    "first_minute",
    "formats",
    "groups",
    "host_step",
    "lora",
    "planner",
    "routing",
    "serving_path",
    "sessions",
    "speculation",
)
PEERS = ("peers", "peers.serving", "peers.pair", "engines")  # install others' systems, some GB
ALL = (*BENCHES, *PEERS)


def run(name: str, flags: list[str]) -> dict[str, Any]:
    """The figures of one bench; `{"failed": status}` if it has none."""
    print(f"== {name}", flush=True)
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", f"bench.{name}", *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        if last:
            print(last, end="", flush=True)
        last = line
    status = process.wait()
    try:
        figures: dict[str, Any] = json.loads(last)
    except json.JSONDecodeError:
        print(last, end="")
        return {"failed": status}
    took_s = round(time.perf_counter() - began_s)
    print(f"({took_s} s)", flush=True)
    return {**figures, "took_s": took_s} if status == 0 else {"failed": status}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--no-peers", action="store_true", help="leave out others' systems")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(ALL)
    if unknown:
        parser.error(f"no bench is named {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    results = {}
    for name in arguments.names or (BENCHES if arguments.no_peers else ALL):
        results[name] = run(name, ["--tiny"] if arguments.tiny else [])
    print(json.dumps(results))
    return int(any("failed" in figures for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
