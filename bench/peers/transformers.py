"""transformers: `python -m bench.peers.transformers CHECKPOINT THREADS static|continuous`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bench.engine import ContinuousBatching, static_batch
from bench.peers.turns import Generate, answer


def load() -> Generate:
    checkpoint, threads, batching = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if batching == "static":
        return static_batch(Path(checkpoint))
    return ContinuousBatching(Path(checkpoint))


if __name__ == "__main__":
    answer(load)
