"""What a checkpoint directory says about its model, checked and in our words.

Decides which architectures are supported, and refuses everything else with the list of what is.
How its files are read is `hf_config`. Knows nothing of devices, batches or serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disagg.errors import ModelError
from disagg.models.checkpoint import checkpoint_fingerprint
from disagg.models.hf_config import HFConfig
from disagg.models.rope import RopeConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder.

    `sliding_windows` has one entry per layer: the number of positions a token sees, itself
    included, or None for all of them. `fingerprint` names the weights and the architecture: equal
    fingerprints mean interchangeable KV.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""

    @classmethod
    def from_directory(cls, directory: str | Path, *, with_weights: bool = True) -> ModelConfig:
        """Read a Hugging Face checkpoint directory.

        Without weights, config.json is enough, and `fingerprint` stays empty: for planning.

        Raises:
            ModelError: the directory, a file or a field is missing, broken or unsupported.
        """
        config = HFConfig.from_directory(directory)
        try:
            return _parse(config, with_weights)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise config.wrong(str(error)) from error


def _parse(config: HFConfig, with_weights: bool) -> ModelConfig:
    raw, family, directory = config.raw, config.family, config.directory
    _refuse_unsupported(raw, directory)
    num_heads, hidden_size = config.size("num_attention_heads"), config.size("hidden_size")
    # Qwen3's heads need not divide the hidden size: its class has a size of its own, and no null.
    of_its_own = family == "Qwen3ForCausalLM"
    head_dim = config.size("head_dim") if of_its_own else config.optional_size("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise config.wrong(f"hidden_size {hidden_size} is no multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    num_kv_heads = config.optional_size("num_key_value_heads") or num_heads
    _check_heads(num_heads, num_kv_heads, head_dim, directory)
    # Mistral's and Qwen2's classes know no such key; Qwen2 always has the biases of q, k and v.
    has_attention_bias = family in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_attention_bias and config.flag("attention_bias")
    return ModelConfig(
        family=family,
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        max_model_len=config.max_model_len,
        dtype=_dtype(raw, directory),
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        sliding_windows=config.sliding_windows,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=family == "LlamaForCausalLM" and config.flag("mlp_bias"),
        qk_norm=family == "Qwen3ForCausalLM",
        eos_token_ids=config.eos_token_ids,
        fingerprint=checkpoint_fingerprint(directory) if with_weights else "",
    )


def _refuse_unsupported(raw: Mapping[str, Any], directory: Path) -> None:
    if raw.get("quantization_config"):
        raise ModelError(f"{directory} holds quantised weights; only float checkpoints are loaded")
    if raw.get("per_layer_config"):
        raise ModelError(f"{directory}: per_layer_config (layers that differ) is not supported")
    if raw["hidden_act"] != "silu":
        raise ModelError(
            f"{directory}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'"
        )


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int, directory: Path) -> None:
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{directory}: {num_heads} heads over {num_kv_heads} KV heads of size {head_dim} do "
            "not fit; the heads must be a multiple of the KV heads and the size even"
        )


def _dtype(raw: Mapping[str, Any], directory: Path) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"{directory}: dtype {name} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
