"""Measures memory and speed of the router's prefix index with millions of blocks.

    python -m bench.prefix_index [--tiny]

The index is told of chains of 128 blocks, eight blocks an event, as workers do. Cases:

- `unshared`: each chain is on one worker.
- `shared`: each chain is on `NUM_HOLDERS` workers.
- `stream`: new chains keep coming when the index is full: the process must not grow any more.
- `leaves`: one of the workers leaves.

Bytes are those by which the process grew, from /proc. `own count` is the index's own figure, which
is its metric. `slowest` is the longest single call: streams are delayed for that long. Each case
runs in a process of its own. The second table has the bytes that names alone take as their number
grows; bytes a name vary with the time since the tables last grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import finish, print_table
from disagg.blocks import BlockHash
from disagg.messages import KVEvent
from disagg.router.block_names import new_block_names
from disagg.router.prefix_index import PrefixIndex

NUM_BLOCKS, NUM_BLOCKS_TINY = 10_000_000, 20_000
NUM_WORKERS, NUM_HOLDERS = 64, 4
CHAIN_BLOCKS, EVENT_BLOCKS = 128, 8
GOAL = {"bytes a block": 64, "slowest ms": 5}
FOUND_BLOCKS, NUM_LOOKUPS = 512, 200
LEAST_NAMES = 10_000
CASES = ("unshared", "shared", "stream", "leaves")


class Filling:
    """An index, and what it took to tell it things."""

    def __init__(self, num_blocks: int, max_nbytes: int) -> None:
        self.index = PrefixIndex(max_nbytes)
        self.rng = random.Random(1)
        self.num_blocks = num_blocks
        self.slowest_s = 0.0
        self.spent_s = 0.0
        for worker in range(NUM_WORKERS):
            self.index.snapshot(f"w{worker}", ())
        gc.collect()
        self.began_nbytes = rss_nbytes()

    def timed(self, call: Callable[[], Any]) -> None:
        began_s = time.thread_time()
        call()
        took_s = time.thread_time() - began_s
        self.spent_s += took_s
        self.slowest_s = max(self.slowest_s, took_s)

    def tell_chain(self, number: int, num_holders: int) -> None:
        for _ in range(CHAIN_BLOCKS // EVENT_BLOCKS):
            names = tuple(self.rng.randbytes(16) for _ in range(EVENT_BLOCKS))
            for place in range(num_holders):
                worker = f"w{(number + place) % NUM_WORKERS}"
                # As from another process: every worker's event has names of its own.
                event = KVEvent("stored", names if not place else tuple(map(copied, names)))
                self.timed(lambda worker=worker, event=event: self.index.apply(worker, [event]))  # type: ignore[misc]

    def fill(self, num_holders: int) -> None:
        for number in range(self.num_blocks // CHAIN_BLOCKS):
            self.tell_chain(number, num_holders)

    def row(self, case: str, num_pairs: int) -> dict[str, Any]:
        nbytes = rss_nbytes() - self.began_nbytes
        return {
            "case": case,
            "blocks": self.index.num_blocks,
            "pairs": num_pairs,
            "MB": nbytes / 1e6,
            "own count MB": self.index.nbytes / 1e6,
            "bytes a block": nbytes / self.index.num_blocks,
            "bytes a pair": nbytes / num_pairs,
            "slowest ms": self.slowest_s * 1e3,
            "lookup us": self.lookup_us(),
        }

    def lookup_us(self) -> float:
        """Median time of finding a cached prompt of `FOUND_BLOCKS` blocks."""
        prompt = [self.rng.randbytes(16) for _ in range(FOUND_BLOCKS)]
        self.index.apply("w1", [KVEvent("stored", tuple(prompt))])
        took_s = []
        for _ in range(NUM_LOOKUPS):
            began_s = time.thread_time()
            self.index.find(prompt)
            took_s.append(time.thread_time() - began_s)
        self.index.apply("w1", [KVEvent("removed", tuple(prompt))])
        return sorted(took_s)[NUM_LOOKUPS // 2] * 1e6


def rss_nbytes() -> int:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def copied(name: BlockHash) -> BlockHash:
    return bytes(bytearray(name))


def run(case: str, num_blocks: int) -> list[dict[str, Any]]:
    room = num_blocks if case == "stream" else 2 * num_blocks
    filling = Filling(num_blocks, room * new_block_names(0).ENTRY_NBYTES)
    num_holders = NUM_HOLDERS if case == "shared" else 1
    filling.fill(num_holders)
    index = filling.index
    if case in ("unshared", "shared"):
        return [filling.row(case, index.num_blocks * num_holders)]
    if case == "stream":
        rows = []
        for turn in range(1, 4):
            filling.slowest_s = 0.0
            filling.fill(1)
            rows.append(filling.row(f"stream, {turn} x new", index.num_blocks))
        return rows
    filling.slowest_s = 0.0
    filling.timed(lambda: index.drop("w0"))
    while index.num_blocks > num_blocks * (NUM_WORKERS - 1) // NUM_WORKERS:
        filling.timed(lambda: index.apply("w1", ()))
    return [filling.row("one of 64 leaves", index.num_blocks)]


def bytes_a_name(num_names: int) -> list[dict[str, Any]]:
    """Least and most while names become so many, by powers of two."""
    names, rng, rows = new_block_names(1 << 40), random.Random(2), []
    empty_nbytes = names.nbytes
    names.keep(1, 1)
    most = LEAST_NAMES
    while most <= num_names:
        sizes = []
        while names.num_names < most:
            some = [rng.randbytes(16) for _ in range(LEAST_NAMES // 10)]
            names.put(some, [(1, len(some))])
            sizes.append((names.nbytes - empty_nbytes) / names.num_names)
        row = {"names": most, "bytes a name, least": min(sizes), "most": max(sizes)}
        rows.append(row)
        most *= 2
    return rows[1:]  # few names lie in tables of a least size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    num_blocks = NUM_BLOCKS_TINY if arguments.tiny else NUM_BLOCKS
    if arguments.case:
        print(json.dumps(run(arguments.case, num_blocks)))
        return
    rows = []
    for case in CASES:
        command = [sys.executable, "-m", "bench.prefix_index", "--case", case]
        command += ["--tiny"] if arguments.tiny else []
        rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    print_table(rows)
    names = bytes_a_name(num_blocks)
    print_table(names)
    finish("prefix_index", rows, names=names, goal=GOAL)


if __name__ == "__main__":
    main()
