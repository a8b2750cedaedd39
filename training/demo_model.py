"""The decoder that is trained: Qwen3's arithmetic, written for speed on one CPU core.

Names of the parameters are those of `Qwen3ForCausalLM`, so that a checkpoint is the state dict.
Master weights are float32; every matrix multiplication and the residual stream run in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from training.demo_tokenizer import (
    IM_END_ID,
    IM_START_ID,
    MAX_LENGTH,
    PAD_ID,
    TOOLS_VOCAB_SIZE,
    VOCAB_SIZE,
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes that tell one demo model from another."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6
    vocab_size: int = VOCAB_SIZE

    def hf_config(self) -> dict[str, object]:
        """Return the content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": IM_START_ID,
            "eos_token_id": IM_END_ID,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": MAX_LENGTH,
            "max_window_layers": self.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": PAD_ID,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


SHAPES = {
    "small": ModelShape(128, 384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32),
    "large": ModelShape(384, 1024, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=64),
}
SHAPES["tools"] = replace(SHAPES["small"], vocab_size=TOOLS_VOCAB_SIZE)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float, initial: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), initial))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]; the result has x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Linear(nn.Linear):
    """A bias-free linear layer with a float32 master weight that multiplies in x's dtype."""

    def __init__(self, size_in: int, size_out: int, initial_std: float) -> None:
        super().__init__(size_in, size_out, bias=False)
        nn.init.normal_(self.weight, std=initial_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., size_in] to [..., size_out]."""
        return functional.linear(x, self.weight.to(x.dtype))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions to x [batch, heads, length, head_dim], pairing halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with normed queries and keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, head_dim = shape.hidden_size, shape.head_dim
        self.head_dim = head_dim
        self.num_groups = shape.num_heads // shape.num_kv_heads
        std = hidden**-0.5
        self.q_proj = Linear(hidden, shape.num_heads * head_dim, std)
        self.k_proj = Linear(hidden, shape.num_kv_heads * head_dim, std)
        self.v_proj = Linear(hidden, shape.num_kv_heads * head_dim, std)
        self.o_proj = Linear(
            shape.num_heads * head_dim, hidden, std / (2 * shape.num_layers) ** 0.5
        )
        # A gain above one lets attention become sharp enough for one key among 2,000.
        self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps, initial=1.5)
        self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Attend over x [batch, length, hidden]; cosine and sine are [length, head_dim / 2]."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        k = k.repeat_interleave(self.num_groups, dim=1)
        v = v.repeat_interleave(self.num_groups, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, wide = shape.hidden_size, shape.intermediate_size
        self.gate_proj = Linear(hidden, wide, hidden**-0.5)
        self.up_proj = Linear(hidden, wide, hidden**-0.5)
        self.down_proj = Linear(wide, hidden, wide**-0.5 / (2 * shape.num_layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, length, hidden] to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Advance the residual stream x [batch, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Decoder(nn.Module):
    """Embedding, blocks and final norm; the embedding is also the output matrix."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Return (cosine, sine) of the positions, each [length, head_dim / 2] float32."""
        head_dim, device = self.shape.head_dim, self.embed_tokens.weight.device
        exponents = torch.arange(0, head_dim, 2, device=device) / head_dim
        angles = torch.outer(torch.arange(length, device=device), self.shape.rope_theta**-exponents)
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the residual stream [batch, length, hidden] of ids [batch, length].

        The final norm belongs to `logits`: training needs it only where an answer stands.
        """
        cosine, sine = (part.to(dtype) for part in self.rotary(ids.shape[1]))
        x: Tensor = self.embed_tokens(ids).to(dtype)
        for block in self.layers:
            x = block(x, cosine, sine)
        return x

    def logits(self, residual: Tensor) -> Tensor:
        """Return float32 logits [..., vocab] for the residual stream [..., hidden]."""
        hidden = self.norm(residual)
        return functional.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).float()
