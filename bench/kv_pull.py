"""Measures how fast KV moves between two processes of this machine: `python -m bench.kv_pull`.

It pulls 64 KB to 256 MB with the NIXL transport, as one run of blocks and as shuffled blocks (no
two neighbours). A plain memcpy of the same bytes reads memory that both processes share and that
the other process wrote. The three take turns; figures are medians of `--rounds`. Prints a table,
then one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from bench.report import machine, take_turns
from disagg.kvtransfer.nixl_transport import NixlTransport
from disagg.kvtransfer.runs import merge_runs
from disagg.kvtransfer.slab import Slab, allocate_host
from disagg.kvtransfer.stamps import Stamps, first_generation
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone

BLOCK_NBYTES = 64 * 1024
MAX_NBYTES = 256 * 1024 * 1024
SIZES = (*(BLOCK_NBYTES << shift for shift in (0, 2, 4, 6, 8, 10, 11)), MAX_NBYTES)
NUM_BLOCKS = MAX_NBYTES // BLOCK_NBYTES
SOURCE_ID, EPOCH, LAYOUT = "source", 1, "bench"
NUM_LATENCIES = 300


@dataclass
class Row:
    nbytes: int
    memcpy_gbps: float
    run_gbps: float
    shuffled_gbps: float
    shuffled_descriptors: int

    @property
    def of_memcpy(self) -> float:
        return self.run_gbps / self.memcpy_gbps


class Reader:
    """Pulls blocks of the source and says how many seconds it took."""

    def __init__(self, peer: Peer, slab: Slab) -> None:
        stamps = Stamps(NUM_BLOCKS, "reader", EPOCH)
        self._side = NixlTransport("reader", EPOCH, slab, stamps, clock=time.perf_counter)
        self._side.add_peer(peer)
        self._num_pulls = 0

    def pull(self, blocks: list[int], into: list[int]) -> float:
        self._num_pulls += 1
        ticket = KVTicket(
            ticket_id=str(self._num_pulls),
            source_id=SOURCE_ID,
            epoch=EPOCH,
            layout=LAYOUT,
            num_tokens=1,
            block_ids=tuple(blocks),
            generations=(first_generation(SOURCE_ID, EPOCH),) * len(blocks),
        )
        self._side.pull(ticket, 0, into)
        while not (events := self._side.poll()):
            time.sleep(10e-6)
        (done,) = events
        if not isinstance(done, PullDone) or done.error is not None:
            raise SystemExit(f"a pull failed: {done}")
        return done.seconds

    def close(self) -> None:
        self._side.close()


def map_shared(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), MAX_NBYTES)
    shared.madvise(mmap.MADV_HUGEPAGE)
    return shared


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def slab_of(memory: mmap.mmap) -> Slab:
    return Slab(address_of(memory), NUM_BLOCKS, BLOCK_NBYTES, LAYOUT, owner=memory)


def serve(path: str) -> None:
    """The source's process: the same bytes in its slab and in the shared memory."""
    shared, memory = map_shared(path), allocate_host(MAX_NBYTES)
    for block in range(NUM_BLOCKS):
        start = block * BLOCK_NBYTES
        memory[start : start + BLOCK_NBYTES] = block.to_bytes(8, "little") * (BLOCK_NBYTES // 8)
    shared[:] = memory[:]
    stamps = Stamps(NUM_BLOCKS, SOURCE_ID, EPOCH)
    side = NixlTransport(SOURCE_ID, EPOCH, slab_of(memory), stamps, clock=time.perf_counter)
    print(msgspec.json.encode(side.peer).decode(), flush=True)
    sys.stdin.read()
    side.close()


def measure(rounds: int, shared_path: str, peer: Peer) -> tuple[list[Row], float, float]:
    """Rows of the table, and the first and the median latency of one block in seconds."""
    shared, memory = map_shared(shared_path), allocate_host(MAX_NBYTES)
    address, shared_address = address_of(memory), address_of(shared)
    ctypes.memmove(address, shared_address, MAX_NBYTES)  # all pages are mapped before we measure
    ctypes.memset(address, 0, MAX_NBYTES)
    reader = Reader(peer, slab_of(memory))
    first = reader.pull([0], [0])
    latency = statistics.median(reader.pull([n % 64], [n % 64]) for n in range(NUM_LATENCIES))
    rows = [measure_size(reader, rounds, size, address, shared_address) for size in SIZES]
    intact = all(
        memory[start : start + 8] == shared[start : start + 8]
        for start in range(0, MAX_NBYTES, BLOCK_NBYTES)
    )
    if not intact:
        raise SystemExit("the bytes that arrived are not the source's")
    reader.close()
    return rows, first, latency


def measure_size(
    reader: Reader, rounds: int, nbytes: int, address: int, shared_address: int
) -> Row:
    num = nbytes // BLOCK_NBYTES
    run, shuffled = list(range(num)), list(range(num))
    random.Random(num).shuffle(shuffled)

    def copy() -> float:
        start = time.perf_counter()
        ctypes.memmove(address, shared_address, nbytes)
        return time.perf_counter() - start

    seconds = take_turns(
        {
            "copy": copy,
            "shuffled": lambda: reader.pull(shuffled, list(reversed(shuffled))),
            "run": lambda: reader.pull(run, run),  # last, so that the bytes lie where they were
        },
        rounds,
    )
    return Row(
        nbytes=nbytes,
        memcpy_gbps=nbytes / seconds["copy"] / 1e9,
        run_gbps=nbytes / seconds["run"] / 1e9,
        shuffled_gbps=nbytes / seconds["shuffled"] / 1e9,
        shuffled_descriptors=len(merge_runs(zip(shuffled, reversed(shuffled), strict=True))),
    )


def report(rows: list[Row], first: float, latency: float) -> None:
    print("    bytes   memcpy GB/s   one run GB/s   of memcpy   shuffled GB/s   descriptors")
    for row in rows:
        print(
            f"{row.nbytes:>9}   {row.memcpy_gbps:11.2f}   {row.run_gbps:12.2f}"
            f"   {row.of_memcpy:9.0%}   {row.shuffled_gbps:13.2f}   1 / {row.shuffled_descriptors}"
        )
    print(f"one block of 64 KB: {latency * 1e6:.0f} us (the first: {first * 1e6:.0f} us)")
    figures = [asdict(row) | {"of_memcpy": row.of_memcpy} for row in rows]
    line = {"bench": "kv_pull", "machine": machine(), "rows": figures}
    print(json.dumps({**line, "block_s": latency, "first_s": first}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", metavar="PATH", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    directory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.truncate(MAX_NBYTES)
        source = subprocess.Popen(
            [sys.executable, "-m", "bench.kv_pull", "--serve", file.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert source.stdin is not None and source.stdout is not None
        try:
            peer = msgspec.json.decode(source.stdout.readline(), type=Peer)
            report(*measure(arguments.rounds, file.name, peer))
        finally:
            source.stdin.close()
            source.wait()


if __name__ == "__main__":
    main()
