"""Copies small tensors from the host to a device without waiting for the device's other work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy values to a tensor [len(values)] on the device, without waiting for its other work."""
    return copied(torch.tensor(values, dtype=dtype), device)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, without waiting for the device's other work."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
