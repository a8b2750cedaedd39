"""Reads the values of a GGUF file's tensors: floats, or blocks in the normal form of matrices.

Blocks of 32 values (`ggml-common.h`): Q4_0, Q5_0 and Q8_0 begin with a scale in float16, Q4_1 and
Q5_1 also with a least value. The last 16 bytes of 4 and 5 bits have the first 16 numbers in their
lower halves. The fifth bits of all numbers are in 4 bytes before these.

Blocks of 256 values: Q4_K and Q5_K have two floats, and for each 32 values two 6-bit integers that
multiply them: the scale, and the negated least value. Q6_K has a float, and for each 16 values an
int8 that multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from disagg.models.checkpoint import Range
from disagg.models.gguf_file import BY_NAME
from disagg.models.gguf_model import GgufStored
from disagg.models.quantized_values import Quantized

# The contents of blocks [rows, blocks, bytes]: int8 numbers, and in the order of groups, scales and
# least values.
_Read: TypeAlias = tuple[Tensor, Tensor, Tensor | None]

_HALF_NBYTES = 2
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_values(stored: GgufStored, box: Sequence[Range] = ()) -> Tensor | Quantized:
    """Read a tensor, with its rows in transformers' order. Raises `OSError`.

    Args:
        box: the range to read of each dimension, with whole heads; empty: everything.
    """
    _, num_values, nbytes, packing = BY_NAME[stored.dtype]
    rows, *others = box or [(0, size) for size in stored.shape]
    columns = others[0] if others else (0, num_values)
    row_nbytes = (stored.end - stored.begin) // stored.shape[0]
    begin, num_rows = stored.begin + rows[0] * row_nbytes, rows[1] - rows[0]
    if stored.file.stat().st_size < begin + num_rows * row_nbytes:
        raise OSError("the file is cut off")
    mapped = np.memmap(stored.file, np.uint8, "r", begin, (num_rows, row_nbytes))
    first_block, end_block = columns[0] // num_values, -(-columns[1] // num_values)
    own = np.array(mapped[:, first_block * nbytes : end_block * nbytes])
    raw = _in_our_order(torch.from_numpy(own), stored)
    if stored.dtype in _FLOATS:
        values = raw.view(_FLOATS[stored.dtype])
        values = values.float().sub_(1.0) if stored.is_plus_one else values
        return values if others else values.flatten()
    numbers, scales, least = (
        None if each is None else each.flatten(1)
        for each in _READ[stored.dtype](raw.view(num_rows, -1, nbytes))
    )
    assert numbers is not None and scales is not None
    first = columns[0] - first_block * num_values  # counted from the first block
    end, size = first + columns[1] - columns[0], numbers.shape[1] // scales.shape[1]
    groups = slice(first // size, -(-end // size))
    own_numbers = numbers[:, first:end]
    return Quantized(
        kind="int8" if packing is None else packing.kind,
        shape=(num_rows, end - first),
        numbers=lambda some: own_numbers[some].contiguous(),
        scales=scales[:, groups],
        least=None if least is None else least[:, groups],
        size=size,
        first=first % size,
    )


def _halves(blocks: Tensor, first: int, count: int) -> Tensor:
    """Read `count` float16 from byte `first` of each block on: [rows, blocks, count]."""
    return blocks[:, :, first : first + count * _HALF_NBYTES].contiguous().view(torch.float16)


def _two_halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, least = _halves(blocks, 0, 2).unbind(2)
    return scales, least


def _nibbles(stored: Tensor) -> Tensor:
    """The lower halves of all bytes, and then the upper halves, as int8 from 0 to 15."""
    return torch.cat((stored & 15, stored >> 4), -1).view(torch.int8)


def _five_bits(stored: Tensor) -> Tensor:
    """Of blocks of 32 without their floats: the fifth bits, then the others; from 0 to 31."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = stored[:, :, :4].unsqueeze(3).bitwise_right_shift(places).bitwise_and_(1).flatten(2)
    return _nibbles(stored[:, :, 4:]) | fifth.view(torch.int8) << 4


def _q4_0(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, :, 2:]).sub_(8), _halves(blocks, 0, 1), None


def _q4_1(blocks: Tensor) -> _Read:
    return _nibbles(blocks[:, :, 4:]), *_two_halves(blocks)


def _q5_0(blocks: Tensor) -> _Read:
    return _five_bits(blocks[:, :, 2:]).sub_(16), _halves(blocks, 0, 1), None


def _q5_1(blocks: Tensor) -> _Read:
    return _five_bits(blocks[:, :, 4:]), *_two_halves(blocks)


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[:, :, 2:].contiguous().view(torch.int8), _halves(blocks, 0, 1), None


def _q4_k(blocks: Tensor) -> _Read:
    # 32 bytes have the numbers of two groups.
    return _nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)), *_six_bits(blocks)


def _q5_k(blocks: Tensor) -> _Read:
    # Bit i of 32 bytes is the fifth bit of the numbers of group i.
    fifth = torch.stack([blocks[:, :, 16:48] >> group & 1 for group in range(8)], 2)
    numbers = _nibbles(blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32)).flatten(2)
    return numbers | fifth.flatten(2).view(torch.int8) << 4, *_six_bits(blocks)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and least values of Q4_K and Q5_K, [rows, blocks, 8] each."""
    scale, least = (each.float().unsqueeze(2) for each in _two_halves(blocks))
    # Of 8 groups, the first 4 have 6 bits of a byte; the others have 4 bits of a byte, and the 2
    # upper bits of a byte of the first 4.
    low, below, rest = blocks[:, :, 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(2)
    scales = torch.cat((low & 63, (rest & 15) | (low >> 2 & 48)), 2)
    leasts = torch.cat((below & 63, (rest >> 4) | (below >> 2 & 48)), 2)
    return scale * scales, -(least * leasts)


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
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _in_our_order(rows: Tensor, stored: GgufStored) -> Tensor:
    """Put the rows of whole heads into transformers' order."""
    if not stored.num_paired_heads:
        return rows
    # [heads, head_dim / 2, 2, ...]: llama.cpp stores the two rows of a pair next to each other.
    num_heads = stored.num_paired_heads * len(rows) // stored.shape[0]
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
