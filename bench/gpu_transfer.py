"""Measures KV transfer between two processes on one GPU, and what it costs a request.

    python -m bench.gpu_transfer [--out build/gpu]
    python -m bench.gpu_transfer --device cpu [--tiny]      # a rehearsal, through host memory

Two engines with equal random weights, one in each process, are connected by NIXL. Rows:

- `pulls`: whole blocks, one run of neighbours and shuffled, beside a copy in one process.
- `CUDA IPC`: the same bytes without a transport.
- `hand-overs`: a prompt is prefilled in the other process, its blocks are pulled here, and decoding
  goes on here. The tokens must be those of the other engine alone.

No prefix is cached, so all KV moves. The longest prompt fills more than half of the pool. `lane` is
the transport that UCX names for a pull. `floor ms` is a copy at the device's measured rate, and
`plan ms` what `disagg plan` predicts for two GPUs that NVLink connects.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.multiprocessing

from bench.gpu_device import Ceilings, eager_seconds, synchronize
from bench.gpu_models import placement_of, write_shape
from bench.gpu_rows import Row, parser_of, run_part
from bench.two_engines import (
    NUM_REPEATS,
    READER,
    SOURCE,
    HandOvers,
    Side,
    pattern,
    pull_blocks,
    serve,
)
from disagg.capacity.gpus import LINKS
from disagg.kvtransfer.ticket import Peer
from disagg.models.description import describe_model

NUM_BLOCKS, CPU_BLOCKS, TINY_BLOCKS = 256, 64, 64  # the longest prompt needs more than half
IPC_BLOCK_NBYTES = 8 << 20  # 64 tokens of Llama-3-8B
PAIR_S = 90.0  # with the making of two engines


def _side(name: str, device: torch.device, tiny: bool) -> Side:
    if device.type == "cuda":
        return Side(name, device, "llama-3-8b", NUM_BLOCKS)
    if tiny:
        return Side(name, device, "tiny", TINY_BLOCKS)
    return Side(name, device, "rehearsal-blocks", CPU_BLOCKS, block_size=64)


def pull_row(
    side: Side, source: Peer, num_blocks: int, predicted: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Whole blocks, one run of neighbours and shuffled, beside a copy inside this process."""
    run = list(range(num_blocks))
    shuffled = random.Random(0).sample(range(side.kv_cache.num_blocks), num_blocks)
    found: dict[str, list[float]] = {"run": [], "shuffled": [], "copy": []}
    lane = ""
    for _ in range(NUM_REPEATS):
        for name, blocks in (("run", run), ("shuffled", shuffled)):
            done = pull_blocks(side, source, blocks)
            found[name].append(done.seconds)
            lane = done.lane or lane
            _check_blocks(side, blocks)
        found["copy"].append(_time_copy(side, num_blocks))
    nbytes = num_blocks * side.kv_cache.block_nbytes
    rates = {f"{name} GB/s": nbytes / min(times) / 1e9 for name, times in found.items()}
    share = rates["run GB/s"] / rates["copy GB/s"]
    run_ms = min(found["run"]) * 1e3
    figures = {"MB": nbytes / 1e6, "lane": lane, "run ms": run_ms, **rates, "of copy": share}
    return {**figures, **predicted(nbytes)}


def _check_blocks(side: Side, blocks: list[int]) -> None:
    """That the source's bytes are here; takes them away again for the next pull."""
    for block_id in (blocks[0], blocks[-1]):
        if not torch.equal(side.kv_cache.slab[block_id], pattern(side, block_id)):
            raise RuntimeError(f"block {block_id} is not the source's")
    side.kv_cache.slab[blocks] = 0
    synchronize(side.device)


def _time_copy(side: Side, num_blocks: int) -> float:
    source = side.kv_cache.slab[:num_blocks]
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(side.device)
    begin_s = time.perf_counter()
    target.copy_(source)
    synchronize(side.device)
    return time.perf_counter() - begin_s


