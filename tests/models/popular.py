"""The checkpoints that people serve most: their config.json by hand, as their cards have them.

Only keys that decide what is computed. Parameters are what the makers publish, in billions; of
models that read images, those of the text part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.models.popular_shapes import (
    AWQ,
    DEEPSEEK_YARN,
    GEMMA2,
    GEMMA3_ROPE,
    GPTQ,
    KIMI_K2,
    LLAMA_8B,
    MIXTRAL,
    QWEN_7B,
    QWEN_8B,
    QWEN_FP8,
    compressed,
    deepseek,
    dense,
    gemma3n,
    glm,
    gpt_oss,
    llama,
    mistral,
    other,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
)


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


POPULAR: dict[str, Popular] = {
    "meta-llama/Llama-3.2-1B-Instruct": Popular(
        llama(16, 2048, 8192, 32, 8, 128256, 131072, factor=32.0, tie_word_embeddings=True,
               head_dim=64), 1.236),
    "meta-llama/Llama-3.2-3B-Instruct": Popular(
        llama(28, 3072, 8192, 24, 8, 128256, 131072, factor=32.0, tie_word_embeddings=True,
               head_dim=128), 3.21),
    "meta-llama/Llama-3.1-8B-Instruct": Popular(LLAMA_8B, 8.03),
    "meta-llama/Llama-3.3-70B-Instruct": Popular(
        llama(80, 8192, 28672, 64, 8, 128256, 131072), 70.55),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": Popular(
        other("MllamaForConditionalGeneration", "mllama"), why_not="images"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Popular(
        other("Llama4ForConditionalGeneration", "llama4"), why_not="chunked attention"),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Popular(LLAMA_8B, 8.03),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": Popular(
        qwen2(64, 5120, 27648, 40, 8, 152064, 131072, max_window_layers=64), 32.76),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": Popular(
        deepseek("V2", "deepseek_v2", (27, 2048, 10944, 16, 102400, 163840), (64, 6, 1408, 2),
                  q_lora_rank=None, topk_method="greedy", scoring_func="softmax", n_group=1,
                  topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0,
                  first_k_dense_replace=1,
                  rope_scaling={**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}), 15.7),
    "deepseek-ai/DeepSeek-R1": Popular(
        deepseek("V3", "deepseek_v3", (61, 7168, 18432, 128, 129280, 163840), (256, 8, 2048, 1),
                  q_lora_rank=1536, topk_method="noaux_tc", scoring_func="sigmoid", n_group=8,
                  topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
                  first_k_dense_replace=3, num_nextn_predict_layers=1,
                  rope_scaling=DEEPSEEK_YARN, quantization_config=QWEN_FP8), 671.0),
    "deepseek-ai/DeepSeek-V3.2": Popular(
        deepseek("V32", "deepseek_v32", (61, 7168, 18432, 128, 129280, 163840), (256, 8, 2048, 1),
                  q_lora_rank=1536, topk_method="noaux_tc", scoring_func="sigmoid", n_group=8,
                  topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
                  first_k_dense_replace=3, num_nextn_predict_layers=1, rope_scaling=DEEPSEEK_YARN,
                  index_topk=2048, index_head_dim=128, index_n_heads=64,
                  quantization_config={**QWEN_FP8, "scale_fmt": "ue8m0"}), 671.9),
    "moonshotai/Kimi-K2-Instruct": Popular(
        {**KIMI_K2, "quantization_config": QWEN_FP8}, 1026.0),
    "moonshotai/Kimi-K2-Thinking": Popular(
        {**KIMI_K2, "rope_scaling": {**DEEPSEEK_YARN, "factor": 64.0},
         "max_position_embeddings": 262144, "quantization_config": compressed(
             "pack-quantized", ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
             num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)}, 1026.0),
    "moonshotai/Kimi-K2.5": Popular(
        other("KimiK25ForConditionalGeneration", "kimi_k25"), why_not="images"),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Popular(
        dense("LlamaForCausalLM", "llama", (24, 2048, 8192, 32, 32, 49152, 8192),
               rope_theta=130000, tie_word_embeddings=True), 1.71),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Popular(
        dense("LlamaForCausalLM", "llama", (22, 2048, 5632, 32, 4, 32000, 2048)), 1.10),
    "mistralai/Mistral-7B-Instruct-v0.3": Popular(
        mistral(32, 4096, 14336, 32, 8, 32768, 32768), 7.25),
    "mistralai/Mistral-Nemo-Instruct-2407": Popular(
        mistral(40, 5120, 14336, 32, 8, 131072, 131072, head_dim=128), 12.25),
    "mistralai/Mistral-Small-24B-Instruct-2501": Popular(
        mistral(40, 5120, 32768, 32, 8, 131072, 32768, head_dim=128), 23.57),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Popular(
        {**other("Mistral3ForConditionalGeneration", "mistral3"), "torch_dtype": "bfloat16",
         "vision_config": {"model_type": "pixtral"},
         "text_config": mistral(40, 5120, 32768, 32, 8, 131072, 131072, head_dim=128)}, 23.57),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Popular(
        dense("MixtralForCausalLM", "mixtral", (32, 4096, 14336, 32, 8, 32000, 32768),
               **MIXTRAL), 46.70),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": Popular(
        dense("MixtralForCausalLM", "mixtral", (56, 6144, 16384, 48, 8, 32768, 65536),
               **MIXTRAL), 140.63),
    "Qwen/Qwen2.5-0.5B-Instruct": Popular(
        qwen2(24, 896, 4864, 14, 2, 151936, 32768, tie_word_embeddings=True,
               max_window_layers=21), 0.494),
    "Qwen/Qwen2.5-7B-Instruct": Popular(QWEN_7B, 7.62),
    "Qwen/Qwen2.5-72B-Instruct": Popular(
        qwen2(80, 8192, 29568, 64, 8, 152064, 32768, max_window_layers=70), 72.71),
    "Qwen/Qwen2.5-Coder-32B-Instruct": Popular(
        qwen2(64, 5120, 27648, 40, 8, 152064, 32768, max_window_layers=70), 32.76),
    "Qwen/Qwen2.5-VL-7B-Instruct": Popular(
        other("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"), why_not="images"),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": Popular(
        dense("Qwen2MoeForCausalLM", "qwen2_moe", (24, 2048, 5632, 16, 16, 151936, 8192),
               num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
               shared_expert_intermediate_size=5632, norm_topk_prob=False,
               decoder_sparse_step=1, use_sliding_window=False, sliding_window=32768,
               max_window_layers=21, rope_theta=1000000.0), 14.32),
    "Qwen/Qwen3-0.6B": Popular(
        qwen3(28, 1024, 3072, 16, 8, 151936, 40960, tie_word_embeddings=True), 0.596),
    "Qwen/Qwen3-8B": Popular(QWEN_8B, 8.19),
    "Qwen/Qwen3-32B": Popular(qwen3(64, 5120, 25600, 64, 8, 151936, 40960), 32.76),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Popular(
        qwen3_moe(48, 2048, 6144, 32, 4, 151936, 262144, inner=768), 30.53),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Popular(
        qwen3_moe(48, 2048, 5472, 32, 4, 151936, 262144, inner=768,
                   shared_expert_intermediate_size=0, qkv_bias=False), 30.53),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": Popular(
        qwen3_moe(94, 4096, 12288, 64, 4, 151936, 262144, inner=1536), 235.09),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Popular(
        dense("Qwen3NextForCausalLM", "qwen3_next", (48, 2048, 5120, 16, 2, 151936, 262144),
               head_dim=256, partial_rotary_factor=0.25, rope_theta=10000000,
               full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
               linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
               num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
               shared_expert_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1,
               mlp_only_layers=[], use_sliding_window=False), 79.67),
    "Qwen/Qwen3.5-27B": Popular(
        qwen3_5("", (64, 5120, 24, 4), intermediate_size=17408, linear_num_value_heads=48), 26.9),
    "Qwen/Qwen3.5-35B-A3B": Popular(
        qwen3_5("_moe", (40, 2048, 16, 2), num_experts=256, num_experts_per_tok=8,
                moe_intermediate_size=512, shared_expert_intermediate_size=512), 34.66),
    "openai/gpt-oss-20b": Popular(gpt_oss(24, 32), 20.91),
    "openai/gpt-oss-120b": Popular(gpt_oss(36, 128), 116.83),
    "google/gemma-7b-it": Popular(
        dense("GemmaForCausalLM", "gemma", (28, 3072, 24576, 16, 16, 256000, 8192), head_dim=256,
               hidden_act="gelu_pytorch_tanh", hidden_activation=None, rope_theta=10000.0,
               eos_token_id=1), 8.54),
    "google/gemma-3-1b-it": Popular(
        dense("Gemma3ForCausalLM", "gemma3_text", (26, 1152, 6912, 4, 1, 262144, 32768),
               head_dim=256, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
               sliding_window=512, sliding_window_pattern=6, rope_theta=1000000,
               rope_local_base_freq=10000, rope_scaling=None, attn_logit_softcapping=None,
               final_logit_softcapping=None, eos_token_id=[1, 106]), 1.0),
    "google/gemma-3-4b-it": Popular(
        {**other("Gemma3ForConditionalGeneration", "gemma3"), "torch_dtype": "bfloat16",
         "eos_token_id": [1, 106], "vision_config": {"model_type": "siglip_vision_model"},
         "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024,
                         "intermediate_size": 10240, "num_hidden_layers": 34, **GEMMA3_ROPE}},
        3.88),
    "google/gemma-3-27b-it": Popular(
        {**other("Gemma3ForConditionalGeneration", "gemma3"), "torch_dtype": "bfloat16",
         "eos_token_id": [1, 106], "vision_config": {"model_type": "siglip_vision_model"},
         "text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "head_dim": 128,
                         "intermediate_size": 21504, "num_hidden_layers": 62,
                         "num_attention_heads": 32, "num_key_value_heads": 16,
                         "query_pre_attn_scalar": 168, "sliding_window": 1024, **GEMMA3_ROPE}},
        27.01),
    "google/gemma-3n-E2B-it": Popular(gemma3n(30, 8192, 10), 4.435),
    "google/gemma-3n-E4B-it": Popular(gemma3n(35, 16384, 15), 6.835),
    "google/gemma-2-9b-it": Popular(
        dense("Gemma2ForCausalLM", "gemma2", (42, 3584, 14336, 16, 8, 256000, 8192), head_dim=256,
              query_pre_attn_scalar=256, **GEMMA2), 9.24),
    "google/gemma-2-27b-it": Popular(
        dense("Gemma2ForCausalLM", "gemma2", (46, 4608, 36864, 32, 16, 256000, 8192), head_dim=128,
              query_pre_attn_scalar=144, **GEMMA2), 27.23),
    "allenai/OLMo-2-1124-7B-Instruct": Popular(
        dense("Olmo2ForCausalLM", "olmo2", (32, 4096, 11008, 32, 32, 100352, 4096),
               rope_theta=500000, rms_norm_eps=1e-6, eos_token_id=100257), 7.30),
    "allenai/Olmo-3-7B-Instruct": Popular(
        dense("Olmo3ForCausalLM", "olmo3", (32, 4096, 11008, 32, 32, 100278, 65536),
               rope_theta=500000, rms_norm_eps=1e-6, sliding_window=4096, eos_token_id=100257,
               layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
               rope_scaling={"rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
                             "attention_factor": 1.2079441541679836,
                             "original_max_position_embeddings": 8192}), 7.30),
    "microsoft/phi-4": Popular(
        dense("Phi3ForCausalLM", "phi3", (40, 5120, 17920, 40, 10, 100352, 16384),
               rope_theta=250000, rope_scaling=None, sliding_window=None), 14.66),
    "microsoft/Phi-4-mini-instruct": Popular(
        dense("Phi3ForCausalLM", "phi3", (32, 3072, 8192, 24, 8, 200064, 131072),
               partial_rotary_factor=0.75, original_max_position_embeddings=4096,
               rope_scaling={"type": "longrope", "short_factor": [1.0] * 48,
                             "long_factor": [1.0 + each for each in range(48)]},
               sliding_window=262144, tie_word_embeddings=True), 3.836),
    "allenai/OLMoE-1B-7B-0924-Instruct": Popular(
        dense("OlmoeForCausalLM", "olmoe", (16, 2048, 1024, 16, 16, 50304, 4096), num_experts=64,
               num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None), 6.92),
    "HuggingFaceTB/SmolLM3-3B": Popular(
        dense("SmolLM3ForCausalLM", "smollm3", (36, 2048, 11008, 16, 4, 128256, 65536),
               rope_theta=5000000.0, no_rope_layer_interval=4, tie_word_embeddings=True), 3.075),
    "mistralai/Ministral-3-8B-Base-2512": Popular(
        {**other("Mistral3ForConditionalGeneration", "mistral3"), "torch_dtype": "bfloat16",
         "vision_config": {"model_type": "pixtral"},
         "text_config": mistral(34, 4096, 14336, 32, 8, 131072, 262144, head_dim=128)
         | {"model_type": "ministral3", "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0,
             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
             "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}}}, 8.49),
    "ibm-granite/granite-3.3-8b-instruct": Popular(
        dense("GraniteForCausalLM", "granite", (40, 4096, 12800, 32, 8, 49159, 131072),
               rope_theta=10000000.0, tie_word_embeddings=True, embedding_multiplier=12.0,
               residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=16.0),
        8.17),
    "ibm-granite/granite-3.1-3b-a800m-instruct": Popular(
        dense("GraniteMoeForCausalLM", "granitemoe", (32, 1536, 512, 24, 8, 49155, 131072),
               num_local_experts=40, num_experts_per_tok=8, rope_theta=1500000.0,
               tie_word_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.22,
               attention_multiplier=0.015625, logits_scaling=6.0), 3.30),
    "LGAI-EXAONE/EXAONE-4.0-32B": Popular(
        dense("Exaone4ForCausalLM", "exaone4", (64, 5120, 27392, 40, 8, 102400, 131072),
               head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG",
               layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16,
               rope_theta=1000000, eos_token_id=361), 32.0),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": Popular(
        dense("SeedOssForCausalLM", "seed_oss", (64, 5120, 27648, 80, 8, 155136, 524288),
               head_dim=128, rope_theta=10000000.0), 36.15),
    "baidu/ERNIE-4.5-0.3B-PT": Popular(
        dense("Ernie4_5ForCausalLM", "ernie4_5", (18, 1024, 3072, 16, 2, 103424, 131072),
               head_dim=128, rope_theta=500000.0, tie_word_embeddings=True), 0.361),
    "zai-org/glm-4-9b-chat-hf": Popular(
        dense("GlmForCausalLM", "glm", (40, 4096, 13696, 32, 2, 151552, 131072), head_dim=128,
               partial_rotary_factor=0.5, attention_bias=True), 9.4),
    "zai-org/GLM-4-9B-0414": Popular(
        dense("Glm4ForCausalLM", "glm4", (40, 4096, 13696, 32, 2, 151552, 32768), head_dim=128,
               partial_rotary_factor=0.5, attention_bias=False), 9.4),
    "zai-org/GLM-4.5-Air": Popular(
        glm((46, 4096, 10944, 96, 8, 151552, 131072), (128, 1408, 1), use_qk_norm=False,
             routed_scaling_factor=1.0), 106.85),
    "zai-org/GLM-4.6": Popular(
        glm((92, 5120, 12288, 96, 8, 151552, 202752), (160, 1536, 3), use_qk_norm=True,
             routed_scaling_factor=2.5), 352.8),
    "zai-org/GLM-4.6-FP8": Popular(
        glm((92, 5120, 12288, 96, 8, 151552, 202752), (160, 1536, 3), use_qk_norm=True,
             routed_scaling_factor=2.5, quantization_config=compressed(
                 "float-quantized", num_bits=8, type="float", strategy="channel")), 352.8),
    "zai-org/GLM-4.7-Flash": Popular(
        {**deepseek("V3", "glm4_moe_lite", (47, 2048, 10240, 20, 154880, 202752), (64, 4, 1536, 1),
                     q_lora_rank=768, topk_method="noaux_tc", n_group=1, topk_group=1,
                     norm_topk_prob=True, routed_scaling_factor=1.8, first_k_dense_replace=1,
                     num_nextn_predict_layers=1, rope_theta=1000000, rope_scaling=None,
                     partial_rotary_factor=1.0),
         "architectures": ["Glm4MoeLiteForCausalLM"], "qk_nope_head_dim": 192, "v_head_dim": 256},
        29.94),
    "zai-org/GLM-5": Popular(
        {**deepseek("V32", "glm_moe_dsa", (78, 6144, 12288, 64, 154880, 202752), (256, 8, 2048, 1),
                     q_lora_rank=2048, topk_method="noaux_tc", scoring_func="sigmoid", n_group=1,
                     topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
                     first_k_dense_replace=3, num_nextn_predict_layers=1, rms_norm_eps=1e-5,
                     index_topk=2048, index_head_dim=128, index_n_heads=32, head_dim=64,
                     indexer_rope_interleave=True,
                     rope_parameters={"rope_type": "default", "rope_theta": 1000000}),
         "architectures": ["GlmMoeDsaForCausalLM"], "qk_nope_head_dim": 192, "v_head_dim": 256},
        744.0),
    "MiniMaxAI/MiniMax-M2": Popular(
        dense("MiniMaxM2ForCausalLM", "minimax_m2", (62, 3072, 1536, 48, 8, 200064, 196608),
               head_dim=128, rotary_dim=64, rope_theta=5000000, num_local_experts=256,
               num_experts_per_tok=8, scoring_func="sigmoid", use_routing_bias=True,
               use_qk_norm=True, qk_norm_type="per_layer", shared_intermediate_size=0,
               quantization_config={**QWEN_FP8, "modules_to_not_convert": [
                   "gate", "e_score_correction_bias", "lm_head"]}), 228.7),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": Popular(
        other("NemotronHForCausalLM", "nemotron_h"), why_not="recurrent state instead of KV"),
    "Qwen/Qwen3-8B-FP8": Popular({**QWEN_8B, "quantization_config": QWEN_FP8}, 8.19),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": Popular(
        qwen3_moe(48, 2048, 6144, 32, 4, 151936, 262144, inner=768,
                   quantization_config=QWEN_FP8), 30.53),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": Popular({**QWEN_7B, "quantization_config": AWQ}, 7.62),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Popular(
        {**QWEN_7B, "quantization_config": GPTQ}, 7.62),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": Popular(
        {**LLAMA_8B, "quantization_config":
         compressed("float-quantized", num_bits=8, type="float", strategy="tensor")}, 8.03),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Popular(
        {**LLAMA_8B, "quantization_config":
         compressed("int-quantized", num_bits=8, type="int", strategy="channel")}, 8.03),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Popular(
        {**LLAMA_8B, "quantization_config":
         compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)},
        8.03),
    "nvidia/Llama-3.1-8B-Instruct-FP4": Popular(
        {**LLAMA_8B, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        8.03),
}  # fmt: skip
