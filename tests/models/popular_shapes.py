"""config.json of well-known families, made from the numbers that differ between checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def dense(
    architecture: str,
    model_type: str,
    numbers: tuple[int, int, int, int, int, int, int],
    **more: Any,
) -> dict[str, Any]:
    """Layers, hidden, intermediate, heads, KV heads, vocabulary, longest context."""
    keys = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    )
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        **dict(zip(keys, numbers, strict=True)),
        **more,
    }


def llama(*numbers: int, factor: float = 8.0, **more: Any) -> dict[str, Any]:
    """Llama 3.1 and later."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain: dict[str, Any] = {"rope_theta": 500000.0, "rope_scaling": scaling, **more}
    return dense("LlamaForCausalLM", "llama", numbers, **plain)  # type: ignore[arg-type]


def mistral(*numbers: int, **more: Any) -> dict[str, Any]:
    plain = {"sliding_window": None, "rope_theta": 1000000.0, **more}
    return dense("MistralForCausalLM", "mistral", numbers, **plain)  # type: ignore[arg-type]


def qwen2(*numbers: int, **more: Any) -> dict[str, Any]:
    plain = {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072, **more}
    return dense("Qwen2ForCausalLM", "qwen2", numbers, **plain)  # type: ignore[arg-type]


def qwen3(*numbers: int, **more: Any) -> dict[str, Any]:
    plain = {"rope_theta": 1000000.0, "head_dim": 128, "use_sliding_window": False, **more}
    return dense("Qwen3ForCausalLM", "qwen3", numbers, **plain)  # type: ignore[arg-type]


def qwen3_moe(*numbers: int, inner: int, **more: Any) -> dict[str, Any]:
    plain = {
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000000.0,
        **more,
    }
    return dense("Qwen3MoeForCausalLM", "qwen3_moe", numbers, **plain)  # type: ignore[arg-type]


def qwen3_5(kind: str, sizes: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    """Layers, hidden, heads, KV heads; kind: of the model_type."""
    name = f"Qwen3_5{kind.title().replace('_', '')}ForConditionalGeneration"
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    text = {
        "model_type": f"qwen3_5{kind}_text",
        **dict(zip(keys, sizes, strict=True)),
        "vocab_size": 248320,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        **more,
    }
    vision = {"model_type": f"qwen3_5{kind}"}
    whole = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "vision_config": vision}
    return {**other(name, f"qwen3_5{kind}"), **whole, "text_config": text}


DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def deepseek(
    version: str,
    model_type: str,
    numbers: tuple[int, int, int, int, int, int],
    experts: tuple[int, int, int, int],
    **more: Any,
) -> dict[str, Any]:
    """Layers, hidden, intermediate, heads, vocabulary, longest context; experts: their number, of a
    token, size of one, and how many of that size are shared."""
    *sizes, vocabulary, longest = numbers
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    return dense(
        f"Deepseek{version}ForCausalLM",
        model_type,
        (*sizes, numbers[3], vocabulary, longest),  # type: ignore[arg-type]
        **dict(zip(keys, experts, strict=True)),
        moe_layer_freq=1,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        **{"rope_theta": 10000, **more},
    )


def glm(
    numbers: tuple[int, int, int, int, int, int, int], experts: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """GLM-4.5 and later; experts: their number, size of one, and how many layers have none."""
    keys = ("n_routed_experts", "moe_intermediate_size", "first_k_dense_replace")
    return dense(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        numbers,
        **dict(zip(keys, experts, strict=True)),
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        rope_scaling=None,
        rope_theta=1000000,
        eos_token_id=[151329, 151336, 151338],
        **more,
    )


def gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    return dense(
        "GptOssForCausalLM",
        "gpt_oss",
        (num_layers, 2880, 2880, 64, 8, 201088, 131072),
        head_dim=64,
        attention_bias=True,
        num_local_experts=num_experts,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (num_layers // 2),
        swiglu_limit=7.0,
        rope_theta=150000,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        eos_token_id=200002,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    )


def other(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


LLAMA_8B = llama(32, 4096, 14336, 32, 8, 128256, 131072)
QWEN_7B = qwen2(28, 3584, 18944, 28, 4, 152064, 32768)
MIXTRAL = {"num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": None}
QWEN_8B = qwen3(36, 4096, 12288, 32, 8, 151936, 40960)
QWEN_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def compressed(format: str, ignore: Sequence[str] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignore),
    }


KIMI_K2 = deepseek(
    "V3", "kimi_k2", (61, 7168, 18432, 64, 163840, 131072), (384, 8, 2048, 1),
    q_lora_rank=1536, topk_method="noaux_tc", scoring_func="sigmoid", n_group=1,
    topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827,
    first_k_dense_replace=1, num_nextn_predict_layers=0, rope_theta=50000.0,
    rope_scaling={**DEEPSEEK_YARN, "factor": 32.0},
)  # fmt: skip

GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}
GEMMA3_ROPE = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}


def gemma3n(num_layers: int, intermediate_size: int, num_shared: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma3n_text",
        "num_hidden_layers": num_layers,
        "intermediate_size": [intermediate_size] * num_layers,
        "num_kv_shared_layers": num_shared,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (num_layers - 10),
        "layer_types": [
            "full_attention" if layer % 5 == 4 else "sliding_attention"
            for layer in range(num_layers)
        ],
        "hidden_size": 2048,
        "rope_scaling": None,
    }
    whole = other("Gemma3nForConditionalGeneration", "gemma3n")
    return {**whole, "torch_dtype": "bfloat16", "eos_token_id": [1, 106], "text_config": text}
