"""What config.json says about multi-head latent attention (arXiv 2405.04434). Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.models.config_fields import Fields
from disagg.models.family import Family
from disagg.models.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Attention in which the keys and values of all heads are made from one small vector of each
    token, its latent.

    The cache keeps the latent and one key with rotary positions. All heads share both.

    Attributes:
        rank: values of a latent (`kv_lora_rank`).
        query_rank: values of the vector that queries are made from (`q_lora_rank`); None: queries
            are made from the hidden state.
        rope_dim: values of a query, and of a key, with rotary positions (`qk_rope_head_dim`).
        nope_dim: values of both without positions (`qk_nope_head_dim`).
        value_dim: values of a head's value (`v_head_dim`).
        scale: what scores are multiplied by before the softmax.
        is_interleaved: positions rotate pairs of neighbouring values. Otherwise they rotate value i
            of the first half together with value i of the second half.
    """

    rank: int
    query_rank: int | None
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    is_interleaved: bool

    @property
    def query_dim(self) -> int:
        """Values of a head's query, before it is multiplied by the matrix that makes keys."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Values that the cache keeps of each token in each layer."""
        return self.rank + self.rope_dim


def latent_config(fields: Fields, rope: RopeConfig, family: Family) -> LatentConfig:
    """Raises `ModelError`: a size is missing or wrong, or something is not supported."""
    raw = fields.raw
    rope_dim, nope_dim = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    num_heads = fields.size("num_attention_heads")
    if rope_dim % 2:
        raise fields.wrong(f"qk_rope_head_dim must be even, not {rope_dim}")
    if raw.get("head_dim", rope_dim) != rope_dim:
        raise fields.wrong(
            f"head_dim is {raw['head_dim']!r}; with latent attention it is that of"
            f" qk_rope_head_dim, {rope_dim}. Take it away"
        )
    if (fields.optional_size("num_key_value_heads") or num_heads) != num_heads:
        raise fields.wrong(
            f"num_key_value_heads is {raw['num_key_value_heads']}, and with latent attention there"
            f" are as many as heads, {num_heads}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if key in raw and fields.flag(key):
            raise fields.wrong(f"{key} is not supported with latent attention")
    is_interleaved = True
    if "rope_interleave" in family.defaults:  # else they always are
        is_interleaved = raw["rope_interleave"] is not None and fields.flag("rope_interleave")
    return LatentConfig(
        rank=fields.size("kv_lora_rank"),
        query_rank=fields.optional_size("q_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.size("v_head_dim"),
        scale=rope.score_factor * (nope_dim + rope_dim) ** -0.5,
        is_interleaved=is_interleaved,
    )
