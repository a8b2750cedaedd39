"""Measures the gain of a second rank on a CPU, and how long ranks wait for each other.

    python -m bench.parallel [--shape 160m] [--ranks 2] [--rounds 3] [--tiny]

Engines in bf16 with random weights and one core a rank take turns: one rank, one rank with torch
instead of the compiled decode step (which several ranks do without), and several ranks. Ranks are
processes that talk by gloo, as in a worker. `prefill` is a prompt of 1,024 tokens. `N at once` are
decode steps of N sequences with 128 tokens in and 64 out. `exchanges` are the sums, gathers and
broadcasts of a step. `exchanging` is the share of the first rank's time in them, including the wait
for slower ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from bench.engine import write_checkpoint
from bench.report import ENOUGH_S, finish, print_table, take_turns
from bench.requests import greedy, new_request
from bench.shapes import SHAPES
from disagg.config import EngineConfig, ServeConfig, TierConfig
from disagg.engine.device.build import build_engine
from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence as Request
from disagg.models.communicator import Communicator
from disagg.models.description import describe_model
from disagg.models.share import Share
from disagg.worker.ranks import Ranks

CACHE_NBYTES = 256 << 20
NUM_IN, NUM_OUT = 128, 64
PROMPT = 1024


@dataclasses.dataclass
class Exchanged:
    """Of a communicator so far: calls, and seconds in them."""

    num_calls: int = 0
    seconds: float = 0.0


class TimedCommunicator:
    """A communicator, and how long it was busy."""

    def __init__(self, inner: Communicator, exchanged: Exchanged) -> None:
        self._inner, self._exchanged = inner, exchanged

    @property
    def share(self) -> Share:
        return self._inner.share

    def all_reduce_(self, x: Tensor) -> Tensor:
        with self._timed():
            return self._inner.all_reduce_(x)

    def largest_(self, x: Tensor) -> Tensor:
        with self._timed():
            return self._inner.largest_(x)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        with self._timed():
            return self._inner.gather(x, widths)

    def broadcast_(self, x: Tensor) -> Tensor:
        with self._timed():
            return self._inner.broadcast_(x)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._exchanged.seconds += time.perf_counter() - began_s
        self._exchanged.num_calls += 1


class TimedRanks(Ranks):
    """The ranks of a worker, and what the first one exchanged with them."""

    def __init__(self, config: ServeConfig, tier: TierConfig) -> None:
        super().__init__(config, tier, "bench", 1)
        self.exchanged = Exchanged()

    def meet(self, device_type: str) -> Communicator:
        return TimedCommunicator(super().meet(device_type), self.exchanged)


class Contender:
    """An engine, and what its counted steps took.

    num_steps, seconds, num_tokens: of the steps that count.
    exchanged: in these.
    """

    def __init__(self, engine: Engine, ranks: TimedRanks | None, vocab_size: int) -> None:
        self.engine = engine
        self._all = ranks.exchanged if ranks is not None else Exchanged()
        self._vocab_size = vocab_size
        self._num_requests = 0
        self.forget()

    def forget(self) -> None:
        self.num_steps, self.num_tokens, self.seconds = 0, 0, 0.0
        self.exchanged = Exchanged()

    def run(self, num_seqs: int, num_in: int, num_out: int) -> float:
        """Seconds a token: of the prompt if `num_out` is 1, else of the steps that only decode."""
        before_s, num_before = self.seconds, self.num_tokens
        for _ in range(num_seqs):
            self.engine.submit(self._request(num_in, num_out))
        while self.engine.has_work:
            was = dataclasses.replace(self._all)
            began_s = time.perf_counter()
            self.engine.step()
            seconds = time.perf_counter() - began_s
            plan = self.engine.last_plan
            if num_out == 1 or plan.num_decodes == num_seqs:
                self.num_steps += 1
                self.num_tokens += plan.num_new_tokens
                self.seconds += seconds
                self.exchanged.num_calls += self._all.num_calls - was.num_calls
                self.exchanged.seconds += self._all.seconds - was.seconds
        return (self.seconds - before_s) / (self.num_tokens - num_before)

    def _request(self, num_in: int, num_out: int) -> Request:
        self._num_requests += 1
        tokens = torch.randint(1, self._vocab_size, (num_in,)).tolist()
        block_size = self.engine.pool.block_size
        return Request(new_request(self._num_requests, tokens, greedy(num_out), block_size))


def contender(
    directory: Path, num_ranks: int, vocab_size: int, ends: ExitStack, *, is_compiled: bool = True
) -> Contender:
    """With a thread for each rank. is_compiled: decode steps of one rank."""
    model = describe_model(directory)
    config = EngineConfig(
        dtype="bfloat16",
        device="cpu",
        num_threads=num_ranks,
        kv_cache_memory_bytes=CACHE_NBYTES // num_ranks,
        tensor_parallel_size=num_ranks,
    )
    if num_ranks == 1:
        engine, _ = build_engine(config, model)
        if not is_compiled:
            assert isinstance(engine.runner, ModelRunner)
            engine.runner.decoder.step = None
        return Contender(engine, None, vocab_size)
    tier = TierConfig(model=str(directory), engine=config)
    ranks = TimedRanks(ServeConfig(tiers=(tier,), transport="local", cluster_key="bench"), tier)
    ends.callback(ranks.close)
    engine, _ = build_engine(
        msgspec.structs.replace(config, num_threads=ranks.num_threads),
        model,
        followers=ranks,
    )
    return Contender(engine, ranks, vocab_size)


def cases(scale: int) -> dict[str, tuple[int, int, int]]:
    """Requests at once, tokens in and tokens out."""
    found = {"prefill": (1, PROMPT // scale, 1)}
    for num_seqs in (1, 8, 32):
        found[f"{num_seqs} at once"] = (num_seqs, NUM_IN // scale, NUM_OUT // scale)
    return found


def row(
    case: str, sizes: tuple[int, int, int], contenders: dict[str, Contender], rounds: int
) -> dict[str, Any]:
    for each in contenders.values():
        each.forget()
    timed = {name: partial(each.run, *sizes) for name, each in contenders.items()}
    rates = {name: 1 / token_s for name, token_s in take_turns(timed, rounds, ENOUGH_S).items()}
    *alone, (last, many) = contenders.items()
    return {
        "case": case,
        **rates,
        **{f"of {name}": rates[last] / rates[name] for name, _ in alone},
        "exchanges a step": many.exchanged.num_calls / many.num_steps,
        "ms exchanging a step": 1e3 * many.exchanged.seconds / many.num_steps,
        "exchanging": many.exchanged.seconds / many.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="160m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    shape, rounds, scale = arguments.shape, arguments.rounds, 1
    if arguments.tiny:
        shape, rounds, scale = "tiny", 1, 8
    torch.set_num_threads(1)
    vocab_size = SHAPES[shape][0]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ends:
        directory = write_checkpoint(shape, Path(scratch))
        contenders = {
            "1 rank": contender(directory, 1, vocab_size, ends),
            "1 rank, torch": contender(directory, 1, vocab_size, ends, is_compiled=False),
            f"{arguments.ranks} ranks": contender(directory, arguments.ranks, vocab_size, ends),
        }
        rows = [row(*case, contenders, rounds) for case in cases(scale).items()]
    print_table(rows)
    finish("parallel", rows, unit="tokens/s", shape=shape, rounds=rounds)


if __name__ == "__main__":
    main()
