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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.multiprocessing

from bench.gpu_device import Ceilings, eager_seconds, synchronize
from bench.gpu_models import new_sequence, placement_of, write_shape
from bench.gpu_rows import Row, parser_of, run_part
from bench.random_models import random_decoder
from bench.shapes import model_config
from disagg.capacity.gpus import LINKS
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.kv_shape import KVShape
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.kernels.kv_pages import format_of
from disagg.kvtransfer.slab import Slab, Stamps, first_generation
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.models.description import describe_model
from disagg.worker.kv_export import KVExport
from disagg.worker.kv_import import KVImport

# Shape, blocks (the longest prompt needs more than half of them), tokens of a block.
ON_A_GPU, REHEARSAL, TINY = ("llama-3-8b", 256, 64), ("rehearsal-blocks", 64, 64), ("tiny", 64, 16)
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 8, 8192
IPC_BLOCK_NBYTES = 8 << 20  # 64 tokens of Llama-3-8B
PAIR_S = 90.0  # with the making of two engines
SOURCE, READER, EPOCH = "source", "reader", 1
NUM_OUTPUT, NUM_REPEATS = 16, 5
PATIENCE_S = 20.0  # less than a row's limit, so that the reason is known
POLL_S = 10e-6  # between two looks: the transport's thread needs the interpreter too


class Prefill(msgspec.Struct):
    """To the other process: prefill this, and say what a single engine would answer."""

    name: str
    tokens: list[int]


class Prefilled(msgspec.Struct):
    ticket: KVTicket
    first_token: int
    seconds: float
    expected: list[int]


class Side:
    """An engine of one process, its slab and its transport."""

    def __init__(self, name: str, device: torch.device, is_tiny: bool) -> None:
        from disagg.kvtransfer.nixl_transport import NixlTransport  # may not be installed
        from disagg.kvtransfer.ucx import LOOPBACK

        self.device = device
        self.shape, num_blocks, block_size = ON_A_GPU
        if device.type == "cpu":
            self.shape, num_blocks, block_size = TINY if is_tiny else REHEARSAL
        self.config = config = model_config(self.shape)
        shape = KVShape.from_model(config, "random", block_size, format_of(torch.bfloat16))
        self.kv_cache = cache = KVCache(shape, num_blocks, device)
        runner = ModelRunner(random_decoder(config, torch.bfloat16, device), cache)
        runner.warm_up(min(MAX_NUM_BATCHED_TOKENS, num_blocks * block_size), MAX_NUM_SEQS)
        stamps = Stamps(num_blocks, name, EPOCH)
        self.generations = stamps.generations
        scheduler = Scheduler(
            BlockPool(num_blocks, block_size, self.generations, enable_prefix_caching=False),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
        )
        self.engine = Engine(scheduler, runner)
        slab = Slab(
            cache.base_address,
            cache.num_blocks,
            cache.block_nbytes,
            cache.layout,
            cache.device_id,
            owner=cache,
        )
        self.transport = NixlTransport(
            slab,
            stamps,
            clock=time.perf_counter,
            interface=LOOPBACK,
            begin_thread=cache.begin_thread,
        )

    def sequence(self, name: str, tokens: list[int], num_prompt: int, max_tokens: int) -> Sequence:
        return new_sequence(name, tokens, num_prompt, max_tokens, self.engine.pool.block_size)

    def run(self, sequence: Sequence, between: Callable[[], object] = lambda: None) -> list[int]:
        """Compute a sequence here, to its end. Returns its output.

        Args:
            between: called before every step: what others hold of the pool may come back then.

        Raises:
            TimeoutError: it did not end.
        """
        late_s = time.perf_counter() + PATIENCE_S
        self.engine.submit(sequence)
        while self.engine.has_work:
            between()
            self.engine.step()
            if time.perf_counter() > late_s:
                pool = self.engine.pool
                raise TimeoutError(
                    f"{sequence.request_id} did not end in {PATIENCE_S:.0f} s;"
                    f" {pool.num_free} of {pool.num_blocks} blocks are free"
                )
        return sequence.tokens[sequence.num_prompt_tokens :]


def pattern(side: Side, block_id: int) -> torch.Tensor:
    """What a block of the source holds before the first hand-over."""
    generator = torch.Generator(side.device).manual_seed(block_id)
    shape = side.kv_cache.slab.shape[1:]
    return torch.randn(shape, generator=generator, device=side.device).to(side.kv_cache.slab.dtype)


# The source's process.


def serve(side: Side) -> None:
    for block_id in range(side.kv_cache.num_blocks):
        side.kv_cache.slab[block_id] = pattern(side, block_id)
    synchronize(side.device)
    leaving = KVExport(side.engine, side.transport.peer, side.generations)

    def take_back() -> None:
        """What the reader has pulled; as a worker does between two steps."""
        for event in side.transport.poll():
            if isinstance(event, TicketReleased):
                leaving.release(event.ticket_id)
        leaving.advance(time.time())

    _say(side.transport.peer)
    for line in sys.stdin:
        _say(_prefill(side, leaving, msgspec.json.decode(line, type=Prefill), take_back))
    side.transport.close()


def _say(message: Any) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


