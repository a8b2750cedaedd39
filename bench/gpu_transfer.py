"""KV between two processes on one GPU: how fast it moves, and what a hand-over costs a request.

    python -m bench.gpu_transfer [--out build/gpu]
    python -m bench.gpu_transfer --device cpu --tiny      # a rehearsal, through host memory

Two engines with equal random weights, one in each process, connected by NIXL. Pulls: the bytes
of whole blocks, one run of neighbours and shuffled, beside a copy inside one process. Hand-overs:
a prompt is prefilled in the other process, its blocks are pulled here, and decoding goes on; the
tokens must be those of the other engine alone. No prefix is cached, so that all of it moves.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.gpu_device import describe, parse_arguments, synchronize, write_json
from bench.gpu_models import new_engine, new_sequence
from bench.report import print_table
from bench.shapes import model_config
from disagg.decode_worker.arrivals import Arrivals
from disagg.engine.sequence import Sequence
from disagg.kvtransfer.nixl_transport import NixlTransport
from disagg.kvtransfer.slab import Slab
from disagg.kvtransfer.stamps import Stamps, first_generation
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.prefill_worker.leaving import Leaving

SOURCE, READER, EPOCH = "source", "reader", 1
NUM_BLOCKS = {"cuda": 256, "cpu": 64}
PULLS = {"cuda": [1, 8, 32, 128], "cpu": [1, 16]}  # blocks
PROMPTS = {"cuda": [512, 2048, 8192, 16000], "cpu": [40, 200]}
NUM_OUTPUT, NUM_REPEATS = 16, 5
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

    def __init__(
        self,
        name: str,
        device: torch.device,
        shape: str,
        num_blocks: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device = device
        made: list[Stamps] = []

        def new_generations(num_blocks: int) -> Any:
            made.append(Stamps(num_blocks, name, EPOCH))
            return made[0].generations

        self.config = model_config(shape)
        self.engine, self.kv_cache = new_engine(
            self.config,
            device,
            num_blocks,
            max_num_seqs=8,
            enable_prefix_caching=False,
            dtype=dtype,
            new_generations=new_generations,
        )
        cache = self.kv_cache
        slab = Slab(
            cache.base_address,
            cache.num_blocks,
            cache.block_nbytes,
            cache.layout,
            cache.device_id,
            owner=cache,
        )
        self.generations = made[0].generations
        self.transport = NixlTransport(name, EPOCH, slab, made[0], clock=time.perf_counter)

    def sequence(self, name: str, tokens: list[int], num_prompt: int, max_tokens: int) -> Sequence:
        return new_sequence(name, tokens, num_prompt, max_tokens, self.engine.pool.block_size)

    def run(self, sequence: Sequence) -> list[int]:
        """Compute a sequence here, to its end. Returns its output."""
        self.engine.submit(sequence)
        while self.engine.has_work:
            self.engine.step()
        return sequence.tokens[sequence.num_prompt_tokens :]


def _side(name: str, device: torch.device, tiny: bool) -> Side:
    return Side(name, device, "tiny" if tiny else "llama-3-8b", NUM_BLOCKS[device.type])


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
    leaving = Leaving(side.engine, side.transport.peer, side.generations)
    _say(side.transport.peer)
    for line in sys.stdin:
        asked = msgspec.json.decode(line, type=Prefill)
        for event in side.transport.poll():
            if isinstance(event, TicketReleased):
                leaving.release(event.ticket_id)
        leaving.advance(time.time())
        _say(_prefill(side, leaving, asked))
    side.transport.close()


def _say(message: Any) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


def _prefill(side: Side, leaving: Leaving, asked: Prefill) -> Prefilled:
    num_prompt = len(asked.tokens)
    alone = side.sequence(f"{asked.name}-alone", asked.tokens, num_prompt, NUM_OUTPUT)
    expected = side.run(alone)
    sequence = side.sequence(asked.name, asked.tokens, num_prompt, NUM_OUTPUT)
    sequence.hand_over = True
    begin_s = time.perf_counter()
    (first_token,) = side.run(sequence)
    seconds = time.perf_counter() - begin_s
    return Prefilled(leaving.leave(sequence, time.time()), first_token, seconds, expected)


# The reader's process.

_pull_numbers = count()  # a ticket is used once


def time_pull(side: Side, source: Peer, blocks: list[int]) -> float:
    """Seconds to pull `blocks` of the source into the same blocks here."""
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
    while not (events := side.transport.poll()):
        time.sleep(POLL_S)
    (done,) = events
    if not isinstance(done, PullDone) or done.error is not None:
        raise SystemExit(f"a pull failed: {done}")
    return done.seconds


def time_pulls(side: Side, source: Peer) -> list[dict[str, Any]]:
    rows = []
    for num_blocks in PULLS[side.device.type]:
        run = list(range(num_blocks))
        shuffled = random.Random(0).sample(range(side.kv_cache.num_blocks), num_blocks)
        found: dict[str, list[float]] = {"run": [], "shuffled": [], "copy": []}
        for _ in range(NUM_REPEATS):
            for name, blocks in (("run", run), ("shuffled", shuffled)):
                found[name].append(time_pull(side, source, blocks))
                _check_blocks(side, blocks)
            found["copy"].append(_time_copy(side, num_blocks))
        nbytes = num_blocks * side.kv_cache.block_nbytes
        rates = {f"{name} GB/s": nbytes / min(times) / 1e9 for name, times in found.items()}
        rows.append({"MB": nbytes / 1e6, "blocks": num_blocks, **rates})
    return rows


def _check_blocks(side: Side, blocks: list[int]) -> None:
    """That the source's bytes are here; takes them away again for the next pull."""
    for block_id in (blocks[0], blocks[-1]):
        if not torch.equal(side.kv_cache.slab[block_id], pattern(side, block_id)):
            raise SystemExit(f"block {block_id} is not the source's")
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


