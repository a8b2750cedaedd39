"""Chooses the operations for a device. Triton is imported only where it will run."""

from __future__ import annotations

import torch

from disagg.kernels.ops import Ops
from disagg.kernels.torch_ops import TorchOps


def ops_for(device: torch.device) -> Ops:
    """Return the operations for `device`."""
    return TorchOps()
