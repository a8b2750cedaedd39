"""What the compiled step of CPUs (`csrc/step.cpp`) does not compute. Knows no torch."""

from __future__ import annotations

from disagg.models.model_config import ModelConfig


def not_compiled(config: ModelConfig) -> str:
    """What a model has that the compiled step does not compute; empty if it computes all."""
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
        "layers with rope settings of their own": config.window_rope is not None,
        "another scale of scores": config.score_scale is not None,
        "capped scores": config.score_cap is not None,
        "capped logits": config.logit_cap is not None,
        "GELU": config.activation == "gelu_tanh",
    }
    return " and ".join(what for what, is_so in has.items() if is_so)
