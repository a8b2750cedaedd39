"""Chooses the operations for a device. Triton is imported only on a machine where it will run."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from disagg.devices import LARGE_SHARED_NBYTES
from disagg.kernels.cpu.attention import CpuAttention
from disagg.kernels.cpu.library import SAMPLING, find_library, find_step
from disagg.kernels.cpu.sampling import CpuSampling
from disagg.kernels.ops import PLAIN_SCORES, Ops, Scores
from disagg.kernels.packed_sizes import OnlineKind
from disagg.kernels.sampling_rows import SamplingOps
from disagg.kernels.torch.ops import TorchOps
from disagg.kernels.torch.sampling import TorchSampling

Quantization: TypeAlias = OnlineKind | Literal["packed"]
_BITS: dict[Quantization, Literal[4, 8]] = {"int8": 8, "int4": 4}  # on a CPU


def ops_for(
    device: torch.device,
    num_heads: int,
    quantization: Quantization | None = None,
    dtype: torch.dtype | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Ops:
    """Return Triton kernels for CUDA and torch for everything else.

    Args:
        dtype: the dtype in which the model computes. For bfloat16 on a CPU, attention is
            compiled.
        quantization: how weights are quantised when they are packed.
        scores: how attention makes its scores.

    Raises:
        ValueError: this device cannot multiply such weights.
    """
    if device.type != "cuda":
        if quantization == "fp8":
            raise ValueError(f"only GPUs can multiply {quantization} weights")
        return TorchOps(
            bits=16 if quantization is None else _BITS.get(quantization, 16),
            keeps_packed=quantization == "packed",
            dtype=dtype,
            attention=_compiled_attention() if dtype == torch.bfloat16 else None,
            scores=scores,
        )
    from disagg.kernels.gpu.ops import TritonOps

    properties: Any = torch.cuda.get_device_properties(device)  # untyped
    shared_nbytes = getattr(properties, "shared_memory_per_block_optin", LARGE_SHARED_NBYTES)
    kind = None if quantization == "packed" else quantization  # GPUs always keep packed weights
    return TritonOps(
        num_heads,
        properties.multi_processor_count,
        is_small=shared_nbytes < LARGE_SHARED_NBYTES,
        capability=(properties.major, properties.minor),
        quantization=kind,
        dtype=dtype,
        scores=scores,
    )


def _compiled_attention() -> CpuAttention | None:
    library = find_step().loaded
    return None if library is None else CpuAttention(library)


def device_name(device_id: int) -> str:
    """The driver's name of a GPU; empty for a CPU, whose id is -1."""
    return torch.cuda.get_device_name(device_id) if device_id >= 0 else ""


def sampling_ops_for(device: torch.device) -> SamplingOps:
    """Return Triton kernels for CUDA; for a CPU compiled loops if there are any, else torch."""
    if device.type != "cuda":
        library = find_library(SAMPLING).loaded if device.type == "cpu" else None
        return TorchSampling() if library is None else CpuSampling(library)
    from disagg.kernels.gpu.sampling import TritonSampling

    return TritonSampling()
