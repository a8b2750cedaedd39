"""Weights in panels as compiled code reads them, and its products of rows with them."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, byref, c_int32, c_void_p
from functools import cache

import torch
import torch.nn.functional as functional
from torch import Tensor

PANEL = 64  # rows of a weight in one panel of our layout
FEW_ROWS = 16  # with more rows, AMX reads up to a multiple of `_TILE_ROWS` rows
_TILE_ROWS = 16
_PANELS_AT_ONCE = 16  # with fewer panels, waking another thread costs more than it saves


class CpuMatrix(Structure):
    """`Matrix` of csrc/product.h, which explains the fields. Unset fields are null or 0."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("numbers", c_void_p),
        ("nibbles", c_void_p),
        ("scales", c_void_p),
        ("num_out", c_int32),
        ("num_in", c_int32),
        ("group_size", c_int32),
        ("panel_width", c_int32),
    )


def multiply_rows(library: ctypes.CDLL, matrix: CpuMatrix, x: Tensor) -> Tensor:
    """Compute x W^T + b, from bfloat16 [num_rows, num_in] to [num_rows, num_out].

    Threads divide the panels of the weight.

    Args:
        library: the one that `library.find_step` loaded.
        matrix: a weight of 8 or 4 bits; also of 16 bits if the library is for CPUs without bf16.

    Raises:
        MemoryError: there is not enough memory to widen the rows.
    """
    num_rows = x.shape[0]
    out = torch.empty(num_rows, matrix.num_out, dtype=x.dtype)
    reads_tiles = num_rows > FEW_ROWS and library.disagg_step_has_tiles()
    num_more = -num_rows % _TILE_ROWS if reads_tiles else 0
    x = functional.pad(x, (0, 0, 0, num_more)) if num_more else x.contiguous()
    num_panels = -(-matrix.num_out // PANEL)
    num_parts = min(torch.get_num_threads(), -(-num_panels // _PANELS_AT_ONCE))
    ends = [num_panels * part // num_parts for part in range(num_parts + 1)]

    def some(part: int) -> None:
        status = library.disagg_step_narrow_rows(
            byref(matrix),
            c_void_p(x.data_ptr()),
            c_int32(num_rows),
            c_int32(ends[part]),
            c_int32(ends[part + 1]),
            c_void_p(out.data_ptr()),
        )
        if status:
            raise MemoryError(f"there is not enough memory for a product of {num_rows} rows")

    waits = [_threads().submit(some, part) for part in range(1, num_parts)]
    some(0)
    for wait in waits:
        wait.result()
    return out


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="panels")
