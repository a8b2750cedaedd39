"""Matrix products with weights that are laid out once for the CPU's matrix units.

oneDNN reads a weight in its own blocked layout. It converts a plain [out, in] tensor on every call,
which with few rows costs as much as the product. Packing a weight once makes decode steps up to
twice as fast, and lets oneDNN compute the activation or the residual sum while a result tile is
still in cache.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu.library import find_step
from disagg.kernels.cpu.panels import PANEL, CpuMatrix, multiply_rows

ROWS_AT_ONCE = 64
PANEL_WIDTHS = 64, 32  # rows of oneDNN's panels without and with AMX
PANEL_COLUMNS = 32  # a panel's columns are padded to a multiple of this

_ops: Any = torch.ops.mkldnn


class PlainLinear:
    """Computes x W^T + b in torch, for devices and dtypes for which oneDNN packs no weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x), inplace=True)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return functional.gelu(self(x), approximate="tanh")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x).mul_(factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self(x).add_(summand)


class OnednnLinear:
    """The same products from a weight in oneDNN's own layout.

    oneDNN generates code for every number of rows that it has not seen recently, which takes some
    milliseconds, and prompts have all lengths. So many rows are padded to a multiple of
    `ROWS_AT_ONCE`.

    Attributes:
        bias: [num_out], or None.
        panels: the address of the packed weight.
        panel_width: rows of the weight in each panel, as csrc/product.h describes panels; 0 if the
            weight has another layout.
        panels_nbytes: size of the packed weight.
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

    def described(self) -> CpuMatrix:
        """The structure in which compiled code reads this weight."""
        return _in_panels(self)

    def _one(self, x: Tensor, then: str, algorithm: str = "") -> Tensor:
        filled = _filled(x)
        result: Tensor = self._unary(filled, self._weight, self.bias, then, [], algorithm)
        return result if filled is x else result[: x.shape[0]]

    def _two(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        filled = _filled(x)
        result: Tensor = self._binary(filled, _filled(other), self._weight, self.bias, then)
        return result if filled is x else result[: x.shape[0]]

    def _is_in_panels(self, weight: Tensor, width: int) -> bool:
        """Whether the packed weight is in panels of `width` rows.

        In such a panel the pairs of a column and the next one are adjacent, padded with zeros.
        oneDNN documents no layout, so the first and the last panel are compared with the weight.
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


class PanelLinear(PlainLinear):
    """The same products by the compiled program, for a CPU without bf16 instructions.

    On such a CPU oneDNN does not pack a bfloat16 weight, and multiplies it at a fifth of the speed.
    The attributes are those of `OnednnLinear`.
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
        self._described = _in_panels(self)

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_rows(self._library, self._described, x)

    def described(self) -> CpuMatrix:
        """The structure in which compiled code reads this weight."""
        return self._described


def _in_panels(linear: OnednnLinear | PanelLinear) -> CpuMatrix:
    return CpuMatrix(
        panels=linear.panels,
        panel_width=linear.panel_width,
        bias=None if linear.bias is None else linear.bias.data_ptr(),
        num_out=linear.num_out,
        num_in=linear.num_in,
    )


Linear: TypeAlias = PlainLinear | OnednnLinear


def _filled(x: Tensor) -> Tensor:
    """Pad `x` with rows of zeros to a multiple of `ROWS_AT_ONCE`; few rows are not padded."""
    num_rows = x.shape[0]
    num_more = -num_rows % ROWS_AT_ONCE
    if num_rows < ROWS_AT_ONCE or not num_more:
        return x
    return functional.pad(x, (0, 0, 0, num_more))


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Choose an implementation by the weight's dtype and this CPU's abilities."""
    if weight.device.type == "cpu":
        library = _multiplies_panels() if weight.dtype == torch.bfloat16 else None
        if library is not None and weight.shape[1] % 2 == 0:
            return PanelLinear(weight, bias, library)
        if torch._C._has_mkldnn and _onednn_packs(weight.dtype):
            return OnednnLinear(weight, bias)
    return PlainLinear(weight, bias)


def _multiplies_panels() -> ctypes.CDLL | None:
    """The compiled program, if oneDNN multiplies bfloat16 slowly on this CPU; else None."""
    library = find_step().loaded
    return None if library is None or library.disagg_step_has_bf16() else library


def _onednn_packs(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(_ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32
