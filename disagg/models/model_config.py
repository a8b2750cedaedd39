"""What a checkpoint directory says about its model, checked and in our words.

Decides which families, activations and rope variants are supported, and refuses everything else
with the list of what is. Knows nothing of devices, batches or serving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disagg.errors import ModelError
from disagg.models.checkpoint import checkpoint_fingerprint
from disagg.models.rope import RopeConfig

Json = Mapping[str, Any]

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling values that generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


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
    generation: GenerationDefaults = GenerationDefaults()
    fingerprint: str = ""

    @classmethod
    def from_directory(cls, directory: str | Path, *, with_weights: bool = True) -> ModelConfig:
        """Read a Hugging Face checkpoint directory.

        Without weights, config.json is enough, and `fingerprint` stays empty: for planning.

        Raises:
            ModelError: the directory, a file or a field is missing, broken or unsupported.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise ModelError(
                f"there is no model directory at {directory}; give the path of a directory with "
                "config.json, tokenizer.json and *.safetensors files"
            )
        raw = _read_json(directory / "config.json", required=True)
        generation = _read_json(directory / "generation_config.json", required=False)
        try:
            config = _parse(raw, generation, directory, with_weights)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            missing = f"has no {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
            raise ModelError(f"{directory / 'config.json'} {missing}") from error
        return config


def _read_json(path: Path, *, required: bool) -> Json:
    if not path.is_file():
        if not required:
            return {}
        raise ModelError(f"{path} is missing; a model directory needs a config.json")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} must hold one JSON object")
    return parsed


def _parse(raw: Json, generation: Json, directory: Path, with_weights: bool) -> ModelConfig:
    family = _family(raw, directory)
    if raw.get("quantization_config"):
        raise ModelError(f"{directory} holds quantised weights; only float checkpoints are loaded")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{directory}: hidden_act {activation!r} is not supported, only 'silu'")
    num_heads, hidden_size = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    head_dim = raw.get("head_dim") or (128 if family == "Qwen3ForCausalLM" else None)
    head_dim = int(head_dim or hidden_size // num_heads)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    _check_heads(num_heads, num_kv_heads, head_dim, directory)
    num_layers = _count(raw, "num_hidden_layers")
    attention_bias = bool(raw.get("attention_bias", False))
    max_position = _count(raw, "max_position_embeddings")
    rope = RopeConfig.from_hf(raw, max_position)
    return ModelConfig(
        family=family,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        vocab_size=_count(raw, "vocab_size"),
        max_model_len=rope.max_model_len(max_position),
        dtype=_dtype(raw, directory),
        rms_norm_eps=_epsilon(raw),
        rope=rope,
        sliding_windows=_sliding_windows(raw, family, num_layers, directory),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "Qwen2ForCausalLM",
        output_bias=attention_bias and family in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "LlamaForCausalLM",
        qk_norm=family == "Qwen3ForCausalLM",
        eos_token_ids=_eos_token_ids(generation, raw),
        generation=_generation_defaults(generation),
        fingerprint=checkpoint_fingerprint(directory) if with_weights else "",
    )


def _family(raw: Json, directory: Path) -> str:
    architectures = raw.get("architectures") or []
    for family in architectures:
        if family in FAMILIES:
            return str(family)
    raise ModelError(
        f"{directory} is a {', '.join(map(str, architectures)) or 'model without architectures'}; "
        f"supported are {', '.join(FAMILIES)}"
    )


def _count(raw: Json, key: str) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"{key} must be a positive number, not {value!r}")
    return value


def _epsilon(raw: Json) -> float:
    value = float(raw["rms_norm_eps"])
    if not 0 <= value < 1:
        raise ValueError(f"rms_norm_eps must lie between 0 and 1, not {value}")
    return value


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int, directory: Path) -> None:
    if min(num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{directory}: {num_heads} heads over {num_kv_heads} KV heads of size {head_dim} do "
            "not fit; the heads must be a multiple of the KV heads and the size even"
        )


def _dtype(raw: Json, directory: Path) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"{directory}: dtype {name} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _sliding_windows(
    raw: Json, family: str, num_layers: int, directory: Path
) -> tuple[int | None, ...]:
    """One window per layer: what `layer_types` says, else the rule of the family."""
    window = raw.get("sliding_window")
    qwen = family in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    if window is None or (qwen and not raw.get("use_sliding_window", False)):
        return (None,) * num_layers
    if family == "LlamaForCausalLM":
        return (None,) * num_layers
    if int(window) < 1:
        raise ModelError(f"{directory}: sliding_window must be at least 1, not {window}")
    layer_types = raw.get("layer_types") if qwen else None
    if layer_types is None:
        first = int(raw.get("max_window_layers", 0)) if qwen else 0
        layer_types = [
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(num_layers)
        ]
    known = {"sliding_attention": int(window), "full_attention": None}
    unknown = sorted(set(layer_types) - set(known))
    if unknown or len(layer_types) != num_layers:
        raise ModelError(
            f"{directory}: layer_types must name {num_layers} layers as {' or '.join(known)}; "
            f"found {len(layer_types)} with {', '.join(unknown) or 'nothing else'}"
        )
    return tuple(known[kind] for kind in layer_types)


def _eos_token_ids(*sources: Json) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids[int(token_id)] = None
    return tuple(ids)


def _generation_defaults(generation: Json) -> GenerationDefaults:
    """Recommended sampling; a configuration that says `do_sample: false` recommends greedy."""
    if not generation.get("do_sample", False):
        return GenerationDefaults(repetition_penalty=_number(generation, "repetition_penalty"))
    top_k = _number(generation, "top_k")
    return GenerationDefaults(
        temperature=_number(generation, "temperature"),
        top_p=_number(generation, "top_p"),
        top_k=None if top_k is None else int(top_k),
        repetition_penalty=_number(generation, "repetition_penalty"),
    )


def _number(source: Json, key: str) -> float | None:
    value = source.get(key)
    return None if value is None else float(value)
