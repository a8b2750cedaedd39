"""The checkpoints that people serve most: their config.json by hand, as their cards have them.

Only keys that decide what is computed. `parameters` are what the makers publish, in billions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Popular:
    """
    Attributes:
        config: what config.json says.
        billions: parameters; 0: it is refused.
        why_not: what the refusal names; empty: it is served.
    """

    config: dict[str, Any]
    billions: float = 0.0
    why_not: str = ""


def _dense(
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


def _llama(*numbers: int, factor: float = 8.0, **more: Any) -> dict[str, Any]:
    """Llama 3.1 and later."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain: dict[str, Any] = {"rope_theta": 500000.0, "rope_scaling": scaling, **more}
    return _dense("LlamaForCausalLM", "llama", numbers, **plain)  # type: ignore[arg-type]


def _mistral(*numbers: int, **more: Any) -> dict[str, Any]:
    plain = {"sliding_window": None, "rope_theta": 1000000.0, **more}
    return _dense("MistralForCausalLM", "mistral", numbers, **plain)  # type: ignore[arg-type]


def _qwen2(*numbers: int, **more: Any) -> dict[str, Any]:
    plain = {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072, **more}
    return _dense("Qwen2ForCausalLM", "qwen2", numbers, **plain)  # type: ignore[arg-type]


def _qwen3(*numbers: int, **more: Any) -> dict[str, Any]:
    plain = {"rope_theta": 1000000.0, "head_dim": 128, "use_sliding_window": False, **more}
    return _dense("Qwen3ForCausalLM", "qwen3", numbers, **plain)  # type: ignore[arg-type]


def _qwen3_moe(*numbers: int, inner: int, **more: Any) -> dict[str, Any]:
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
    return _dense("Qwen3MoeForCausalLM", "qwen3_moe", numbers, **plain)  # type: ignore[arg-type]


_DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def _deepseek(
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
    return _dense(
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


def _glm(
    numbers: tuple[int, int, int, int, int, int, int], experts: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """GLM-4.5 and later; experts: their number, size of one, and how many layers have none."""
    keys = ("n_routed_experts", "moe_intermediate_size", "first_k_dense_replace")
    return _dense(
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


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    return _dense(
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


def _other(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


_LLAMA_8B = _llama(32, 4096, 14336, 32, 8, 128256, 131072)
_QWEN_7B = _qwen2(28, 3584, 18944, 28, 4, 152064, 32768)
_MIXTRAL = {"num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": None}
_QWEN_8B = _qwen3(36, 4096, 12288, 32, 8, 151936, 40960)
_QWEN_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def _compressed(
    format: str, ignore: Sequence[str] = ("lm_head",), **weights: Any
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignore),
    }


_KIMI_K2 = _deepseek(
    "V3", "kimi_k2", (61, 7168, 18432, 64, 163840, 131072), (384, 8, 2048, 1),
    q_lora_rank=1536, topk_method="noaux_tc", scoring_func="sigmoid", n_group=1,
    topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827,
    first_k_dense_replace=1, num_nextn_predict_layers=0, rope_theta=50000.0,
    rope_scaling={**_DEEPSEEK_YARN, "factor": 32.0},
)  # fmt: skip

POPULAR: dict[str, Popular] = {
    "meta-llama/Llama-3.2-1B-Instruct": Popular(
        _llama(16, 2048, 8192, 32, 8, 128256, 131072, factor=32.0, tie_word_embeddings=True,
               head_dim=64), 1.236),
    "meta-llama/Llama-3.2-3B-Instruct": Popular(
        _llama(28, 3072, 8192, 24, 8, 128256, 131072, factor=32.0, tie_word_embeddings=True,
               head_dim=128), 3.21),
    "meta-llama/Llama-3.1-8B-Instruct": Popular(_LLAMA_8B, 8.03),
    "meta-llama/Llama-3.3-70B-Instruct": Popular(
        _llama(80, 8192, 28672, 64, 8, 128256, 131072), 70.55),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": Popular(
        _other("MllamaForConditionalGeneration", "mllama"), why_not="images"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Popular(
        _other("Llama4ForConditionalGeneration", "llama4"), why_not="chunked attention"),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Popular(_LLAMA_8B, 8.03),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": Popular(
        _qwen2(64, 5120, 27648, 40, 8, 152064, 131072, max_window_layers=64), 32.76),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": Popular(
        _deepseek("V2", "deepseek_v2", (27, 2048, 10944, 16, 102400, 163840), (64, 6, 1408, 2),
                  q_lora_rank=None, topk_method="greedy", scoring_func="softmax", n_group=1,
                  topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0,
                  first_k_dense_replace=1,
                  rope_scaling={**_DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}), 15.7),
    "deepseek-ai/DeepSeek-R1": Popular(
        _deepseek("V3", "deepseek_v3", (61, 7168, 18432, 128, 129280, 163840), (256, 8, 2048, 1),
                  q_lora_rank=1536, topk_method="noaux_tc", scoring_func="sigmoid", n_group=8,
                  topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
                  first_k_dense_replace=3, num_nextn_predict_layers=1,
                  rope_scaling=_DEEPSEEK_YARN, quantization_config=_QWEN_FP8), 671.0),
    "deepseek-ai/DeepSeek-V3.2": Popular(
        _other("DeepseekV32ForCausalLM", "deepseek_v32"), why_not=r"sparse .* \(MLA\)"),
    "moonshotai/Kimi-K2-Instruct": Popular(
        {**_KIMI_K2, "quantization_config": _QWEN_FP8}, 1026.0),
    "moonshotai/Kimi-K2-Thinking": Popular(
        {**_KIMI_K2, "rope_scaling": {**_DEEPSEEK_YARN, "factor": 64.0},
         "max_position_embeddings": 262144, "quantization_config": _compressed(
             "pack-quantized", ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
             num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)}, 1026.0),
    "moonshotai/Kimi-K2.5": Popular(
        _other("KimiK25ForConditionalGeneration", "kimi_k25"), why_not="images"),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Popular(
        _dense("LlamaForCausalLM", "llama", (24, 2048, 8192, 32, 32, 49152, 8192),
               rope_theta=130000, tie_word_embeddings=True), 1.71),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Popular(
        _dense("LlamaForCausalLM", "llama", (22, 2048, 5632, 32, 4, 32000, 2048)), 1.10),
    "mistralai/Mistral-7B-Instruct-v0.3": Popular(
        _mistral(32, 4096, 14336, 32, 8, 32768, 32768), 7.25),
    "mistralai/Mistral-Nemo-Instruct-2407": Popular(
        _mistral(40, 5120, 14336, 32, 8, 131072, 131072, head_dim=128), 12.25),
    "mistralai/Mistral-Small-24B-Instruct-2501": Popular(
        _mistral(40, 5120, 32768, 32, 8, 131072, 32768, head_dim=128), 23.57),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Popular(
        _other("Mistral3ForConditionalGeneration", "mistral3"), why_not="images"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Popular(
        _dense("MixtralForCausalLM", "mixtral", (32, 4096, 14336, 32, 8, 32000, 32768),
               **_MIXTRAL), 46.70),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": Popular(
        _dense("MixtralForCausalLM", "mixtral", (56, 6144, 16384, 48, 8, 32768, 65536),
               **_MIXTRAL), 140.63),
    "Qwen/Qwen2.5-0.5B-Instruct": Popular(
        _qwen2(24, 896, 4864, 14, 2, 151936, 32768, tie_word_embeddings=True,
               max_window_layers=21), 0.494),
    "Qwen/Qwen2.5-7B-Instruct": Popular(_QWEN_7B, 7.62),
    "Qwen/Qwen2.5-72B-Instruct": Popular(
        _qwen2(80, 8192, 29568, 64, 8, 152064, 32768, max_window_layers=70), 72.71),
    "Qwen/Qwen2.5-Coder-32B-Instruct": Popular(
        _qwen2(64, 5120, 27648, 40, 8, 152064, 32768, max_window_layers=70), 32.76),
    "Qwen/Qwen2.5-VL-7B-Instruct": Popular(
        _other("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"), why_not="images"),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": Popular(
        _dense("Qwen2MoeForCausalLM", "qwen2_moe", (24, 2048, 5632, 16, 16, 151936, 8192),
               num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
               shared_expert_intermediate_size=5632, norm_topk_prob=False,
               decoder_sparse_step=1, use_sliding_window=False, sliding_window=32768,
               max_window_layers=21, rope_theta=1000000.0), 14.32),
    "Qwen/Qwen3-0.6B": Popular(
        _qwen3(28, 1024, 3072, 16, 8, 151936, 40960, tie_word_embeddings=True), 0.596),
    "Qwen/Qwen3-8B": Popular(_QWEN_8B, 8.19),
    "Qwen/Qwen3-32B": Popular(_qwen3(64, 5120, 25600, 64, 8, 151936, 40960), 32.76),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Popular(
        _qwen3_moe(48, 2048, 6144, 32, 4, 151936, 262144, inner=768), 30.53),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Popular(
        _qwen3_moe(48, 2048, 5472, 32, 4, 151936, 262144, inner=768,
                   shared_expert_intermediate_size=0, qkv_bias=False), 30.53),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": Popular(
        _qwen3_moe(94, 4096, 12288, 64, 4, 151936, 262144, inner=1536), 235.09),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Popular(
        _other("Qwen3NextForCausalLM", "qwen3_next"), why_not="recurrent state instead of KV"),
    "openai/gpt-oss-20b": Popular(_gpt_oss(24, 32), 20.91),
    "openai/gpt-oss-120b": Popular(_gpt_oss(36, 128), 116.83),
    "google/gemma-7b-it": Popular(
        _dense("GemmaForCausalLM", "gemma", (28, 3072, 24576, 16, 16, 256000, 8192), head_dim=256,
               hidden_act="gelu_pytorch_tanh", hidden_activation=None, rope_theta=10000.0,
               eos_token_id=1), 8.54),
    "google/gemma-3-27b-it": Popular(
        _other("Gemma3ForConditionalGeneration", "gemma3"), why_not="Gemma"),
    "google/gemma-2-9b-it": Popular(_other("Gemma2ForCausalLM", "gemma2"), why_not="Gemma"),
    "allenai/OLMo-2-1124-7B-Instruct": Popular(
        _dense("Olmo2ForCausalLM", "olmo2", (32, 4096, 11008, 32, 32, 100352, 4096),
               rope_theta=500000, rms_norm_eps=1e-6, eos_token_id=100257), 7.30),
    "microsoft/phi-4": Popular(
        _dense("Phi3ForCausalLM", "phi3", (40, 5120, 17920, 40, 10, 100352, 16384),
               rope_theta=250000, rope_scaling=None, sliding_window=None), 14.66),
    "microsoft/Phi-4-mini-instruct": Popular(
        _dense("Phi3ForCausalLM", "phi3", (32, 3072, 8192, 24, 8, 200064, 131072),
               partial_rotary_factor=0.75, rope_scaling={"type": "longrope"},
               tie_word_embeddings=True), why_not="rope type 'longrope' is not supported"),
    "zai-org/GLM-4.5-Air": Popular(
        _glm((46, 4096, 10944, 96, 8, 151552, 131072), (128, 1408, 1), use_qk_norm=False,
             routed_scaling_factor=1.0), 106.85),
    "zai-org/GLM-4.6": Popular(
        _glm((92, 5120, 12288, 96, 8, 151552, 202752), (160, 1536, 3), use_qk_norm=True,
             routed_scaling_factor=2.5), 352.8),
    "zai-org/GLM-4.6-FP8": Popular(
        _glm((92, 5120, 12288, 96, 8, 151552, 202752), (160, 1536, 3), use_qk_norm=True,
             routed_scaling_factor=2.5, quantization_config=_compressed(
                 "float-quantized", num_bits=8, type="float", strategy="channel")), 352.8),
    "zai-org/GLM-4.7-Flash": Popular(
        {**_deepseek("V3", "glm4_moe_lite", (47, 2048, 10240, 20, 154880, 202752), (64, 4, 1536, 1),
                     q_lora_rank=768, topk_method="noaux_tc", n_group=1, topk_group=1,
                     norm_topk_prob=True, routed_scaling_factor=1.8, first_k_dense_replace=1,
                     num_nextn_predict_layers=1, rope_theta=1000000, rope_scaling=None,
                     partial_rotary_factor=1.0),
         "architectures": ["Glm4MoeLiteForCausalLM"], "qk_nope_head_dim": 192, "v_head_dim": 256},
        29.94),
    "zai-org/GLM-5": Popular(_other("GlmMoeDsaForCausalLM", "glm_moe_dsa"), why_not=r"\(MLA\)"),
    "MiniMaxAI/MiniMax-M2": Popular(
        _dense("MiniMaxM2ForCausalLM", "minimax_m2", (62, 3072, 1536, 48, 8, 200064, 196608),
               head_dim=128, rotary_dim=64, rope_theta=5000000, num_local_experts=256,
               num_experts_per_tok=8, scoring_func="sigmoid", use_routing_bias=True,
               use_qk_norm=True, qk_norm_type="per_layer", shared_intermediate_size=0,
               quantization_config={**_QWEN_FP8, "modules_to_not_convert": [
                   "gate", "e_score_correction_bias", "lm_head"]}), 228.7),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": Popular(
        _other("NemotronHForCausalLM", "nemotron_h"), why_not="recurrent state instead of KV"),
    "Qwen/Qwen3-8B-FP8": Popular({**_QWEN_8B, "quantization_config": _QWEN_FP8}, 8.19),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": Popular(
        _qwen3_moe(48, 2048, 6144, 32, 4, 151936, 262144, inner=768,
                   quantization_config=_QWEN_FP8), 30.53),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": Popular({**_QWEN_7B, "quantization_config": _AWQ}, 7.62),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Popular(
        {**_QWEN_7B, "quantization_config": _GPTQ}, 7.62),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": Popular(
        {**_LLAMA_8B, "quantization_config":
         _compressed("float-quantized", num_bits=8, type="float", strategy="tensor")}, 8.03),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Popular(
        {**_LLAMA_8B, "quantization_config":
         _compressed("int-quantized", num_bits=8, type="int", strategy="channel")}, 8.03),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Popular(
        {**_LLAMA_8B, "quantization_config":
         _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)},
        8.03),
    "nvidia/Llama-3.1-8B-Instruct-FP4": Popular(
        {**_LLAMA_8B, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        why_not=r"quantised \(modelopt\)"),
}  # fmt: skip