def _prefill(
    side: Side, leaving: KVExport, asked: Prefill, take_back: Callable[[], None]
) -> Prefilled:
    num_prompt = len(asked.tokens)
    alone = side.sequence(f"{asked.name}-alone", asked.tokens, num_prompt, NUM_OUTPUT)
    expected = side.run(alone, take_back)
    sequence = side.sequence(asked.name, asked.tokens, num_prompt, NUM_OUTPUT)
    sequence.hand_over = True
    begin_s = time.perf_counter()
    (first_token,) = side.run(sequence, take_back)
    seconds = time.perf_counter() - begin_s
    return Prefilled(leaving.leave(sequence, time.time()), first_token, seconds, expected)


# The reader's process.

_pull_numbers = count()  # a ticket is used once


def pull_blocks(side: Side, source: Peer, blocks: list[int]) -> PullDone:
    """Pull `blocks` of the source into the same blocks here."""
    ticket = KVTicket(
        ticket_id=f"pull-{next(_pull_numbers)}",
        source_id=SOURCE,
        epoch=EPOCH,
        layout=source.layout,
        num_tokens=1,
        block_ids=tuple(blocks),
        generations=(first_generation(SOURCE, EPOCH),) * len(blocks),
    )
    side.transport.pull(ticket, 0, blocks)
    late_s = time.perf_counter() + PATIENCE_S
    while not (events := side.transport.poll()):
        if time.perf_counter() > late_s:
            raise TimeoutError(f"a pull of {len(blocks)} blocks did not end in {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)
    (done,) = events
    if not isinstance(done, PullDone) or done.error is not None:
        raise RuntimeError(f"a pull failed: {done}")
    return done


class HandOvers:
    """Requests that are prefilled in the other process and go on here."""

    def __init__(self, side: Side, process: subprocess.Popen[str]) -> None:
        self._side = side
        self._process = process
        self._lane = ""
        self._kv_import = KVImport(side.engine, side.transport, lambda source_id, num_blocks: 1.0)

    def row(self, num_tokens: int) -> dict[str, Any]:
        """Medians. Raises `ArithmeticError` if tokens are not those of the other engine alone."""
        rounds = [self._one(f"{num_tokens}-{turn}", num_tokens) for turn in range(NUM_REPEATS)]
        equal = sum(each.pop("equal") for each in rounds)
        same = f"{equal:.0f}/{NUM_REPEATS}"
        if equal < NUM_REPEATS:
            raise ArithmeticError(f"tokens were the same in {same} hand-overs only")
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        return {"prompt": num_tokens, **medians, "lane": self._lane, "same tokens": same}

    def _one(self, name: str, num_tokens: int) -> dict[str, float]:
        side = self._side
        rng = random.Random(name)
        tokens = [rng.randrange(1, side.config.vocab_size) for _ in range(num_tokens)]
        prefilled = self._ask(Prefill(name, tokens))
        grown = [*tokens, prefilled.first_token]
        sequence = side.sequence(name, grown, num_tokens, NUM_OUTPUT)
        begin_s = time.perf_counter()
        self._kv_import.admit(sequence, prefilled.ticket, time.time())
        pull_s = self._arrive(sequence)
        token_s = time.perf_counter() - begin_s
        while side.engine.has_work:
            side.engine.step()
        begin_s = time.perf_counter()
        side.run(side.sequence(f"{name}-here", tokens, num_tokens, 2))
        return {
            "prefill there ms": prefilled.seconds * 1e3,
            "pull ms": pull_s * 1e3,
            "ticket to token ms": token_s * 1e3,
            "second token ms": (prefilled.seconds + token_s) * 1e3,
            "all here instead ms": (time.perf_counter() - begin_s) * 1e3,
            "equal": float(sequence.tokens[num_tokens:] == prefilled.expected),
        }

    def _arrive(self, sequence: Sequence) -> float:
        """Until the first token that is computed here; the pull's own seconds."""
        side, num_tokens, pull_s = self._side, len(sequence.tokens), 0.0
        late_s = time.perf_counter() + PATIENCE_S
        while len(sequence.tokens) == num_tokens:
            if time.perf_counter() > late_s:
                raise TimeoutError(f"no token in {PATIENCE_S:.0f} s after the ticket")
            for event in side.transport.poll():
                if isinstance(event, PullDone):
                    if event.error is not None:
                        raise RuntimeError(f"a pull failed: {event.error}")
                    pull_s, self._lane = event.seconds, event.lane or self._lane
                    self._kv_import.pull_ended(event, time.time())
            self._kv_import.advance(time.time())
            if not side.engine.step():
                time.sleep(POLL_S)
        return pull_s

    def _ask(self, prefill: Prefill) -> Prefilled:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(prefill).decode() + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the source's process has ended; its output says why")
        return msgspec.json.decode(answer, type=Prefilled)


# The rows.


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
                **hand_overs.row(num_tokens),
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
        side = Side(READER, self.device, self.is_tiny)
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
        serve(Side(SOURCE, torch.device(arguments.device), arguments.tiny))
        return
    pair = Pair(arguments)
    try:
        run_part("gpu_transfer", rows_of(pair), arguments)
    finally:
        pair.close()


if __name__ == "__main__":
    main()
