"""The values of a GGUF file's tensors, widened to floats by the `gguf` library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from disagg.models.gguf_model import GgufStored


def read_values(stored: GgufStored, box: Sequence[tuple[int, int]] = ()) -> Tensor:
    """One tensor in float32, its rows in transformers' order. Raises `OSError`.

    Args:
        box: what to read of each dimension, of heads whole ones; empty: everything.
    """
    dtype = GGMLQuantizationType[stored.dtype]
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
    values = torch.from_numpy(dequantize(raw.reshape(end - first, -1), dtype))
    shape = end - first, *stored.shape[1:]
    values = values.reshape(shape)
    if stored.num_paired_heads:
        # [heads, head_dim / 2, 2, ...]: the two of a pair were put side by side.
        num_heads = stored.num_paired_heads * (end - first) // num_rows
        paired = values.reshape(num_heads, -1, 2, *stored.shape[1:])
        values = paired.transpose(1, 2).reshape(shape)
    return values[(slice(None), *(slice(*own) for own in box[1:]))]
