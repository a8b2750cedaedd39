"""Matrix products with weights laid out once for the CPU's matrix units.

oneDNN reads a weight in blocks of its own; a plain [out, in] tensor is re-blocked on every call,
which at a few rows costs as much as the product. Packing once makes decode steps up to twice as
fast, and lets the activation or the residual sum happen while a result tile is still in cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

ROWS_AT_ONCE = 64

_ops: Any = torch.ops.mkldnn


class PlainLinear:
    """x W^T + b through torch, for devices and dtypes that oneDNN does not pack."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x))

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x).mul_(factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self(x).add_(summand)


class PackedLinear:
    """The same products from a weight in oneDNN's own layout.

    oneDNN makes a program for every number of rows that it has not seen lately, which takes some
    milliseconds, and prompts have all lengths: many rows are filled up to a multiple of
    `ROWS_AT_ONCE`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = _ops._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self._unary = _ops._linear_pointwise.default
        self._binary = _ops._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._one(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        return self._one(x, "swish")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self._two(x, factor, "mul")

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self._two(x, summand, "add")

    def _one(self, x: Tensor, then: str) -> Tensor:
        filled = _filled(x)
        result: Tensor = self._unary(filled, self._weight, self._bias, then, [], "")
        return result if filled is x else result[: x.shape[0]]

    def _two(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        filled = _filled(x)
        result: Tensor = self._binary(filled, _filled(other), self._weight, self._bias, then)
        return result if filled is x else result[: x.shape[0]]


def _filled(x: Tensor) -> Tensor:
    """With rows of zeros at the end; a few rows stay as they are."""
    num_rows = x.shape[0]
    num_more = -num_rows % ROWS_AT_ONCE
    if num_rows < ROWS_AT_ONCE or not num_more:
        return x
    return functional.pad(x, (0, 0, 0, num_more))


def linear(weight: Tensor, bias: Tensor | None) -> PlainLinear | PackedLinear:
    """Pack `weight` where oneDNN supports its dtype on this CPU."""
    return (PackedLinear if _can_pack(weight) else PlainLinear)(weight, bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(_ops._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
