"""LoRA adapters, made and saved by PEFT, and models with one, as PEFT computes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import torch

from tests.models.checkpoints import Checkpoint

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of Phi-3
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def targets_of(variant: str) -> tuple[str, ...]:
    """What an adapter of all supported matrices of a variant changes."""
    if variant.startswith("phi3"):
        return FUSED
    has_experts = any(each in variant for each in ("moe", "mixtral", "gpt-oss", "minimax"))
    return ATTENTION if has_experts else ALL


def write_adapter(
    directory: Path,
    base: Checkpoint,
    targets: tuple[str, ...] = ALL,
    *,
    rank: int = 5,
    seed: int = 1,
    **settings: Any,
) -> Checkpoint:
    """Write a random adapter of `base`. Returns the model with it."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=3 * rank, target_modules=list(targets), task_type="CAUSAL_LM", **settings
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(copy.deepcopy(base.model), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # PEFT begins with B = 0
                parameter.data.normal_(0.0, 0.4 / parameter.shape[1] ** 0.5)
    model.save_pretrained(str(directory))
    return Checkpoint(directory, lambda: model)
