"""A plain config.json, and changes of it: keys that are absent, null or odd."""

from __future__ import annotations

from typing import Any

ABSENT = object()
PLAIN: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
SLIDES = {"use_sliding_window": True, "sliding_window": 16}

FLAGS: list[Any] = [None, True, False, 1, "false"]
ODD: list[Any] = [ABSENT, None, 0, -1, "8", 2.5, True]
CHANGES: list[dict[str, Any]] = [
    {},
    *({key: value} for key in PLAIN for value in ODD),
    *({"head_dim": value} for value in (None, 0, 8, 15, "8")),
    *({"hidden_act": value} for value in (ABSENT, None, "gelu", "silu")),
    *({key: value} for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")
      for value in FLAGS),
    {"hidden_size": 66},
    {"num_key_value_heads": 3},
    {"rms_norm_eps": "1e-5"},
    *({"rope_theta": value} for value in (None, 0, 1, 5e5, 10000, "10000", -1.0)),
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"rope_scaling": []},
    {"rope_scaling": "linear"},
    *({"partial_rotary_factor": value} for value in (None, 1.0, 0.5)),
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0},
     "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
    {"rope_scaling": {"rope_type": None, "factor": 2.0}},
    *({"rope_scaling": {"type": kind, "factor": value}}
      for kind in ("linear", "dynamic", "llama3", "yarn", "longrope")
      for value in (2.0, 3, None, 0, "2")),
    *({"rope_scaling": {"type": kind}} for kind in ("linear", "dynamic", "llama3", "yarn")),
    *({"rope_scaling": {**LLAMA3, key: value}}
      for key in LLAMA3 for value in (None, 0, 2, 16.0, "2")),
    {"rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key[0] != "o"}},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    *({"rope_scaling": {**YARN, key: value}} for key in YARN for value in (None, 2, 16.0, "2")),
    {"rope_scaling": {key: YARN[key] for key in YARN if key[0] != "o"}},
    {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    {"rope_scaling": YARN, "original_max_position_embeddings": None},
    {"rope_scaling": {**YARN, "factor": None}, "original_max_position_embeddings": 32},
    *({"rope_scaling": {**YARN, key: value}}
      for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                  "truncate")
      for value in (None, 0, 0.7, 40.0, True, False)),
    {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": 4}},
    {"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}},
    *({"sliding_window": value} for value in (None, 0, 16, "16", -1)),
    {"use_sliding_window": True},
    {"use_sliding_window": None},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
    *({**SLIDES, "max_window_layers": value} for value in (ABSENT, None, 0, 2, 9, -1, "2")),
    {**SLIDES, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {**SLIDES, "layer_types": ["sliding_attention"] * 3},
    {**SLIDES, "layer_types": ["chunked_attention"] * 4},
    {"layer_types": ["sliding_attention"] * 4},
    {"layer_types": ["full_attention"] * 4},
    {"layer_types": "full_attention"},
    *({"layer_types": value} for value in (["linear_attention", "full_attention"] * 2,
                                           ["linear_attention"] * 4)),
    *({"full_attention_interval": value} for value in (1, 2, 3, 9, 0, "2")),
    *({key: value} for key in ("linear_num_key_heads", "linear_num_value_heads",
                               "linear_key_head_dim", "linear_value_head_dim",
                               "linear_conv_kernel_dim")
      for value in (ABSENT, None, 1, 2, 3, 8, 0, "4")),
    *({"num_experts_per_tok": value} for value in (ABSENT, 1, 7, "2")),
    *({"norm_topk_prob": value} for value in FLAGS),
    *({"qkv_bias": value} for value in FLAGS),
    *({"mlp_only_layers": value} for value in (None, [], [1, 2], [9], "1")),
    *({"decoder_sparse_step": value} for value in (1, 2, 3, 0)),
    *({"swiglu_limit": value} for value in (1, 0.5, "7")),
    *({"first_k_dense_replace": value} for value in (0, 2, 9, -1, None, "1")),
    *({"mlp_layer_types": value}
      for value in (None, ["dense", "sparse"] * 2, ["sparse"] * 4, ["dense"] * 3, ["x"] * 4)),
    *({"rope_interleave": value} for value in (None, False, 1)),
    *({"topk_method": value} for value in ("greedy", "group_limited_greedy", "noaux_tc", None)),
    *({"n_group": value} for value in (ABSENT, None, 1, 2, 3, 8)),
    *({"topk_group": value} for value in (None, 0, 1, 4, 5)),
    *({"routed_scaling_factor": value} for value in (ABSENT, 1, 0.5, 0, "2")),
    *({"n_shared_experts": value} for value in (ABSENT, None, 2)),
    *({"query_pre_attn_scalar": value} for value in (ABSENT, None, 0, 24, "8", 2.5)),
    *({"final_logit_softcapping": value} for value in (ABSENT, None, 30.0, "8", -1.0)),
    *({"attn_logit_softcapping": value} for value in (ABSENT, None, 50.0, "8")),
    *({"hidden_activation": value} for value in (ABSENT, None, "gelu", "silu")),
    *({"sliding_window_pattern": value} for value in (ABSENT, 1, 3, 9, "3")),
    *({"rope_local_base_freq": value} for value in (ABSENT, None, 5e5, 1, "2")),
    {"rope_theta": 5e5, "rope_local_base_freq": 1e4},
    {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 2e4}}},
    {"rope_parameters": {"sliding_attention": LLAMA3, "full_attention": None}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
     "rope_theta": 2e5},
    {"rope_parameters": {"full_attention": YARN}, "rope_scaling": YARN},
    *({"no_rope_layers": value} for value in ([], [0, 1, 1, 0, 1], [1] * 3, [0, 1, 2, 1], "1")),
    *({"no_rope_layer_interval": value} for value in (ABSENT, 2, 9, 0, None)),
    *({key: value}
      for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier",
                  "logits_scaling")
      for value in (ABSENT, 0.3, "2")),
    *({"rope_scaling": {**LONGROPE, key: value}, "original_max_position_embeddings": original}
      for key, value, original in (
          ("factor", 4.0, 64), ("factor", None, 64), ("attention_factor", 1.5, 256),
          ("short_factor", None, 64), ("long_factor", [1.0], 64), ("rope_theta", 5e5, 64))),
    *({key: value} for key in ("attention_out_bias", "use_bias") for value in FLAGS),
    {"clip_qkv": 8.0},
    {"use_bidirectional_attention": True},
    {"eos_token_id": ABSENT},
    *({"eos_token_id": value} for value in (None, 0, 5, [5, 6], "</s>")),
]  # fmt: skip
