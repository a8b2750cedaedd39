"""Matrix products with weights laid out once for the CPU's matrix units.

oneDNN reads a weight in blocks of its own; a plain [out, in] tensor is re-blocked on every call,
which at a few rows costs as much as the product. Packing once makes decode steps up to twice as
fast, and lets the activation or the residual sum happen while a result tile is still in cache.

Weights that were stored in half precision and are computed with in float32 stay in half precision,
which FBGEMM widens in registers: a decode step reads half the bytes. A CPU without instructions for
half precision computes so whatever the type of activations is.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu_library import PLAIN_STEP, find_library, find_step
from disagg.kernels.cpu_matrix import PANEL, CpuMatrix
from disagg.kernels.narrow_rows import narrow_rows

ROWS_AT_ONCE = 64
PANEL_WIDTHS = 64, 32  # of oneDNN's panels: without AMX, and with it
PANEL_COLUMNS = 32  # a panel's columns are filled up to a multiple
_MOST_LOST = 2.0**-21  # of a weight's norm
_ROWS_COMPARED = 1024  # few enough for the processor's cache, enough to hide the calls

_ops: Any = torch.ops.mkldnn


class PlainLinear:
    """x W^T + b through torch, for devices and dtypes that oneDNN does not pack."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x))

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return functional.gelu(self(x), approximate="tanh")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x).mul_(factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self(x).add_(summand)


class PackedLinear:
    """The same products from a weight in oneDNN's own layout.

    oneDNN makes a program for every number of rows that it has not seen lately, which takes some
    milliseconds, and prompts have all lengths: many rows are filled up to a multiple of
    `ROWS_AT_ONCE`.

    Attributes:
        bias: [num_out], or None.
        panels: the address of the weight.
        panel_width: rows of the weight in each of its panels, as csrc/product.h describes them; 0
            if it is laid out in another way.
        panels_nbytes: of the packed weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = _ops._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self.num_out, self.num_in = weight.shape
        self.panels = int(_ops.data_ptr(self._weight))
        self.panels_nbytes = int(_ops._nbytes(self._weight))
        widths = (width for width in PANEL_WIDTHS if self._is_in_panels(weight, width))
        self.panel_width = next(widths, 0)
        self._unary = _ops._linear_pointwise.default
        self._binary = _ops._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._one(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        return self._one(x, "swish")

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return self._one(x, "gelu", "tanh")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self._two(x, factor, "mul")

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self._two(x, summand, "add")

    def _one(self, x: Tensor, then: str, algorithm: str = "") -> Tensor:
        filled = _filled(x)
        result: Tensor = self._unary(filled, self._weight, self.bias, then, [], algorithm)
        return result if filled is x else result[: x.shape[0]]

    def _two(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        filled = _filled(x)
        result: Tensor = self._binary(filled, _filled(other), self._weight, self.bias, then)
        return result if filled is x else result[: x.shape[0]]

    def _is_in_panels(self, weight: Tensor, width: int) -> bool:
        """Whether the packed weight is in panels of so many rows, in which the pairs of one column
        and the next lie together, filled up with zeros. oneDNN promises no layout: it is compared,
        in the first and the last panel.
        """
        if weight.dtype != torch.bfloat16:
            return False
        num_panels = -(-self.num_out // width)
        num_columns = -(-self.num_in // PANEL_COLUMNS) * PANEL_COLUMNS
        panel_nbytes = width * num_columns * weight.itemsize
        if self.panels_nbytes != num_panels * panel_nbytes:
            return False
        for panel in {0, num_panels - 1}:
            rows = weight[panel * width : (panel + 1) * width]
            filled = functional.pad(rows, (0, num_columns - self.num_in, 0, width - rows.shape[0]))
            expected = filled.view(width, -1, 2).transpose(0, 1).contiguous().view(torch.uint8)
            stored = ctypes.string_at(self.panels + panel * panel_nbytes, panel_nbytes)
            if expected.numpy().tobytes() != stored:
                return False
        return True


class PanelLinear(PackedLinear):
    """The same products by the compiled program, for a CPU with AVX-512 and without bf16.

    oneDNN keeps a bfloat16 weight there as it is, and multiplies it at a fifth of the speed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL) -> None:
        self.num_out, self.num_in = weight.shape
        self.bias = bias
        self._library = library
        more = -self.num_in % PANEL_COLUMNS, -self.num_out % PANEL
        panels = functional.pad(weight, (0, more[0], 0, more[1])).view(
            -1, PANEL, (self.num_in + more[0]) // 2, 2
        )
        self._panels = panels.transpose(1, 2).contiguous()
        self.panels, self.panels_nbytes = self._panels.data_ptr(), self._panels.nbytes
        self.panel_width = PANEL
        self._described = CpuMatrix(
            panels=self.panels,
            bias=None if bias is None else bias.data_ptr(),
            num_out=self.num_out,
            num_in=self.num_in,
            panel_width=PANEL,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return narrow_rows(self._library, self._described, x)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x), inplace=True)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return functional.gelu(self(x), approximate="tanh")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x).mul_(factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self(x).add_(summand)


class HalfLinear:
    """The same products in float32 from a weight kept as float16, in FBGEMM's layout.

    The weight must pass `fits_half`: larger numbers than float16 has would be cut. Results are of
    the type of `x`, rounded once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        wide_bias = None if bias is None else bias.float()
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), wide_bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default._op

    def __call__(self, x: Tensor) -> Tensor:
        return self._wide(x).to(x.dtype)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self._wide(x), inplace=True).to(x.dtype)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return functional.gelu(self._wide(x), approximate="tanh").to(x.dtype)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self._wide(x).mul_(factor).to(x.dtype)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self._wide(x).add_(summand).to(x.dtype)

    def _wide(self, x: Tensor) -> Tensor:
        # Else torch looks for a __torch_function__ of the weight: 10 us, as much as a product.
        with torch._C.DisableTorchFunctionSubclass():
            result: Tensor = self._product(x.float(), self._weight)
        return result


Linear: TypeAlias = PlainLinear | PackedLinear | HalfLinear


def fits_half(weight: Tensor) -> bool:
    """Whether float16 loses no more of `weight` than adding up products in float32 does.

    Sums of 768 products are off by 5e-7, or 2^-21, of the result. bf16 weights of usual sizes are
    off by less: only those below 2^-17 become subnormal numbers with too few digits. Weights that
    use the digits of float32 are off by 2^-12.
    """
    lost = kept = 0.0
    for some in torch.split(weight, _ROWS_COMPARED):
        rows = some.float()
        lost += float((rows.half().float() - rows).square_().sum())
        kept += float(rows.square().sum())
    return lost <= kept * _MOST_LOST**2 and lost < math.inf


def _filled(x: Tensor) -> Tensor:
    """With rows of zeros at the end; a few rows stay as they are."""
    num_rows = x.shape[0]
    num_more = -num_rows % ROWS_AT_ONCE
    if num_rows < ROWS_AT_ONCE or not num_more:
        return x
    return functional.pad(x, (0, 0, 0, num_more))


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Choose by the weight's dtype, its values, and what this CPU can do."""
    if weight.device.type == "cpu":
        library = _multiplies_panels() if weight.dtype == torch.bfloat16 else None
        if library is not None and weight.shape[1] % 2 == 0:
            return PanelLinear(weight, bias, library)
        if _prefers_float32(weight.dtype) and _has_fbgemm() and fits_half(weight):
            return HalfLinear(weight, bias)
        if torch._C._has_mkldnn and _onednn_packs(weight.dtype):
            return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _multiplies_panels() -> ctypes.CDLL | None:
    """The compiled program, on a CPU where oneDNN multiplies bfloat16 slowly."""
    library = find_step().loaded
    return library if library is not None and library is find_library(PLAIN_STEP).loaded else None


def _prefers_float32(dtype: torch.dtype) -> bool:
    """Half precision too, on a CPU that has no instructions to multiply it."""
    return dtype == torch.float32 or torch.backends.cpu.get_cpu_capability() == "AVX2"


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _onednn_packs(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(_ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32
