"""Bringing small tensors of the host to a device without waiting for what it computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[len(values)] on the device, without waiting for what it computes."""
    return copied(torch.tensor(values, dtype=dtype), device)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for what it computes."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
