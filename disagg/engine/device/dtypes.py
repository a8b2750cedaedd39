"""The dtype that an engine computes in."""

from __future__ import annotations

from pathlib import Path

import torch

from disagg.config import EngineConfig
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
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False  # not Linux
    return "amx_bf16" in flags or "avx512_bf16" in flags
