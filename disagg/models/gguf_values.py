"""Reads the values of a GGUF file's tensors, widened to floats by the `gguf` library, or packed.

Blocks of 32 values (`ggml-common.h`): Q4_0 has a scale in float16, and Q4_1 also a least value.
Then come 16 bytes, whose lower halves are the first 16 numbers. Q8_0 has a scale and 32 bytes.

Blocks of 256 values: Q4_K has two floats, and for each 32 values two 6-bit integers that multiply
them: the scale, and the negated least value. Q6_K has a float, and for each 16 values an int8 that
multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from disagg.kernels.packed_matrix import PackedMatrix, pack_units
from disagg.kernels.packed_sizes import Packing
from disagg.models.gguf_file import BLOCKS
from disagg.models.gguf_model import GgufStored

# The contents of blocks [rows, blocks, bytes]: numbers, as in `PackedMatrix`, and, in the order of
# groups, scales and least values.
_Read: TypeAlias = tuple[Tensor, Tensor, Tensor | None]

_HALF_NBYTES = 2
_SIZES = {name: (num_values, nbytes) for name, num_values, nbytes in BLOCKS.values()}


def read_values(stored: GgufStored, box: Sequence[tuple[int, int]] = ()) -> Tensor:
    """Read a tensor as float32, with its rows in transformers' order. Raises `OSError`.

    Args:
        box: the range to read of each dimension, with whole heads; empty: everything.
    """
    dtype = GGMLQuantizationType[stored.dtype]
    raw = _raw_blocks(stored, box)
    values = torch.from_numpy(dequantize(raw, dtype))
    if stored.is_plus_one:
        values -= 1.0
    if len(stored.shape) == 1:
        return _in_our_order(values.flatten(), stored)
    return _in_our_order(values.view(len(raw), -1), stored)[:, slice(*_own_columns(stored, box))]


def packed_values(
    stored: GgufStored, packing: Packing, box: Sequence[tuple[int, int]] = ()
) -> PackedMatrix:
    """Read a matrix in its stored bits, with its rows in transformers' order.

    Args:
        packing: from `packing.packing_of`.
        box: the range of rows and of columns to read, with whole heads; empty: everything.

    Raises:
        OSError: the file is cut off.
        ValueError: its scales hold NaN or infinite values.
    """
    nbytes = _SIZES[stored.dtype][1]
    raw = _in_our_order(torch.from_numpy(_raw_blocks(stored, box)), stored)
    numbers, scales, least = _READ[stored.dtype](raw.view(len(raw), -1, nbytes))
    if not all(each.isfinite().all() for each in (scales, least) if each is not None):
        raise ValueError("its scales hold NaN or infinite values")
    first, end = _own_columns(stored, box)
    numbers, scales = numbers.flatten(1), scales.flatten(1)
    # For each group that is kept, the stored group that contains it.
    size = numbers.shape[1] // scales.shape[1]
    owners = torch.arange(first, end, packing.group or size) // size

    def table(of_groups: Tensor) -> Tensor:
        return of_groups.index_select(1, owners).T.contiguous()

    return PackedMatrix(
        packing.kind,
        end - first,
        packing.group,
        pack_units(numbers[:, first:end].contiguous(), packing.kind, packing.group),
        table(scales),
        least=None if least is None else table(least.flatten(1)),
    )


def _halves(blocks: Tensor, first: int, count: int) -> Tensor:
    """Read `count` float16 from byte `first` of each block on: [rows, blocks, count]."""
    return blocks[:, :, first : first + count * _HALF_NBYTES].contiguous().view(torch.float16)


def _nibbles(stored: Tensor) -> Tensor:
    """The lower halves of all bytes, and then the upper halves, as int8 from -8 to 7."""
    return torch.cat((stored & 15, stored >> 4), -1).view(torch.int8).sub_(8)


def _q4_0(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, :, 2:]), _halves(blocks, 0, 1), None


def _q4_1(blocks: Tensor) -> _Read:
    scales, least = _halves(blocks, 0, 2).unbind(2)
    return _nibbles(blocks[:, :, 4:]), scales, least


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[:, :, 2:].contiguous().view(torch.int8), _halves(blocks, 0, 1), None


def _q4_k(blocks: Tensor) -> _Read:
    scale, least = _halves(blocks, 0, 2).float().unsqueeze(3).unbind(2)
    # Of 8 groups, the first 4 have 6 bits of a byte; the others have 4 bits of a byte, and the 2
    # upper bits of a byte of the first 4.
    low, below, rest = blocks[:, :, 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(2)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), 2)
    leasts = torch.cat((below & 63, (rest >> 4) | (below >> 2 & 48)), 2)
    # 32 bytes have the numbers of two groups.
    numbers = _nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))
    return numbers, scale * scales, -(least * leasts)


def _q6_k(blocks: Tensor) -> _Read:
    low, high = (
        blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64),
        blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 32),
    )
    # 128 numbers have their four lower bits in one place and their two upper bits in another, 32
    # numbers at a time.
    low = torch.cat((low & 15, low >> 4), 3)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    numbers = (low | high << 4).view(torch.int8).sub_(32)
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    return numbers, scales * _halves(blocks, 208, 1).float(), None


_READ: Mapping[str, Callable[[Tensor], _Read]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def _raw_blocks(stored: GgufStored, box: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Read the bytes of the blocks that contain the box: [rows, bytes]. Raises `OSError`."""
    num_rows = stored.shape[0]
    first, end = box[0] if box else (0, num_rows)
    row_nbytes = (stored.end - stored.begin) // num_rows
    begin, shape = stored.begin + first * row_nbytes, (end - first, row_nbytes)
    if stored.file.stat().st_size < begin + shape[0] * row_nbytes:
        raise OSError("the file is cut off")
    mapped = np.memmap(stored.file, np.uint8, "r", begin, shape)
    num_values, nbytes = _SIZES[stored.dtype]
    columns = box[1] if len(box) > 1 else (0, row_nbytes // nbytes * num_values)
    blocks = columns[0] // num_values, -(-columns[1] // num_values)
    return np.array(mapped[:, blocks[0] * nbytes : blocks[1] * nbytes])


def _own_columns(stored: GgufStored, box: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The range of the box's columns, counted from the first block that contains them."""
    columns = box[1] if len(box) > 1 else (0, stored.shape[1])
    first = columns[0] % _SIZES[stored.dtype][0]
    return first, first + columns[1] - columns[0]


def _in_our_order(rows: Tensor, stored: GgufStored) -> Tensor:
    """Put the rows of whole heads into transformers' order."""
    if not stored.num_paired_heads:
        return rows
    # [heads, head_dim / 2, 2, ...]: llama.cpp stores the two rows of a pair next to each other.
    num_heads = stored.num_paired_heads * len(rows) // stored.shape[0]
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
