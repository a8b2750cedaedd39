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
    """The same products from a weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = _ops._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self._unary = _ops._linear_pointwise.default
        self._binary = _ops._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._unary(x, self._weight, self._bias, "none", [], "")
        return result

    def silu(self, x: Tensor) -> Tensor:
        result: Tensor = self._unary(x, self._weight, self._bias, "swish", [], "")
        return result

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        result: Tensor = self._binary(x, factor, self._weight, self._bias, "mul")
        return result

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        result: Tensor = self._binary(x, summand, self._weight, self._bias, "add")
        return result


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
