"""Measures one layer of experts, as a share of the hardware's limits and beside a dense layer.

    python -m bench.experts [--out build/gpu] [--only qwen3]
    python -m bench.experts --device cpu                       # as a CPU computes them
    TRITON_INTERPRET=1 python -m bench.experts --device cpu --tiny     # a rehearsal of the kernels

`dense us` is the time of a dense MLP that multiplies a token with as many weights. On a CPU this
MLP is also as large as a layer whose tokens share all experts. On a GPU, times are those of
replayed graphs over so many layers that nothing is left in the L2. `of read` is the rate at which
the weights of the chosen experts were read, as a share of the measured bandwidth. A row of whole
experts has the busiest rank, because the other ranks wait for it.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_device import UNCACHED_NBYTES, Ceilings, near, seconds
from bench.gpu_packed import FORMATS as OF_LAYERS
from bench.gpu_packed import Format, random_packed
from bench.gpu_rows import Row, parser_of, run_part
from disagg.kernels import reference
from disagg.kernels.dispatch import ops_for
from disagg.kernels.grouping import Grouping
from disagg.kernels.ops import Experts, Ops
from disagg.kernels.packed_sizes import EIGHT_BIT_ROWS, MXFP4_GROUP

FORMATS = {**OF_LAYERS, "mxfp4": Format("mxfp4", MXFP4_GROUP)}
TOLERANCE = 2e-2  # of the largest value
NUM_CHECKED = 8  # tokens whose results are compared with the reference


@dataclass(frozen=True)
class Shape:
    """num_ranks: which have whole experts, as many each; the layer is one rank's."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    format: str = "floats"  # or of `FORMATS`
    grouping: Grouping | None = None
    num_ranks: int = 1

    def busiest(self, chosen: Tensor) -> range | None:
        """The experts of the rank that has most of those that are chosen; None: of one rank."""
        if self.num_ranks == 1:
            return None
        size = self.num_experts // self.num_ranks
        counts = chosen.flatten().bincount(minlength=self.num_experts).view(self.num_ranks, size)
        first = size * int((counts > 0).sum(1).argmax())
        return range(first, first + size)


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, "mxfp4"),
    "qwen3-30b-a3b int4": Shape(128, 8, 2048, 768, "int4 g128"),
    "qwen3-235b-a22b fp8": Shape(128, 8, 4096, 1536, "fp8 blocks"),
    "qwen3-235b-a22b fp8 in 8 bits": Shape(128, 8, 4096, 1536, "fp8 blocks in 8 bits"),
    "qwen3-235b-a22b nvfp4": Shape(128, 8, 4096, 1536, "nvfp4"),
    # On one of eight ranks, which has an eighth of every expert.
    "deepseek-v3 fp8": Shape(256, 8, 7168, 256, "fp8 blocks", Grouping(8, 4, True, 2.5)),
    "deepseek-v3 fp8 whole": Shape(256, 8, 7168, 2048, "fp8 blocks", Grouping(8, 4, True, 2.5), 8),
}
ON_A_CPU = {"small": Shape(16, 4, 768, 512)}
INTERPRETED = {
    **{
        name: Shape(4, 2, 64, 64, name)
        for name in ("floats", "mxfp4", "int4 g32", "fp8 blocks", "nvfp4")
    },
    "by groups": Shape(8, 2, 64, 64, grouping=Grouping(4, 2, True, 2.5)),
    "whole": Shape(8, 2, 64, 64, num_ranks=2),
}
NUM_TOKENS = (1, 32, 256, 4096)


