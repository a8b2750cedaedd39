"""The values of a GGUF file's tensors, widened to floats by the `gguf` library."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from disagg.models.gguf_model import GgufStored


def read_values(stored: GgufStored) -> Tensor:
    """One tensor in float32, its rows in transformers' order. Raises `OSError`."""
    dtype = GGMLQuantizationType[stored.dtype]
    raw = np.fromfile(
        stored.file, dtype=np.uint8, count=stored.end - stored.begin, offset=stored.begin
    )
    if raw.nbytes < stored.end - stored.begin:
        raise OSError("it is cut off")
    values = torch.from_numpy(dequantize(raw.reshape(stored.shape[0], -1), dtype))
    values = values.reshape(stored.shape)
    if stored.num_paired_heads:
        # [heads, head_dim / 2, 2, ...]: the two of a pair were put side by side.
        paired = values.reshape(stored.num_paired_heads, -1, 2, *stored.shape[1:])
        values = paired.transpose(1, 2).reshape(stored.shape)
    return values