class HandOvers:
    """Requests that are prefilled in the other process and go on here."""

    def __init__(self, side: Side, process: subprocess.Popen[str]) -> None:
        self._side = side
        self._process = process
        self._arrivals = Arrivals(side.engine, side.transport, lambda source_id, num_blocks: 1.0)

    def row(self, num_tokens: int, num_rounds: int = NUM_REPEATS) -> dict[str, Any]:
        rounds = [self._one(f"{num_tokens}-{turn}", num_tokens) for turn in range(num_rounds)]
        equal = sum(each.pop("equal") for each in rounds)
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        return {"prompt": num_tokens, **medians, "same tokens": f"{equal:.0f}/{num_rounds}"}

    def _one(self, name: str, num_tokens: int) -> dict[str, float]:
        side = self._side
        rng = random.Random(name)
        tokens = [rng.randrange(1, side.config.vocab_size) for _ in range(num_tokens)]
        prefilled = self._ask(Prefill(name, tokens))
        grown = [*tokens, prefilled.first_token]
        sequence = side.sequence(name, grown, num_tokens, NUM_OUTPUT)
        begin_s = time.perf_counter()
        self._arrivals.admit(sequence, prefilled.ticket)
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
        while len(sequence.tokens) == num_tokens:
            for event in side.transport.poll():
                if isinstance(event, PullDone):
                    if event.error is not None:
                        raise SystemExit(f"a pull failed: {event.error}")
                    pull_s = event.seconds
                    self._arrivals.finish(event)
            self._arrivals.advance(time.time())
            if not side.engine.step():
                time.sleep(POLL_S)
        return pull_s

    def _ask(self, prefill: Prefill) -> Prefilled:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(prefill).decode() + "\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Prefilled)


def measure(device: torch.device, tiny: bool, out: Path, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    side = _side(READER, device, tiny)
    source = msgspec.json.decode(process.stdout.readline(), type=Peer)
    side.transport.add_peer(source)
    first_s = time_pull(side, source, [0])
    found: dict[str, Any] = {"machine": describe(device), "first_pull_ms": first_s * 1e3}
    found["pulls"] = time_pulls(side, source)
    print_table(found["pulls"])
    write_json(out, "gpu_transfer", found)  # kept should a hand-over break
    hand_overs = HandOvers(side, process)
    found["hand_overs"] = [hand_overs.row(length) for length in PROMPTS[device.type]]
    print_table(found["hand_overs"])
    write_json(out, "gpu_transfer", found)
    side.transport.close()


def main() -> None:
    arguments = parse_arguments(__doc__)
    device = torch.device(arguments.device)
    if arguments.serve:
        serve(_side(SOURCE, device, arguments.tiny))
        return
    flags = ["--serve", "--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu_transfer", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    try:
        measure(device, arguments.tiny, arguments.out, process)
    finally:
        process.stdin.close()
        process.wait(60)


if __name__ == "__main__":
    main()
