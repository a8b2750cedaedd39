"""Measures what a GPU decode step costs its host: microseconds for each part, without a GPU.

    python -m bench.host_step [--block-size 64] [--tiny]

The real engine launches each step before it reads the last one, with the real batches and the real
sampler with the defaults of a model family. Kernels do nothing, so tokens mean nothing.

- `scheduler`: plans and results.
- `batch`: what the device is told, and the tensors made of it, with torch's calls on a CPU.
- `sampler`: all calls that choose tokens, and reading the tokens.
- `together`: CPU time of the process, the mean of all steps; it is divided among the parts in
  proportion to their wall time.

The launch of a graph is not included.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bench.report import finish, print_table
from bench.requests import FAMILIES, new_request
from disagg.engine.device.batching import Batching
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Choose, Sampled, StepPlan
from disagg.messages import SamplingParams

MAX_MODEL_LEN = 1 << 15
NUM_BLOCKS = 1 << 16
NUM_STEPS = 256
PROMPT = 129


class Host:
    """A runner whose device computes nothing. Times are in seconds, of all steps."""

    def __init__(self, max_num_seqs: int, block_size: int, vocab_size: int) -> None:
        from disagg.kernels.gpu.sampling import TritonSampling

        cpu = torch.device("cpu")
        self.batch_s = self.sampler_s = 0.0
        self._slots = Slots(max_num_seqs)
        self._batching = Batching(
            self._slots, block_size, MAX_MODEL_LEN // block_size, cpu, use_kernel=True
        )
        self._sampler = Sampler(self._slots, vocab_size, cpu, TritonSampling(), MAX_MODEL_LEN)
        self._logits = torch.zeros(max_num_seqs, vocab_size)

    def run(self, plan: StepPlan) -> list[Sampled]:
        """A prompt's chunk, outside of what is timed."""
        lens = zip(plan.sequences, plan.query_lens, strict=True)
        return [7 if each.num_uncomputed == query_len else None for each, query_len in lens]

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Choose:
        if plan.num_decodes < len(plan.sequences):
            return lambda: partial(self.run, plan)
        began_s = time.perf_counter()
        entered = [] if plan.continues else self._slots.enter(plan.sequences)
        batch, slots = self._batching.batch(self._batching.inputs(plan, entered))
        batched_s = time.perf_counter()
        self._sampler.enter([sequence.slot for sequence in entered])
        chosen = self._sampler.sample(
            self._logits[: len(plan.sequences)],
            plan.sequences,
            batch.positions,
            num_unread=plan.num_unread,
        )
        sampled_s = time.perf_counter()
        self._batching.remember(slots, chosen.token_ids)
        self.batch_s += batched_s - began_s + time.perf_counter() - sampled_s
        self.sampler_s += sampled_s - batched_s

        def read() -> list[Sampled]:
            began_s = time.perf_counter()
            tokens: list[Sampled] = [*chosen.sampled()]
            self.sampler_s += time.perf_counter() - began_s
            return tokens

        return lambda: read


@contextmanager
def kernels_that_do_nothing() -> Iterator[list[str]]:
    """What the GPU's path launches, by name; results are whatever memory holds, and token 0."""
    from triton import JITFunction

    launched: list[str] = []
    run = JITFunction.run

    def launch(self: Any, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> None:
        launched.append(self.fn.__name__)
        if self.fn.__name__ == "_pick_kernel":
            arguments[6].zero_()

    JITFunction.run = launch
    try:
        yield launched
    finally:
        JITFunction.run = run


def measure(family: str, num_seqs: int, block_size: int, num_steps: int) -> dict[str, Any]:
    vocab_size, defaults = FAMILIES[family]
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, block_size, array("Q", bytes(8 * NUM_BLOCKS))),
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
    )
    host = Host(num_seqs, block_size, vocab_size)
    engine = Engine(scheduler, host)
    engine.launcher = host
    for number in range(num_seqs):
        # Blocks begin in all steps alike, as they do where requests come one by one.
        tokens = [number + 8] * (PROMPT + number % block_size)
        sampling = SamplingParams(max_tokens=2 * num_steps + 8, seed=number, **defaults)
        engine.submit(Sequence(new_request(number, tokens, sampling, block_size)))
    while engine.scheduler.waiting or not engine.last_plan.num_unread:
        engine.step()
    host.batch_s = host.sampler_s = 0.0
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        engine.step()
        engine.pool.take_events()
    cpu_us = 1e6 / num_steps * (time.process_time() - cpu_began_s)
    passed_s = time.perf_counter() - began_s
    assert engine.last_plan.num_unread == num_seqs
    scheduler_s = passed_s - host.batch_s - host.sampler_s
    return {
        "defaults of": family,
        "sequences": num_seqs,
        "scheduler us": scheduler_s / passed_s * cpu_us,
        "batch us": host.batch_s / passed_s * cpu_us,
        "sampler us": host.sampler_s / passed_s * cpu_us,
        "together us": cpu_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-size", type=int, default=64, help="64 is the default of a GPU")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    nums_seqs, num_steps = ((2,), 8) if arguments.tiny else ((1, 32, 256), NUM_STEPS)
    with kernels_that_do_nothing():
        rows = [
            measure(family, num_seqs, arguments.block_size, num_steps)
            for num_seqs in nums_seqs
            for family in FAMILIES
        ]
    print_table(rows)
    finish("host_step", rows, block_size=arguments.block_size)


if __name__ == "__main__":
    main()
