"""The dtype that an engine computes in, and whether its weights are quantised."""

from __future__ import annotations

import torch

from disagg.config import EngineConfig
from disagg.errors import StartupError
from disagg.kernels.cpu_library import cpu_flags
from disagg.models.model_config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The requested dtype; by default half precision if the hardware multiplies it natively."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if model.dtype == "float32" else _DTYPES[model.dtype]
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    return not cpu_flags().isdisjoint(("amx_bf16", "avx512_bf16"))


def check_quantization(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raises `StartupError`: not this model, or not on this device."""
    asked, why = config.quantization, ""
    if asked is None:
        return
    if model.experts is not None:
        why = (
            f"{model.family} has experts, and only dense models are quantised when they are loaded"
        )
    elif device.type != "cpu":
        why = "there is a kernel for CPUs only; set device = 'cpu'"
    if why:
        raise StartupError(
            f"quantization = {asked!r} is not possible: {why}, or leave it out.",
            param="quantization",
        )
