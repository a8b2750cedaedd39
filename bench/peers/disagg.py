"""Our engine: `python -m bench.peers.disagg CHECKPOINT THREADS [auto]`.

It computes in bf16 like the others; with `auto` in the format that the machine multiplies well.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bench.peers.limits import CACHE_NBYTES
from bench.peers.turns import Generate, Prompts, answer
from bench.requests import greedy, new_request
from disagg.config import DType, EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.sched.sequence import Sequence
from disagg.models.description import describe_model


class Ours:
    """The engine of a worker, without the worker."""

    def __init__(self, directory: Path, threads: int, dtype: DType = "bfloat16") -> None:
        config = EngineConfig(
            dtype=dtype,
            device="cpu",
            num_threads=threads,
            kv_cache_memory_bytes=CACHE_NBYTES,
        )
        self.engine, _ = build_engine(config, describe_model(directory))
        self._threads = threads
        self._num_requests = 0

    def __call__(self, prompts: Prompts, num_new: int) -> list[list[int]]:
        sequences = [self._sequence(prompt, num_new) for prompt in prompts]
        for sequence in sequences:
            self.engine.submit(sequence)
        while self.engine.has_work:
            self.engine.step()
        torch.set_num_threads(self._threads)  # small steps lower it, and others come next
        return [sequence.tokens[sequence.num_prompt_tokens :] for sequence in sequences]

    def _sequence(self, prompt: list[int], num_new: int) -> Sequence:
        self._num_requests += 1
        block_size = self.engine.pool.block_size
        return Sequence(new_request(self._num_requests, prompt, greedy(num_new), block_size))


def load() -> Generate:
    checkpoint, threads, *auto = sys.argv[1:]
    torch.set_num_threads(int(threads))
    return Ours(Path(checkpoint), int(threads), "auto" if auto else "bfloat16")


if __name__ == "__main__":
    answer(load)
