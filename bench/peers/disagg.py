"""Our engine: `python -m bench.peers.disagg CHECKPOINT THREADS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bench.engine import Ours
from bench.peers.turns import Generate, answer


def load() -> Generate:
    checkpoint, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    return Ours(Path(checkpoint), int(threads))


if __name__ == "__main__":
    answer(load)
