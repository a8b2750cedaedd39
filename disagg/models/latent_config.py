"""Reads the settings of multi-head latent attention (arXiv 2405.04434). Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.models.config_fields import Fields
from disagg.models.family import Family
from disagg.models.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Settings of attention in which each token has one small vector, its latent.

    The keys and values of all heads are made from the latent. The cache keeps the latent and one
    key with rotary positions. All heads share both.

    Attributes:
        rank: values of a latent (`kv_lora_rank`).
        query_rank: values of the vector from which queries are made (`q_lora_rank`); None: queries
            are made from the hidden state.
        rope_dim: values of a query, and of a key, with rotary positions (`qk_rope_head_dim`).
        nope_dim: values of both without positions (`qk_nope_head_dim`).
        value_dim: values of a head's value (`v_head_dim`).
        scale: scores are multiplied by this before the softmax.
        is_interleaved: whether RoPE rotates pairs of neighbouring values. If not, it rotates value
            i of the first half together with value i of the second half.
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
        """The number of values of a head's query before it is multiplied by the key matrix."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """The number of values that the cache keeps for each token in each layer."""
        return self.rank + self.rope_dim


def latent_config(fields: Fields, rope: RopeConfig, family: Family) -> LatentConfig:
    """Read the settings. Raises `ModelError` if one is missing, wrong or not supported."""
    raw = fields.raw
    rope_dim, nope_dim = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    num_heads = fields.size("num_attention_heads")
    if rope_dim % 2:
        raise fields.wrong(f"qk_rope_head_dim must be even, not {rope_dim}")
    if raw.get("head_dim", rope_dim) != rope_dim:
        raise fields.wrong(
            f"head_dim is {raw['head_dim']!r}, but with latent attention it must equal"
            f" qk_rope_head_dim, {rope_dim}; remove it"
        )
    if (fields.optional_size("num_key_value_heads") or num_heads) != num_heads:
        raise fields.wrong(
            f"num_key_value_heads is {raw['num_key_value_heads']}, but with latent attention it"
            f" must equal the number of heads, {num_heads}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if key in raw and fields.flag(key):
            raise fields.wrong(f"{key} is not supported with latent attention")
    is_interleaved = True
    if "rope_interleave" in family.defaults:  # otherwise they always are
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
