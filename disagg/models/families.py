"""The supported model families, with the defaults and switches of their classes in transformers.

A family whose layers have nothing new is one entry here. Other tensor names are added in `weights`,
another computation in `decoder`. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """
    Attributes:
        model_type: what `config.json` calls it.
        defaults: of its configuration class (transformers 5), for keys that a file may leave out.
            Sizes that only the weights decide have none here: a file without them is broken.
        attention_bias: of q, k, v and the output, as the key `attention_bias` says; of q, k and v
            always; or none, whatever a file says.
        mlp_bias: whether the class knows the key `mlp_bias`.
        qk_norm: whether q and k are normalised for each head.
        windows: which layers have a sliding window: those that the file names if its
            `use_sliding_window` says so, all if a size is set, or none.
    """

    model_type: str
    defaults: Json
    attention_bias: Literal["stated", "qkv", "none"] = "none"
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: Literal["stated", "all", "none"] = "none"


_EVERY: Json = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "sliding_window": None,
    "eos_token_id": None,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN: Json = {
    **_EVERY,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            model_type="llama",
            defaults={
                **_EVERY,
                "num_key_value_heads": None,
                "max_position_embeddings": 2048,
                "eos_token_id": 2,
            },
            attention_bias="stated",
            mlp_bias=True,
        ),
        "MistralForCausalLM": Family(
            model_type="mistral",
            defaults={
                **_EVERY,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
                "eos_token_id": 2,
            },
            windows="all",
        ),
        "Qwen2ForCausalLM": Family(
            model_type="qwen2", defaults=_QWEN, attention_bias="qkv", windows="stated"
        ),
        "Qwen3ForCausalLM": Family(
            model_type="qwen3",
            defaults={**_QWEN, "head_dim": 128},
            attention_bias="stated",
            qk_norm=True,
            windows="stated",
        ),
    }
)
