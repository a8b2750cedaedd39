"""Lists model features that the compiled CPU step (`csrc/step.cpp`) lacks. Knows no torch."""

from __future__ import annotations

from disagg.models.model_config import ModelConfig


def not_compiled(config: ModelConfig) -> str:
    """A model's features that the compiled step lacks, as a phrase; empty if it has all of them."""
    is_partial = config.latent is None and config.rope_dim != config.head_dim
    has = {
        "experts": config.experts is not None,
        "attention sinks": config.sinks,
        "latents": config.latent is not None,
        "heads that are rotated in part": is_partial,
        "norms over all heads": config.qk_norm_all_heads,
        "norms after attention and MLP": config.norms != "before",
        "norms in float32": config.norms_less_one,
        "scaled embeddings": config.scaled_embedding,
        "different RoPE settings for layers with a window": config.window_rope is not None,
        "an unusual scale of attention scores": config.score_scale is not None,
        "capped attention scores": config.score_cap is not None,
        "capped logits": config.logit_cap is not None,
        "GELU": config.activation == "gelu_tanh",
    }
    *others, last = [what for what, is_so in has.items() if is_so] or [""]
    return f"{', '.join(others)} and {last}" if others else last
