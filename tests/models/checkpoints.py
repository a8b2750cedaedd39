"""Small random checkpoints, written by transformers itself, and what transformers computes."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor

from disagg.models.decoder import load_model
from disagg.models.description import describe_model
from tests.models.paging import Tokens, new_slab, run_step

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_ROPE = {"rope_theta": 10000.0}
_LLAMA3 = {
    **_ROPE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {**_ROPE, "rope_type": "linear", "factor": 2.0}
_SLIDING = {"use_sliding_window": True, "sliding_window": 9}

_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_QWEN3_NEXT = {
    **_EXPERTS,
    "head_dim": 16,
    "shared_expert_intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
    # What random layers read of a state is small, and its norm would multiply roundings by 1000.
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
    },
}
_QWEN3_5 = {
    key: value
    for key, value in _QWEN3_NEXT.items()
    if key not in (*_EXPERTS, "shared_expert_intermediate_size")
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
# Few tokens are chosen, and so many heads score that no two tokens have the score 0.
_INDEX = {
    **_LATENT,
    "q_lora_rank": 14,
    "index_topk": 11,
    "index_head_dim": 14,
    "index_n_heads": 12,
}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
_GLM = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_MINIMAX = {"head_dim": 16, "num_local_experts": 7, "num_experts_per_tok": 3}
_GEMMA2 = {
    "head_dim": 16,
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 1.25,
}
_GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
}
_GEMMA3N = {
    "head_dim": 16,
    "sliding_window": 9,
    "num_hidden_layers": 7,
    "layer_types": [
        f"{kind}_attention"
        for kind in ("sliding", "full", *["sliding"] * 2, "full", "sliding", "full")
    ],
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 5,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0, 0.0, 0.7, 0.0],
}
_LONGROPE = {
    **_ROPE,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 6.0, 12.0],
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
_MINISTRAL3 = {
    **_YARN,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 9,
    "rope_parameters": {**_YARN, "truncate": False},
    "swiglu_limit": 0.5,
}

# name: (family, what differs from `_SHAPE`). Windows are shorter than the contexts of the tests.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased-llama3": (
        "Llama",
        {
            "rope_parameters": _LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama-linear-no-groups": ("Llama", {"rope_parameters": _LINEAR, "num_key_value_heads": 6}),
    "mistral-sliding": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed-windows": ("Qwen2", {**_SLIDING, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-mixed-windows": (
        "Qwen3",
        {**_SLIDING, "head_dim": 16, "max_window_layers": 2, "attention_bias": True},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-sliding": ("Phi3", {"pad_token_id": 0, "sliding_window": 11}),
    # Contexts of the tests are longer than the original length of the first one, and shorter than
    # that of the second one.
    "phi3-longrope": (
        "Phi3",
        {"pad_token_id": 0, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi3-longrope-in-part": (
        "Phi3",
        {
            "pad_token_id": 0,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.5, "factor": 4.0},
            "original_max_position_embeddings": 256,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 3, "sliding_window": 11}),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-dense-between": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-dense-first": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 16, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "qwen3-next": ("Qwen3Next", _QWEN3_NEXT),
    "qwen3-next-odd": (
        "Qwen3Next",
        {
            **_QWEN3_NEXT,
            "num_hidden_layers": 5,
            "layer_types": [*["linear_attention"] * 2, *["full_attention", "linear_attention"] * 2][
                :5
            ],
            "head_dim": 24,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5": ("Qwen3_5", _QWEN3_5),
    "qwen3.5-odd": (
        "Qwen3_5",
        {
            **_QWEN3_5,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 40},
    ),
    "deepseek-v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **_LATENT,
            **_GROUPS,
            "q_lora_rank": 14,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_LATENT,
            **_GROUPS,
            "q_lora_rank": 14,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        {
            **_INDEX,
            **_GROUPS,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {**_INDEX, "index_topk": 16, "indexer_types": ["full", "shared", "full"]},
    ),
    "glm4-moe": ("Glm4Moe", {**_GLM, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-odd": (
        "Glm4Moe",
        {**_GLM, **_GROUPS, "head_dim": 24, "partial_rotary_factor": 0.25, "norm_topk_prob": False},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**_LATENT, "q_lora_rank": 14}),
    "minimax-m2": ("MiniMaxM2", {**_MINIMAX, "rotary_dim": 8}),
    "minimax-m2-whole-heads": ("MiniMaxM2", {**_MINIMAX, "rope_parameters": _YARN}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma-untied-biased": (
        "Gemma",
        {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2": ("Gemma2", _GEMMA2),
    "gemma2-windows-named": (
        "Gemma2",
        {
            **_GEMMA2,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma3-odd": (
        "Gemma3",
        {
            **_GEMMA3,
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 0.75,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": _LINEAR,
                "sliding_attention": {"rope_theta": 7.0},
            },
        },
    ),
    "gemma3n": ("Gemma3n", _GEMMA3N),
    "gemma3n-odd": (
        "Gemma3n",
        {
            **_GEMMA3N,
            "num_kv_shared_layers": 0,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 0.75,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-yarn": ("Olmo2", {"rope_parameters": _YARN, "attention_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 5}),
    "olmo3-yarn": (
        "Olmo3",
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _ROPE},
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "smollm3-named": (
        "SmolLM3",
        {
            "pad_token_id": 0,
            "no_rope_layers": [0, 1, 0],
            "rope_parameters": _YARN,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": _MINISTRAL3, "pad_token_id": 0},
    ),
    "granite": ("Granite", {**_GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite-moe": (
        "GraniteMoe",
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0, "attention_bias": False}),
    "exaone4": ("Exaone4", {"sliding_window": 9, "num_hidden_layers": 5}),
    "exaone4-full": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "ernie4-5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "gpt-oss-windows-named": (
        "GptOss",
        {**_GPT_OSS, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
}
# Adapters change these, and ranks have shares of most: not of models with recurrent states.
WITHOUT_STATES = {
    name: each for name, each in VARIANTS.items() if "linear_num_key_heads" not in each[1]
}
DIVISIBLE = {name: each for name, each in WITHOUT_STATES.items() if each[0] != "Gemma3n"}


@dataclass(frozen=True)
class Checkpoint:
    """A directory as `save_pretrained` writes it.

    Args:
        make_model: makes the model that was written.
    """

    directory: Path
    make_model: Callable[[], Any]

    @functools.cached_property
    def model(self) -> Any:
        """The model that was written. Other tests may have it too, so nobody may change it."""
        return self.make_model()

    def logits(self, token_ids: list[int]) -> Tensor:
        """What transformers computes for a whole prompt: [num_tokens, vocab_size]."""
        with torch.no_grad():
            out: Tensor = self.model(torch.tensor([token_ids])).logits[0].float()
        return out


def config_class(family: str) -> Any:
    """Of transformers, for a model of text alone."""
    found: Any = getattr(transformers, f"{family}ForCausalLM").config_class
    return found


Files: TypeAlias = dict[str, bytes]  # by name
# By all that decides them: hundreds of tests want the same.
_made: dict[str, tuple[Files, Any]] = {}


def write_checkpoint(
    directory: Path,
    variant: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard: str = "1GB",
    **changes: Any,
) -> Checkpoint:
    """Write one of `VARIANTS` with every weight, bias and norm drawn at random.

    Args:
        changes: of its configuration.
    """
    key = json.dumps([variant, str(dtype), shard, changes], sort_keys=True)
    if key not in _made:
        model = _new_model(variant, dtype, changes)
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch, max_shard_size=shard)
            _made[key] = files_in(Path(scratch)), model
    files, model = _made[key]
    write_files(directory, files)
    torch.manual_seed(sum(variant.encode()))  # what a test draws does not depend on those before
    return Checkpoint(directory, lambda: model)


def files_in(directory: Path) -> Files:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def write_files(directory: Path, files: Files) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)


def _new_model(variant: str, dtype: torch.dtype, changes: dict[str, Any]) -> Any:
    family, own = VARIANTS[variant]
    config = config_class(family)(**{**_SHAPE, **own, **changes})
    torch.manual_seed(sum(variant.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model.to(dtype)


def assert_logits_are_transformers(checkpoint: Checkpoint, **options: Any) -> None:
    """In float32, of a prompt in two chunks and of two tokens after it.

    Args:
        options: of `load_model`.
    """
    model = describe_model(checkpoint.directory)
    decoder = load_model(model, torch.float32, torch.device("cpu"), **options)
    slab = new_slab(model.config, 16, 4, torch.float32)
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    tokens = Tokens(ids, list(range(10)))
    for count in (20, 13, 1, 1):
        run_step(decoder, slab, [(tokens, count)], 4)
    wanted = checkpoint.logits(ids)
    assert wanted.abs().max() > 0.5
    for logits, end in zip(tokens.logits, (20, 33, 34, 35), strict=True):
        torch.testing.assert_close(logits, wanted[end - 1], atol=1e-4, rtol=0)
