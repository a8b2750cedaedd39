"""Checks that a GPU chooses the same tokens as a CPU, and measures what sampling costs a step.

    python -m bench.gpu_sampling [--out build/gpu]
    TRITON_INTERPRET=1 python -m bench.gpu_sampling --device cpu      # a rehearsal

Sampling parameters are the defaults of three model families, and all parameters at once. `us` is a
step's time, including all that the host gives the device, until its result is read. `host us` is
the time until the host has given it.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import Any

import torch

from bench.gpu_device import eager_seconds, launch_seconds
from bench.gpu_rows import Row, parser_of, run_part
from bench.requests import FAMILIES, new_sequences
from disagg.engine.device.sampler import Chosen, Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.errors import InvalidLogits
from disagg.kernels.gpu.sampling import TritonSampling
from disagg.kernels.sampling_rows import SamplingOps
from disagg.kernels.torch.sampling import TorchSampling

EVERY = {
    "temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02,
    "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": -0.2,
}  # fmt: skip
GREEDY = {"temperature": 0.0}
NUM_ROWS, NUM_STEPS, CONTEXT = 32, 8, 300
CPU_ROWS, CPU_STEPS, CPU_VOCAB = 6, 3, 1357  # what the interpreter can bear
# Of a thousand tokens one may be another: logarithms may differ in their last bit.
MOST_DIFFERENT = 1e-3
TIMED_ROWS = [32, 256]


class Chooser:
    """A sampler with sequences of its own."""

    def __init__(
        self,
        ops: SamplingOps,
        device: torch.device,
        num_rows: int,
        vocab_size: int,
        params: dict[str, Any],
    ) -> None:
        slots = Slots()
        self.device = device
        self.sequences: list[Sequence] = new_sequences(num_rows, vocab_size, CONTEXT, params)
        self.sampler = Sampler(slots, vocab_size, device, ops)
        self.sampler.enter([sequence.slot for sequence in slots.enter(self.sequences)])

    def choose(self, logits: torch.Tensor, position: int) -> list[int]:
        """Tokens; does not go on with them. `logits` are not consumed."""
        return [each.token_id for each in self._sample(logits, position).read()]

    def has_none(self, logits: torch.Tensor, position: int) -> list[bool]:
        """The rows from which no token can be chosen."""
        chosen = self._sample(logits, position).sampled()
        return [isinstance(each, InvalidLogits) for each in chosen]

    def _sample(self, logits: torch.Tensor, position: int) -> Chosen:
        positions = torch.full((len(self.sequences),), position, device=self.device)
        own = logits.to(self.device, torch.float32, copy=True)
        return self.sampler.sample(own, self.sequences, positions)


def compare(device: torch.device, vocab_size: int, params: dict[str, Any]) -> dict[str, Any]:
    """Tokens of some steps. Logits are those of bf16 models, in which many are equal."""
    is_cpu = device.type == "cpu"
    num_rows, num_steps = (CPU_ROWS, CPU_STEPS) if is_cpu else (NUM_ROWS, NUM_STEPS)
    both = [
        Chooser(ops, place, num_rows, vocab_size, params)
        for ops, place in ((TorchSampling(), torch.device("cpu")), (TritonSampling(), device))
    ]
    generator = torch.Generator().manual_seed(2)
    num_equal = 0
    for step in range(num_steps):
        logits = torch.randn(num_rows, vocab_size, generator=generator).mul_(3).bfloat16()
        by_cpu, by_device = (each.choose(logits, CONTEXT - 1 + step) for each in both)
        num_equal += sum(map(int.__eq__, by_cpu, by_device))
        for each in both:  # go on with the same
            for sequence, token_id in zip(each.sequences, by_cpu, strict=True):
                sequence.tokens.append(token_id)
    num_tokens = num_rows * num_steps
    if num_tokens - num_equal > num_tokens * MOST_DIFFERENT:
        raise ArithmeticError(f"{num_equal} of {num_tokens} tokens are those that a CPU chooses")
    return {"tokens": num_tokens, "equal": num_equal}


def find_invalid(device: torch.device, vocab_size: int, params: dict[str, Any]) -> dict[str, Any]:
    """Rows with NaN or infinity at one place or at all, each beside a sound one.

    The interpreter has another `argmax` than the compiler, so only a GPU shows that this holds.
    """
    places = {"first": slice(0, 1), "last": slice(vocab_size - 1, vocab_size), "all": slice(None)}
    kinds = [(strange, at) for strange in (math.nan, math.inf) for at in places.values()]
    kinds.append((-math.inf, slice(None)))
    logits = torch.randn(2 * len(kinds), vocab_size)
    for row, (strange, place) in enumerate(kinds):
        logits[2 * row, place] = strange
    chooser = Chooser(TritonSampling(), device, len(logits), vocab_size, params)
    found = chooser.has_none(logits, CONTEXT - 1)
    if found != [True, False] * len(kinds):
        raise ArithmeticError(f"of rows of which every other is invalid, these are: {found}")
    return {"invalid": len(kinds)}


def measure(
    device: torch.device, num_rows: int, vocab_size: int, params: dict[str, Any]
) -> dict[str, Any]:
    chooser = Chooser(TritonSampling(), device, num_rows, vocab_size, params)
    logits = torch.randn(num_rows, vocab_size, device=device)
    positions = torch.full((num_rows,), CONTEXT - 1, device=device)

    def sample() -> None:
        chooser.sampler.sample(logits, chooser.sequences, positions)

    device_s = eager_seconds(sample, device)
    host_s = launch_seconds(sample, device)
    begin_s = time.perf_counter()
    chooser.choose(logits, CONTEXT - 1)
    return {
        "us": device_s * 1e6,
        "host us": host_s * 1e6,
        "alone, read us": (time.perf_counter() - begin_s) * 1e6,
    }


def rows_of(arguments: argparse.Namespace) -> list[Row]:
    device = torch.device(arguments.device)
    is_cpu = device.type == "cpu"
    cases = {name: (vocab, params) for name, (vocab, params) in FAMILIES.items()}
    cases["every parameter"] = (128_256, EVERY)
    if is_cpu:
        cases = {name: (CPU_VOCAB, params) for name, (_, params) in cases.items()}
    rows = [
        Row(f"tokens, {name}", partial(compare, device, *each), 60.0)
        for name, each in cases.items()
    ]
    vocab, _ = cases["every parameter"]
    rows += [
        Row(f"invalid logits, {name}", partial(find_invalid, device, vocab, params), 60.0)
        for name, params in (("greedy", GREEDY), ("every parameter", EVERY))
    ]
    if arguments.tiny:
        return rows[-3:]
    rows += [
        Row(f"step of {num}, {name}", partial(measure, device, 2 if is_cpu else num, *each))
        for num in TIMED_ROWS
        for name, each in cases.items()
    ]
    return rows


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    run_part("gpu_sampling", rows_of(arguments), arguments)


if __name__ == "__main__":
    main()