class Bench:
    """The device, what it gives, and its operations."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.ceilings = Ceilings.of(arguments)
        self.is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.dtype = torch.float32 if self.is_interpreted else torch.bfloat16
        self._generator = torch.Generator(self.device)

    def shapes(self) -> dict[str, Shape]:
        if self.is_interpreted:
            return INTERPRETED
        return SHAPES if self.device.type == "cuda" else ON_A_CPU

    def ops(self) -> Ops:
        if not self.is_interpreted:
            return ops_for(self.device, 1)
        from disagg.kernels.gpu.ops import TritonOps

        return TritonOps(1, 1)

    def layer(self, shape: Shape, num_tokens: int) -> dict[str, Any]:
        self._generator.manual_seed(0)  # a row is the same without those before it
        ops = self.ops()
        is_gpu = self.device.type == "cuda"
        x = self._random(num_tokens, shape.hidden)
        logits = self._random(num_tokens, shape.num_experts)
        logits = logits if shape.grouping is None else logits.float()  # as routers give them
        matrices = self._grouped(shape)
        _, chosen = reference.choose(logits, matrices)
        matrices = replace(matrices, own=shape.busiest(chosen))
        alike: dict[str, Any] = {"own": matrices.own, "score_bias": matrices.score_bias}
        nbytes = matrices.gate_up.nbytes + matrices.down.nbytes
        num_layers = max(1, round(UNCACHED_NBYTES / nbytes)) if is_gpu else 1
        layers = [ops.pack_experts(matrices)]
        others = (replace(self._grouped(shape), **alike) for _ in range(num_layers - 1))
        layers += [ops.pack_experts(each) for each in others]
        difference = self._difference(ops.mix_experts(x, logits, layers[0]), x, logits, matrices)

        def mix() -> None:
            for layer in layers:
                ops.mix_experts(x, logits, layer)

        taken_s = seconds(mix, self.device) / num_layers
        pairs = [expert for expert in chosen.flatten().tolist() if expert in matrices.held]
        hit = len(set(pairs))
        read = hit / len(matrices.held) * nbytes / taken_s
        flops = 6 * len(pairs) * shape.hidden * shape.inner / taken_s
        return {
            "us": taken_s * 1e6,
            "dense us": self._dense_s(ops, shape, x) * 1e6,
            "experts hit": hit,
            **self.ceilings.reading(read),
            "TFLOP/s": flops / 1e12,
            "difference": difference,
        }

    def _dense_s(self, ops: Ops, shape: Shape, x: Tensor) -> float:
        inner = shape.num_chosen * shape.inner // shape.num_ranks
        count = 1
        if self.device.type == "cuda":
            count = max(
                1, round(UNCACHED_NBYTES / (3 * shape.hidden * inner * self.dtype.itemsize))
            )
        layers = [
            (
                ops.pack_gated(self._random(2 * inner, shape.hidden), None),
                ops.pack(self._random(shape.hidden, inner), None),
            )
            for _ in range(max(1, min(count, 64)))
        ]

        def run() -> None:
            for gate_up, down in layers:
                ops.project(ops.project_gated(x, gate_up), down)

        return seconds(run, self.device) / len(layers)

    def _grouped(self, shape: Shape) -> Experts:
        """Chosen as the shape says."""
        if shape.grouping is None:
            return self._experts(shape)
        drawn = torch.randn(shape.num_experts, generator=self._generator, device=self.device)
        return replace(self._experts(shape), grouping=shape.grouping, score_bias=0.1 * drawn)

    def _experts(self, shape: Shape) -> Experts:
        count, hidden, inner = shape.num_experts // shape.num_ranks, shape.hidden, shape.inner
        numbers = self.dtype, shape.num_experts, shape.num_chosen
        if shape.format == "floats":
            gate_up = self._random(count, 2 * inner, hidden) / hidden**0.5
            down = self._random(count, hidden, inner) / inner**0.5
            return Experts(gate_up, down, *numbers, is_normalized=True)
        how = FORMATS[shape.format], self.dtype, self._generator
        gate_up = random_packed((count * 2 * inner, hidden), *how)
        down = random_packed((count * hidden, inner), *how)
        experts = Experts(gate_up, down, *numbers, is_normalized=True)
        if shape.format != "mxfp4":
            return experts
        return replace(  # as gpt-oss has them
            experts,
            gate_up_bias=self._random(count, 2 * inner),
            down_bias=self._random(count, hidden),
            limit=7.0,
            alpha=1.702,
        )

    def _difference(self, found: Tensor, x: Tensor, logits: Tensor, matrices: Experts) -> float:
        """Of some tokens, from the reference, as a share of the largest value."""
        few = slice(0, NUM_CHECKED)
        num_pairs = len(x) * matrices.num_chosen
        in_8_bits = num_pairs // matrices.num_experts >= EIGHT_BIT_ROWS
        wanted = reference.mix_experts(x[few], logits[few], matrices, in_8_bits=in_8_bits)
        return near(found[few], wanted, TOLERANCE)

    def _random(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self.device)
        return drawn.to(self.dtype)


def rows_of(bench: Bench, num_tokens: tuple[int, ...]) -> list[Row]:
    return [
        Row(f"{name}, {count} tokens", partial(bench.layer, shape, count))
        for count in num_tokens
        for name, shape in bench.shapes().items()
    ]


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    bench = Bench(arguments)
    small = arguments.tiny or bench.is_interpreted
    run_part("experts", rows_of(bench, (1, 20) if small else NUM_TOKENS), arguments)


if __name__ == "__main__":
    main()