class Pair:
    """A reader here and a source in another process, made when a row first needs them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.is_tiny = torch.device(arguments.device), bool(arguments.tiny)
        self.ceilings = Ceilings.of(arguments)
        self._made: tuple[Side, Peer, HandOvers] | None = None
        self._process: subprocess.Popen[str] | None = None

    def pull(self, num_blocks: int) -> dict[str, Any]:
        return self._use(lambda side, source, _: pull_row(side, source, num_blocks, self.predicted))

    def predicted(self, nbytes: int) -> dict[str, Any]:
        """Of a pull."""
        floor_s = self.ceilings.copy_s(nbytes)
        plan_s = nbytes / LINKS["nvlink"]
        return {"floor ms": floor_s and floor_s * 1e3, "plan ms": plan_s * 1e3}

    def hand_over(self, num_tokens: int) -> dict[str, Any]:
        return self._use(
            lambda side, _, hand_overs: {
                **_same(hand_overs.row(num_tokens)),
                **self._predicted_hand_over(side, num_tokens),
            }
        )

    def _predicted_hand_over(self, side: Side, num_tokens: int) -> dict[str, Any]:
        """Of the second token: the prompt, its KV, and a decode step."""
        with tempfile.TemporaryDirectory() as folder:
            model = describe_model(write_shape(Path(folder), side.shape))
            planned = placement_of(model, self.device)
        if planned is None:
            return {"plan ms": None}
        pool, cache = side.engine.pool, side.kv_cache
        nbytes = -(-num_tokens // pool.block_size) * cache.block_nbytes
        computed_s = planned.prefill_s(num_tokens) + planned.decode_step_s(1, num_tokens)
        return {"plan ms": computed_s * 1e3 + self.predicted(nbytes)["plan ms"]}

    def _use(self, measure: Callable[[Side, Peer, HandOvers], dict[str, Any]]) -> dict[str, Any]:
        try:
            return measure(*(self._made or self._make()))
        except BaseException:
            self.close()  # whatever was on its way would answer the next row
            raise

    def _make(self) -> tuple[Side, Peer, HandOvers]:
        side = _side(READER, self.device, self.is_tiny)
        flags = ["--device", self.device.type, *(["--tiny"] if self.is_tiny else [])]
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_transfer", "--serve", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        source = msgspec.json.decode(process.stdout.readline(), type=Peer)
        side.transport.add_peer(source)
        pull_blocks(side, source, [0])  # the first one connects
        self._made = (side, source, HandOvers(side, process))
        return self._made

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
        if self._made is not None:
            self._made[0].transport.close()
        self._made = self._process = None


def _same(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a hand-over whose tokens were right."""
    equal, num_rounds = row["same tokens"].split("/")
    if equal != num_rounds:
        raise ArithmeticError(f"tokens were the same in {equal} of {num_rounds} hand-overs only")
    return row


def ipc_row(pair: Pair, num_blocks: int) -> dict[str, Any]:
    """Blocks of Llama-3-8B read from another process's memory as one lies in one's own: what the
    hardware gives to a transport that does no more. Shared memory on a CPU."""
    device = pair.device
    processes = torch.multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    arguments = (there, device.type, num_blocks)
    process = processes.Process(target=_share_blocks, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        slab = here.recv()
        own, target = slab.clone(), torch.empty_like(slab)
        order = torch.randperm(num_blocks, device=device)
        sources: dict[str, Callable[[], object]] = {
            "run": lambda: target.copy_(slab),
            "copy here": lambda: target.copy_(own),
            "shuffled": lambda: torch.index_select(slab, 0, order, out=target),
        }
        rates = {
            f"{name} GB/s": slab.nbytes / eager_seconds(copy, device) / 1e9
            for name, copy in sources.items()
        }
        if not torch.equal(target, own[order]):
            raise RuntimeError("what was read is not what the other process wrote")
        here.send("read")
        process.join(10)
        return {"MB": own.nbytes / 1e6, **rates, **pair.predicted(own.nbytes)}
    finally:
        process.kill()


def _share_blocks(there: Any, device: str, num_blocks: int) -> None:
    """The other process: its blocks, until they have been read."""
    slab = torch.randint(-99, 99, (num_blocks, IPC_BLOCK_NBYTES), dtype=torch.int8, device=device)
    synchronize(torch.device(device))
    there.send(slab)
    there.recv()


def rows_of(pair: Pair) -> list[Row]:
    is_cuda = pair.device.type == "cuda"
    pulls = [128, 8, 32, 1] if is_cuda else [16, 1]
    prompts = [2048, 8192, 512, 16000] if is_cuda else [40, 512] if pair.is_tiny else [512, 2048]
    shared = [128, 8] if is_cuda else [8]
    rows = [Row(f"CUDA IPC, {n} blocks", partial(ipc_row, pair, n), 40.0) for n in shared[:1]]
    # Before the first hand-over writes to the source's blocks.
    rows += [Row(f"NIXL, {n} blocks", partial(pair.pull, n), PAIR_S) for n in pulls]
    rows += [Row(f"hand-over of {n}", partial(pair.hand_over, n), PAIR_S) for n in prompts]
    rows += [Row(f"CUDA IPC, {n} blocks", partial(ipc_row, pair, n), 40.0) for n in shared[1:]]
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(_side(SOURCE, torch.device(arguments.device), arguments.tiny))
        return
    pair = Pair(arguments)
    try:
        run_part("gpu_transfer", rows_of(pair), arguments)
    finally:
        pair.close()


if __name__ == "__main__":
    main()
