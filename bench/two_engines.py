"""Two engines with equal random weights in two processes, connected by NIXL.

The source prefills prompts and issues tickets. The reader pulls blocks and goes on decoding.
`gpu_transfer` and `hand_over` share this.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import torch

from bench.gpu_device import synchronize
from bench.gpu_models import new_engine, new_sequence
from bench.shapes import model_config
from disagg.engine.sched.sequence import Sequence
from disagg.kvtransfer.slab import Slab, Stamps, first_generation
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.worker.kv_export import KVExport
from disagg.worker.kv_import import KVImport

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

    def __init__(
        self,
        name: str,
        device: torch.device,
        shape: str,
        num_blocks: int,
        dtype: torch.dtype = torch.bfloat16,
        block_size: int | None = None,
    ) -> None:
        from disagg.kvtransfer.nixl_transport import NixlTransport  # may not be installed
        from disagg.kvtransfer.ucx import LOOPBACK

        self.device, self.shape = device, shape
        made: list[Stamps] = []

        def new_generations(num_blocks: int) -> Any:
            made.append(Stamps(num_blocks, name, EPOCH))
            return made[0].generations

        self.config = model_config(shape)
        self.engine, self.kv_cache = new_engine(
            self.config,
            device,
            num_blocks,
            block_size=block_size,
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
        self.transport = NixlTransport(
            name,
            EPOCH,
            slab,
            made[0],
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

    def row(self, num_tokens: int, num_rounds: int = NUM_REPEATS) -> dict[str, Any]:
        rounds = [self._one(f"{num_tokens}-{turn}", num_tokens) for turn in range(num_rounds)]
        equal = sum(each.pop("equal") for each in rounds)
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        same = f"{equal:.0f}/{num_rounds}"
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
