"""The values of a GGUF file's tensors, widened to floats by the `gguf` library, or in the bits that
they are stored in.

Blocks of 32 values (`ggml-common.h`): Q4_0 has a scale in float16, Q4_1 a least value behind it;
then come 16 bytes, whose lower halves are the first 16 numbers. Q8_0 has a scale and 32 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from disagg.kernels.packed_matrix import PackedMatrix, pack_units
from disagg.models.gguf_model import GgufStored
from disagg.models.packing import Packing

_HALF_NBYTES = 2


def read_values(stored: GgufStored, box: Sequence[tuple[int, int]] = ()) -> Tensor:
    """One tensor in float32, its rows in transformers' order. Raises `OSError`.

    Args:
        box: what to read of each dimension, of heads whole ones; empty: everything.
    """
    dtype = GGMLQuantizationType[stored.dtype]
    raw = _raw_rows(stored, box)
    values = torch.from_numpy(dequantize(raw, dtype)).reshape(len(raw), *stored.shape[1:])
    values = _in_our_order(values, stored)
    return values[(slice(None), *(slice(*own) for own in box[1:]))]


def packed_values(
    stored: GgufStored, packing: Packing, box: Sequence[tuple[int, int]] = ()
) -> PackedMatrix:
    """One matrix as it is stored, its rows in transformers' order.

    Args:
        packing: of `packing.packing_of`.
        box: the rows that are wanted, and all columns; empty: everything.

    Raises:
        OSError: it is cut off.
        ValueError: its scales hold NaN or infinite values.
    """
    num_in, size = stored.shape[1], packing.group
    raw = _in_our_order(torch.from_numpy(_raw_rows(stored, box)), stored)
    assert size is not None
    blocks = raw.view(len(raw), num_in // size, -1)
    floats = 2 if packing.has_least else 1
    halves = blocks[:, :, : floats * _HALF_NBYTES].contiguous().view(torch.float16)
    if not halves.isfinite().all():
        raise ValueError("its scales hold NaN or infinite values")
    numbers = blocks[:, :, floats * _HALF_NBYTES :]
    if packing.kind == "int4":
        numbers = torch.cat((numbers & 15, numbers >> 4), 2).view(torch.int8).sub_(8)
    units = pack_units(numbers.flatten(1).view(torch.int8), packing.kind, size)
    scales, *least = (each.T.contiguous() for each in halves.unbind(2))
    return PackedMatrix(
        packing.kind, num_in, size, units, scales, least=least[0] if least else None
    )


def _raw_rows(stored: GgufStored, box: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """The bytes of some rows: [rows, bytes of a row]. Raises `OSError`."""
    num_rows = stored.shape[0]
    first, end = box[0] if box else (0, num_rows)
    row_nbytes = (stored.end - stored.begin) // num_rows
    raw = np.fromfile(
        stored.file,
        dtype=np.uint8,
        count=(end - first) * row_nbytes,
        offset=stored.begin + first * row_nbytes,
    )
    if raw.nbytes < (end - first) * row_nbytes:
        raise OSError("it is cut off")
    return raw.reshape(end - first, -1)


def _in_our_order(rows: Tensor, stored: GgufStored) -> Tensor:
    """Rows of whole heads, as transformers has them."""
    if not stored.num_paired_heads:
        return rows
    # [heads, head_dim / 2, 2, ...]: the two of a pair were put side by side.
    num_heads = stored.num_paired_heads * len(rows) // stored.shape[0]
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
