"""A plugin of pytest that makes Triton's interpreter compare NaN and round as compiled kernels do.

It has numpy's `minimum`, `maximum` and `argmax`, which all find a NaN if there is one. Compiled,
the first two skip NaN unless they are told not to, and `argmax` depends on where the NaN is: see
docs/extending.md. It also rounds to e4m3 wrongly; compiled kernels round half to even, and what is
too large becomes the largest number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps


def argmax(x: NDArray[Any], axis: int | None, keepdims: bool) -> NDArray[np.int32]:
    """Triton's `_argmax_combine`, from left to right. NaN compares as false, so what is right of a
    NaN wins over it, and a NaN wins over what is left of it."""
    moved = np.moveaxis(x, axis or 0, 0)
    value, index = moved[0], np.zeros(moved.shape[1:], np.int32)
    for place in range(1, len(moved)):
        stays = value >= moved[place]  # greater, or equal and further left
        value, index = np.where(stays, value, moved[place]), np.where(stays, index, place)
    return np.expand_dims(index, axis or 0) if keepdims else index


_COMPILED = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce, np.argmax: argmax, None: None}
_reduce = ReduceOps.min_max


def _min_max(
    self: ReduceOps, value: Any, val_reduce_op: Any = None, idx_reduce_op: Any = None
) -> Any:
    of_values = _COMPILED.get(val_reduce_op, val_reduce_op)  # `argmax` ignores the largest value
    return _reduce(self, value, of_values, _COMPILED[idx_reduce_op])


_convert = interpreter._convert_float


def _converted(values: Any, dtype: Any, wanted: Any, rounding: Any) -> Any:
    if wanted.name != "fp8e4nv" or dtype.name not in ("fp32", "fp16"):
        return _convert(values, dtype, wanted, rounding)
    floats = torch.from_numpy(np.ascontiguousarray(values)).float().clamp(-448.0, 448.0)
    return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = _converted
ReduceOps.min_max = _min_max
InterpreterBuilder.create_minnumf = lambda self, one, other: self.binary_op(one, other, np.fmin)
InterpreterBuilder.create_maxnumf = lambda self, one, other: self.binary_op(one, other, np.fmax)
