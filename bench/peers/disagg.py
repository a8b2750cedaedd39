"""Our engine: `python -m bench.peers.disagg CHECKPOINT THREADS [auto]`.

It computes in bf16 like the others; with `auto` in the format that the machine multiplies well.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bench.engine import Ours
from bench.peers.turns import Generate, answer


def load() -> Generate:
    checkpoint, threads, *auto = sys.argv[1:]
    torch.set_num_threads(int(threads))
    return Ours(Path(checkpoint), int(threads), "auto" if auto else "bfloat16")


if __name__ == "__main__":
    answer(load)
