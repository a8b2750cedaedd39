"""The Llama shapes that benches run, as ours and as transformers' configurations."""

from __future__ import annotations

from typing import Any

from disagg.models.model_config import ModelConfig
from disagg.models.rope import RopeConfig

# vocabulary, hidden, inner, layers, heads, KV heads, head size
SHAPES = {
    "tiny": (256, 64, 128, 2, 2, 1, 32),
    # What a GPU would compute is small, everything else as large as there.
    "rehearsal": (128256, 64, 128, 2, 4, 1, 64),
    "rehearsal-blocks": (8192, 64, 128, 4, 8, 8, 128),
    "15m": (8192, 384, 1024, 6, 6, 2, 64),
    "smollm2": (49152, 576, 1536, 30, 9, 3, 64),
    "160m": (32000, 768, 3072, 12, 12, 4, 64),
    "500m": (32000, 1024, 4096, 28, 16, 8, 64),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8, 128),
}
MAX_MODEL_LEN = 32768


def model_config(shape: str) -> ModelConfig:
    vocab, hidden, inner, layers, heads, kv_heads, head_dim = SHAPES[shape]
    return ModelConfig(
        family="LlamaForCausalLM",
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocab,
        max_model_len=MAX_MODEL_LEN,
        dtype="bfloat16",
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        sliding_windows=(None,) * layers,
    )


def transformers_config(shape: str, max_model_len: int = MAX_MODEL_LEN) -> Any:
    """The same shape for a peer: untied embeddings, and no token that ends an answer."""
    import transformers

    vocab, hidden, inner, layers, heads, kv_heads, head_dim = SHAPES[shape]
    return transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_model_len,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
