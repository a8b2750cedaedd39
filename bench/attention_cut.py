"""Counts what a step's attention is cut into on an H100: predicted work, no time.

    python -m bench.attention_cut [--tiny]

The kernel that cuts runs in Triton's interpreter if there is no GPU. "programs" are those of one
layer, over all KV heads; a device of 132 multiprocessors holds 396. "longest" is that of the
program with most keys, in tiles of 64, and so about the time of the layer; "ideal" is what it would
be if all keys were divided evenly. "partial MB" is written and read once more in a layer.
"""

from __future__ import annotations

import argparse
import os
from itertools import accumulate
from typing import Any, NamedTuple

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from bench.report import finish, print_table
from disagg.kernels.gpu.attention_work import (
    KEY_TILE,
    LONG_ROWS,
    MAX_SHORT_ROWS,
    attention_work,
)
from disagg.kernels.gpu.latent_attention import LONG_ROWS as LATENT_ROWS

NUM_PROGRAMS = 132 * 3


class Shape(NamedTuple):
    """group: query heads of a program; num_groups: programs of a piece."""

    group: int
    num_groups: int
    value_dim: int
    long_rows: int = LONG_ROWS


SHAPES = {
    "Llama-3-8B": Shape(4, 8, 128),
    "Qwen3-32B, rank of 4": Shape(8, 2, 128),
    "Llama-3-70B, rank of 8": Shape(8, 1, 128),
    "DeepSeek-V3, rank of 8": Shape(16, 1, 512, LATENT_ROWS),
}
DECODES = [(1, 4096)] * 32
# New tokens of each sequence, and those with KV before.
STEPS = {
    "1 after 30,000": [(1, 30_000)],
    "16 after 30,000": [(16, 30_000)],
    "200 after 30,000": [(200, 30_000)],
    "2,048 after 30,000": [(2048, 30_000)],
    "8,192 after 0": [(8192, 0)],
    "200 after 30,000 beside 32 decodes of 4k": [*DECODES, (200, 30_000)],
    "64 decodes, one of 100,000": [(1, 1000)] * 63 + [(1, 100_000)],
}


def measure(name: str, step: str) -> dict[str, Any]:
    shape, lens = SHAPES[name], STEPS[step]
    query_lens = [new for new, _ in lens]
    short = max((n for n in query_lens if n * shape.group <= MAX_SHORT_ROWS), default=0)
    num_programs = NUM_PROGRAMS // shape.num_groups
    work = attention_work(
        len(lens),
        sum(query_lens),
        shape.group,
        None,
        num_programs,
        DEVICE,
        short_queries=short,
        has_long=max(query_lens) > short,
        long_rows=shape.long_rows,
    )
    starts = torch.tensor([*accumulate(query_lens, initial=0)], dtype=torch.int32)
    contexts = torch.tensor([new + cached for new, cached in lens], dtype=torch.int32)
    work.cut(starts.to(DEVICE), contexts.to(DEVICE), sum(query_lens))
    nums_tiles, partial_nbytes = [], 0
    for launch in work.launches:
        num_first, num_last, _, num_partials = launch.counts.tolist()
        pieces = launch.pieces.tolist()
        for *_, start, end, _ in pieces[:num_first] + pieces[len(pieces) - num_last :]:
            nums_tiles.append(-(-(end - start) // KEY_TILE))
        partial_nbytes += num_partials * launch.rows * (shape.value_dim + 1) * 4
    return {
        "model": name,
        "step": step,
        "programs": len(nums_tiles) * shape.num_groups,
        "longest": max(nums_tiles),
        "ideal": round(sum(nums_tiles) / num_programs, 1),
        "partial MB": round(partial_nbytes * shape.num_groups / 1e6, 2),
    }


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="one model")
    names = list(SHAPES)[-2:-1] if parser.parse_args().tiny else SHAPES
    rows = [measure(name, step) for name in names for step in STEPS]
    print_table(rows)
    finish("attention_cut", rows, num_programs=NUM_PROGRAMS)


if __name__ == "__main__":
    main()
