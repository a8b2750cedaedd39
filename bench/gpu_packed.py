"""Measures products with packed weights on a GPU, beside cuBLAS with the same weights in bf16.

    python -m bench.gpu_packed [--out build/gpu] [--only "int4 g128"]
    TRITON_INTERPRET=1 python -m bench.gpu_packed --device cpu      # a rehearsal

A row has all four matrices of a layer, fused as in an engine, over so many layers that nothing is
left in the L2. Times are those of replayed graphs. `predicted us` is the longer of two times: to
read the packed bytes at the measured bandwidth, and to multiply at the measured rate. `of
predicted` is the share of it that was reached. `cuBLAS us` is the same layer in bf16. `widened us`
is a layer that is widened into memory before each product, as some programs do for prompts. Each
row compares a part of its results with the reference. Rows of formats "in 8 bits" quantise their
activations; `scaled_mm us` is torch's own product of the same numbers.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu_device import UNCACHED_NBYTES, Ceilings, near, seconds
from bench.gpu_rows import Absent, Row, parser_of, run_part
from disagg.kernels import reference
from disagg.kernels.gpu.eight_bit_tile import quantize_rows
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.packed_matrix import PackedMatrix, pack_scales
from disagg.kernels.packed_sizes import (
    BITS,
    EIGHT_BIT_ROWS,
    FP4_KINDS,
    NVFP4_GROUP,
    UNIT_BITS,
    Kind,
    part_size,
)

TOLERANCE = 1.6e-2  # of the largest value
NUM_CHECKED = 4  # rows of `x`
MOST_MATRICES = 32


class Format(NamedTuple):
    """in_8_bits: whether activations are quantised for steps of many rows."""

    kind: Kind
    group: int | None = None
    has_zeros: bool = False
    in_8_bits: bool = False


FORMATS = {
    "int4 g128": Format("int4", 128, True),  # AWQ, GPTQ
    "fp8 rows": Format("fp8"),
    "fp8 blocks": Format("fp8", 128),
    "int8 rows": Format("int8"),
    "int4 g32": Format("int4", 32, True),  # --quantization int4
    "fp8 rows in 8 bits": Format("fp8", in_8_bits=True),
    "fp8 blocks in 8 bits": Format("fp8", 128, in_8_bits=True),
    "int8 rows in 8 bits": Format("int8", in_8_bits=True),
    "nvfp4": Format("nvfp4", NVFP4_GROUP),
}
OF_LARGE_MODELS = ("int4 g128", "fp8 blocks", "nvfp4")
NUM_ROWS = (1, 16, 4096, 32, 128, EIGHT_BIT_ROWS)


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128

    def matrices(self) -> list[tuple[int, int]]:
        heads = self.num_heads * self.head_dim
        return [
            (heads + 2 * self.num_kv_heads * self.head_dim, self.hidden),
            (self.hidden, heads),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]


SHAPES = {"llama-3-8b": Shape(4096, 14336, 32, 8), "qwen3-32b": Shape(5120, 25600, 64, 8)}
INTERPRETED = {"tiny": Shape(64, 96, 4, 2, 16)}


def random_packed(
    shape: tuple[int, int], format: Format, dtype: torch.dtype, generator: torch.Generator
) -> PackedMatrix:
    """On the generator's device, with scales of `dtype`, or of FP4."""
    (num_out, num_in), (kind, group, has_zeros, in_8_bits) = shape, format

    def integers(limit: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.randint(
            -limit, limit, shape, generator=generator, device=generator.device, dtype=dtype
        )

    chunk = part_size(kind, group) * UNIT_BITS // BITS[kind]
    num_units = -(-num_in // chunk) * chunk * BITS[kind] // UNIT_BITS
    num_groups = 1 if group is None else -(-num_in // group)
    # Of e4m3 no exponent that could make NaN: bit 6 of each number is 0.
    units = integers(1 << 15, (num_out, num_units), torch.int16)
    units &= -0x4041 if kind == "fp8" else -1
    scales = torch.full((num_groups, num_out), 1e-3, device=generator.device).to(dtype)
    zeros = integers(8, (num_groups, num_out), torch.int8) if has_zeros else None
    input_scale, row_scales = 0.0 if in_8_bits else None, None
    if kind in FP4_KINDS:
        # From 2^-9 to 2^-7 of e8m0; of e4m3 from 2^-5 to nearly 2^-2, and 2^-5 more.
        low, high = (118, 121) if kind == "mxfp4" else (16, 40)
        how: dict[str, Any] = {"generator": generator, "device": generator.device}
        scales = torch.randint(low, high, scales.shape, dtype=torch.uint8, **how)
        scales = pack_scales(scales)
    if kind == "nvfp4":
        row_scales = torch.full((num_out,), 2.0**-5, device=generator.device)
    more: dict[str, Any] = {"input_scale": input_scale, "row_scales": row_scales}
    return PackedMatrix(kind, num_in, group, units, scales, zeros, **more)


class Bench:
    """The device, and what it gives."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.ceilings = Ceilings.of(arguments)
        self.is_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        count, capability = 2, (9, 0)
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            count = properties.multi_processor_count
            capability = properties.major, properties.minor
        self.ops = TritonOps(1, count, capability=capability)
        self._generator = torch.Generator(self.device).manual_seed(0)
        self._cublas_us: dict[tuple[Shape, int], float] = {}

    def shapes(self) -> dict[str, Shape]:
        return SHAPES if self.is_gpu else INTERPRETED

    def layer(self, shape: Shape, format: Format, num_rows: int) -> dict[str, Any]:
        """Microseconds of the four matrices."""
        if format.in_8_bits and format.kind == "fp8" and not self.is_gpu:
            raise Absent("Triton's interpreter rounds to e4m3 wrongly")
        taken_s = nbytes = flops = widened_s = scaled_s = 0.0
        difference = 0.0
        for num_out, num_in in shape.matrices():
            weights = [self._packed(num_out, num_in, format)]
            x = self._random(num_rows, num_in)
            count = self._count(weights[0].nbytes)
            weights += [self._packed(num_out, num_in, format) for _ in range(count - 1)]
            difference = max(difference, self._difference(x, weights[0]))
            products = [self.ops.pack(each, None) for each in weights]
            taken_s += self._seconds(products, x)
            nbytes += weights[0].nbytes
            flops += 2.0 * num_rows * num_out * num_in
            if num_rows > NUM_ROWS[1] and self.is_gpu:
                widened_s += self._widened_s(weights, x)
            if format == FORMATS["fp8 rows in 8 bits"] and self.is_gpu:
                scaled_s += self._scaled_s(weights, x)
        predicted_s = None
        if self.ceilings.read and self.ceilings.matmul:
            predicted_s = max(nbytes / self.ceilings.read, flops / self.ceilings.matmul)
        return {
            "us": taken_s * 1e6,
            "cuBLAS us": self._cublas(shape, num_rows),
            "widened us": widened_s * 1e6 or None,
            "scaled_mm us": scaled_s * 1e6 or None,
            "predicted us": predicted_s and predicted_s * 1e6,
            "of predicted": predicted_s and predicted_s / taken_s,
            **self.ceilings.reading(nbytes / taken_s),
            "TFLOP/s": flops / taken_s / 1e12,
            "MB": nbytes / 1e6,
            "difference": difference,
        }

    def _cublas(self, shape: Shape, num_rows: int) -> float:
        """Once for all formats."""
        key = shape, num_rows
        if key not in self._cublas_us:
            taken_s = 0.0
            for num_out, num_in in shape.matrices():
                count = self._count(num_out * num_in * self.dtype.itemsize)
                weights = [self._random(num_out, num_in) for _ in range(count)]
                products = [self.ops.pack(each, None) for each in weights]
                taken_s += self._seconds(products, self._random(num_rows, num_in))
            self._cublas_us[key] = taken_s * 1e6
        return self._cublas_us[key]

    def _seconds(self, products: list[Any], x: Tensor) -> float:
        def run() -> None:
            for product in products:
                product(x)

        return seconds(run, self.device, num_timed=10) / len(products)

    def _widened_s(self, weights: list[PackedMatrix], x: Tensor) -> float:
        """By torch's own operations, which read and write more than one kernel would."""
        few = weights[:2]

        def run() -> None:
            for weight in few:
                torch.nn.functional.linear(x, weight.widened(x.dtype))

        return seconds(run, self.device, num_timed=3) / len(few)

    def _scaled_s(self, weights: list[PackedMatrix], x: Tensor) -> float:
        """By torch, with rows that are quantised in each product."""

        def run() -> None:
            for weight in weights:
                numbers, scales = quantize_rows(x, weight)
                of_weight = weight.units.view(numbers.dtype).T, scales, weight.scales.float()
                torch._scaled_mm(numbers, *of_weight, out_dtype=x.dtype, use_fast_accum=True)

        return seconds(run, self.device, num_timed=10) / len(weights)

    def _count(self, nbytes: float) -> int:
        return max(2, min(MOST_MATRICES, round(UNCACHED_NBYTES / nbytes))) if self.is_gpu else 2

    def _packed(self, num_out: int, num_in: int, format: Format) -> PackedMatrix:
        return random_packed((num_out, num_in), format, self.dtype, self._generator)

    def _difference(self, x: Tensor, weight: PackedMatrix) -> float:
        """From the reference, as a share of the largest value."""
        is_wide = weight.input_scale is None
        linear = reference.packed_linear if is_wide else reference.eight_bit_linear
        wanted = linear(x[:NUM_CHECKED], weight, None)
        return near(self.ops.pack(weight, None)(x)[:NUM_CHECKED], wanted, TOLERANCE)

    def _random(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self.device)
        return drawn.to(self.dtype)


def rows_of(bench: Bench, num_rows: tuple[int, ...]) -> list[Row]:
    return [
        Row(f"{name}, {count} rows, {shape}", partial(bench.layer, its, format, count))
        for count in num_rows
        for shape, its in bench.shapes().items()
        for name, format in FORMATS.items()
        if count >= EIGHT_BIT_ROWS or not format.in_8_bits
        if shape != "qwen3-32b" or name in OF_LARGE_MODELS
    ]


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    bench = Bench(arguments)
    if not bench.is_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("Without a GPU, set TRITON_INTERPRET=1: only the rehearsal runs here.")
    few = (20, EIGHT_BIT_ROWS) if arguments.tiny else (1, 20, EIGHT_BIT_ROWS)
    run_part("gpu_packed", rows_of(bench, NUM_ROWS if bench.is_gpu else few), arguments)


if __name__ == "__main__":
    main()
