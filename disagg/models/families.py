"""The supported model families, with the defaults and switches of their classes in transformers.

If the layers of a new family have nothing new, the family is one entry here. New tensor names are
added in `parts`, and new computations in `decoder`. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from disagg.models.family import ExpertNames, Family, Json

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
_MIXTRAL_EXPERTS = ExpertNames(
    num_experts=("num_local_experts", "num_experts"),
    intermediate_size="intermediate_size",
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    is_normalized=True,
)
_QWEN: Json = {
    **_EVERY,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_QWEN_EXPERTS = ExpertNames(
    num_experts=("num_experts", "num_local_experts"),
    intermediate_size="moe_intermediate_size",
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    has_dense_layers=True,
)
_QWEN_MOE: Json = {
    **_EVERY,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "layer_types": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
_DEEPSEEK: Json = {
    **{key: value for key, value in _EVERY.items() if key != "head_dim"},
    "q_lora_rank": 1536,
}
_DEEPSEEK_EXPERTS = ExpertNames(
    num_experts=("n_routed_experts", "num_local_experts", "num_experts"),
    intermediate_size="moe_intermediate_size",
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    shared="mlp.shared_experts",
    num_shared="n_shared_experts",
    first_dense="first_k_dense_replace",
    scoring="softmax",
)
_DEEPSEEK_V3_EXPERTS = replace(
    _DEEPSEEK_EXPERTS, scoring="sigmoid", score_bias="mlp.gate.e_score_correction_bias"
)
_GEMMA: Json = {
    **{key: value for key, value in _EVERY.items() if key != "hidden_act"},
    "head_dim": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA2 = Family(
    model_type="gemma2",
    defaults={
        **_GEMMA,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    attention_bias="stated",
    windows="alternating",
    norms="around",
    norms_less_one=True,
    scaled_embedding=True,
    activations=("gelu_pytorch_tanh",),
    fits_float16=False,
)
_OLMO2 = Family(
    model_type="olmo2",
    defaults={
        **_EVERY,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    attention_bias="stated",
    qk_norm="all heads",
    norms="after",
)
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
            qk_norm="each head",
            windows="stated",
        ),
        "Phi3ForCausalLM": Family(
            model_type="phi3",
            defaults={
                **_EVERY,
                "num_key_value_heads": None,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "eos_token_id": 32000,
            },
            windows="all",
            is_fused=True,
            rope_kinds=("default",),  # all its other kinds are longrope, whatever their names are
        ),
        "MixtralForCausalLM": Family(
            model_type="mixtral",
            defaults={
                **_EVERY,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "eos_token_id": 2,
                "num_experts_per_tok": 2,
            },
            windows="all",
            experts=_MIXTRAL_EXPERTS,
        ),
        "Qwen2MoeForCausalLM": Family(
            model_type="qwen2_moe",
            defaults={
                **_QWEN_MOE,
                "num_key_value_heads": 16,
                "num_experts_per_tok": 4,
                "qkv_bias": True,
            },
            attention_bias="qkv_bias",
            experts=replace(
                _QWEN_EXPERTS,
                shared="mlp.shared_expert",
                shared_gate="mlp.shared_expert_gate",
                shared_size="shared_expert_intermediate_size",
            ),
        ),
        "Qwen3MoeForCausalLM": Family(
            model_type="qwen3_moe",
            defaults={**_QWEN_MOE, "num_key_value_heads": 4, "num_experts_per_tok": 8},
            attention_bias="stated",
            qk_norm="each head",
            experts=_QWEN_EXPERTS,
        ),
        "DeepseekV2ForCausalLM": Family(
            model_type="deepseek_v2",
            defaults={
                **_DEEPSEEK,
                "num_key_value_heads": None,
                "max_position_embeddings": 2048,
                "eos_token_id": 2,
                "first_k_dense_replace": 0,
                "n_group": None,
                "topk_group": None,
                "topk_method": "greedy",
                "n_shared_experts": 2,
                "norm_topk_prob": False,
                "num_experts_per_tok": None,
                "routed_scaling_factor": 1.0,
            },
            is_latent=True,
            rope_kinds=("default", "yarn"),
            experts=_DEEPSEEK_EXPERTS,
        ),
        "DeepseekV3ForCausalLM": Family(
            model_type="deepseek_v3",
            also_called=("kimi_k2",),
            defaults={
                **_DEEPSEEK,
                "num_key_value_heads": 128,
                "max_position_embeddings": 4096,
                "eos_token_id": 1,
                "first_k_dense_replace": 3,
                "n_group": 8,
                "topk_group": 4,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "num_experts_per_tok": 8,
                "num_nextn_predict_layers": 1,
                "rope_interleave": True,
                "routed_scaling_factor": 2.5,
            },
            is_latent=True,
            rope_kinds=("default", "yarn"),
            experts=_DEEPSEEK_V3_EXPERTS,
        ),
        "Glm4MoeForCausalLM": Family(
            model_type="glm4_moe",
            defaults={
                **_EVERY,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 0.5,
                "use_qk_norm": False,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "num_experts_per_tok": 8,
                "num_nextn_predict_layers": 1,
                "routed_scaling_factor": 1.0,
            },
            attention_bias="qkv attention_bias",
            qk_norm="stated",
            experts=_DEEPSEEK_V3_EXPERTS,
        ),
        "Glm4MoeLiteForCausalLM": Family(
            model_type="glm4_moe_lite",
            defaults={
                **_DEEPSEEK,
                "q_lora_rank": 768,
                "num_key_value_heads": 20,
                "max_position_embeddings": 202752,
                "rms_norm_eps": 1e-5,
                "eos_token_id": 1,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "num_experts_per_tok": 4,
                "rope_interleave": True,
                "routed_scaling_factor": 1.8,
            },
            is_latent=True,
            rope_kinds=("default", "yarn"),
            experts=replace(_DEEPSEEK_V3_EXPERTS, first_dense="", layer_kinds="mlp_layer_types"),
        ),
        "MiniMaxM2ForCausalLM": Family(
            model_type="minimax_m2",
            defaults={
                **_EVERY,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 196608,
                "rope_theta": 5e6,
                "rotary_dim": None,
                "partial_rotary_factor": None,
                "eos_token_id": 200020,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 8,
                "routed_scaling_factor": 1.0,
            },
            qk_norm="all heads",
            experts=replace(
                _MIXTRAL_EXPERTS,
                scoring="sigmoid",
                score_bias="block_sparse_moe.e_score_correction_bias",
            ),
        ),
        "GemmaForCausalLM": Family(
            model_type="gemma",
            defaults={
                **_GEMMA,
                "num_key_value_heads": 16,
                "max_position_embeddings": 8192,
                "hidden_act": "gelu_pytorch_tanh",
            },
            attention_bias="stated",
            norms_less_one=True,
            scaled_embedding=True,
            # Old files say "gelu" but mean the approximation with tanh.
            activations=("gelu_pytorch_tanh", "gelu"),
        ),
        "Gemma2ForCausalLM": _GEMMA2,
        "Gemma3ForCausalLM": replace(
            _GEMMA2,
            model_type="gemma3_text",
            defaults={
                **{key: value for key, value in _GEMMA2.defaults.items() if key[:4] != "attn"},
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "max_position_embeddings": 131072,
                "rope_theta": 1e6,
                "rope_local_base_freq": 10000.0,
                "sliding_window_pattern": 6,
                "final_logit_softcapping": None,
            },
            qk_norm="each head",
            ropes_by_kind=True,
        ),
        "Olmo2ForCausalLM": _OLMO2,
        "Olmo3ForCausalLM": replace(
            _OLMO2,
            model_type="olmo3",
            defaults={**_OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500000.0},
            windows="alternating",
            full_every=4,
            ropes_by_kind=True,
        ),
        "GptOssForCausalLM": Family(
            model_type="gpt_oss",
            defaults={
                **_EVERY,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "truncate": False,
                },
                "sliding_window": 128,
                "layer_types": None,
                "attention_bias": True,
                "num_experts_per_tok": 4,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
            },
            attention_bias="stated",
            windows="alternating",
            sinks=True,
            experts=ExpertNames(
                num_experts=("num_local_experts", "num_experts"),
                intermediate_size="intermediate_size",
                router="mlp.router",
                gate="mlp.experts.gate_up_proj",
                up="",
                down="mlp.experts.down_proj",
                is_normalized=True,
                has_bias=True,
                is_stacked=True,
                is_clamped=True,
            ),
        ),
    }
)

# Known architectures that are not supported, and the missing features.
_MLA = "multi-head latent attention (MLA)"
_IMAGES = "images"
_STATES = "layers with a recurrent state instead of KV"
NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV32ForCausalLM": f"sparse {_MLA}",
        "GlmMoeDsaForCausalLM": f"sparse {_MLA}",
        "Glm4vMoeForConditionalGeneration": _IMAGES,
        "Gemma3nForConditionalGeneration": "layers that share KV, and embeddings of layers",
        "KimiK25ForConditionalGeneration": _IMAGES,
        "Llama4ForCausalLM": "chunked attention",
        "Llama4ForConditionalGeneration": f"chunked attention, and {_IMAGES}",
        "MllamaForConditionalGeneration": _IMAGES,
        "Qwen2VLForConditionalGeneration": _IMAGES,
        "Qwen2_5_VLForConditionalGeneration": _IMAGES,
        "Qwen3VLForConditionalGeneration": _IMAGES,
        "Qwen3VLMoeForConditionalGeneration": _IMAGES,
        "Qwen3NextForCausalLM": _STATES,
        "Qwen3_5ForConditionalGeneration": _STATES,
        "Qwen3_5MoeForConditionalGeneration": _STATES,
        "NemotronHForCausalLM": _STATES,
        "FalconH1ForCausalLM": _STATES,
        "Phi4MMForCausalLM": f"{_IMAGES}, and longrope",
        "PhiMoEForCausalLM": "routing by sparse mixing, and longrope",
        "CohereForCausalLM": "attention and MLP in parallel",
        "Cohere2ForCausalLM": "attention and MLP in parallel",
        "GraniteForCausalLM": "scales of embeddings, attention, residuals and logits",
        "GraniteMoeHybridForCausalLM": _STATES,
        "GPT2LMHeadModel": "learned position embeddings",
    }
)
