"""Multi-head latent attention of a layer (DeepSeek-V2, arXiv 2405.04434), with absorbed weights.

A head's key is a matrix times the latent, and so is its value. Instead of making keys, the head's
query is multiplied by the first matrix. Instead of making values, the latents are summed, and the
sum is multiplied by the second matrix. So all heads attend to the latents in the cache directly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import Ops, Paging, Weight
from disagg.models.model_config import LatentConfig, ModelConfig
from disagg.models.weights import LayerWeights

_EPS = 1e-6  # epsilon of the norms of latents, whatever `rms_norm_eps` says


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention of one layer, with its weights in the form that the device wants."""

    config: LatentConfig
    num_heads: int
    query_norm: Tensor | None
    query: Weight | None  # [num_heads * query_dim, query_rank]
    norm: Tensor
    keys: Tensor  # [num_heads, nope_dim, rank]
    values: Tensor  # [num_heads, rank, value_dim]

    @classmethod
    def pack(cls, ops: Ops, config: ModelConfig, layer: LayerWeights) -> LatentAttention | None:
        """The layer's latent attention; None if it has another kind of attention."""
        latent = config.latent
        if latent is None:
            return None
        assert layer.kv_b is not None and layer.kv_a_norm is not None
        by_head = layer.kv_b.view(config.num_heads, -1, latent.rank)
        keys, values = by_head.tensor_split((latent.nope_dim,), dim=1)
        return cls(
            config=latent,
            num_heads=config.num_heads,
            query_norm=layer.q_a_norm,
            query=None if layer.q_b is None else ops.pack(layer.q_b, None),
            norm=layer.kv_a_norm,
            keys=keys.contiguous(),
            values=values.transpose(1, 2).contiguous(),
        )

    def __call__(
        self,
        ops: Ops,
        projected: Tensor,
        rope_rows: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: Paging,
    ) -> Tensor:
        """Compute attention.

        Args:
            projected: [num_tokens, query width + cached_dim]: the queries, or the vectors from
                which they are made; then the cached vectors before norm and rotation.

        Returns:
            [num_tokens, num_heads * value_dim].
        """
        config = self.config
        heads = self._heads(ops, projected, rope_rows)
        summed = ops.latent_attention(heads, kv_cache, layer, paging, config.rank, config.scale)
        made = projected.new_empty(len(projected), self.num_heads, config.value_dim)
        torch.bmm(summed.transpose(0, 1), self.values, out=made.transpose(0, 1))
        return made.flatten(1)

    def _heads(self, ops: Ops, projected: Tensor, rope_rows: Tensor) -> Tensor:
        """Absorbed queries, and the cached vectors: [num_tokens, num_heads + 1, cached_dim]."""
        config = self.config
        low, cached = projected.tensor_split((-config.cached_dim,), dim=1)
        if self.query is not None:
            assert self.query_norm is not None
            low = ops.project(ops.rms_norm(low.contiguous(), self.query_norm, _EPS), self.query)
        queries = low.view(len(low), self.num_heads, config.query_dim)
        heads = projected.new_empty(projected.shape[0], self.num_heads + 1, config.cached_dim)
        absorbed = heads[:, :-1, : config.rank].transpose(0, 1)
        torch.bmm(queries[..., : config.nope_dim].transpose(0, 1), self.keys, out=absorbed)
        latents = cached[:, : config.rank].contiguous()
        heads[:, -1, : config.rank] = ops.rms_norm(latents, self.norm, _EPS)
        turned = heads[..., config.rank :]
        self._arrange(queries[..., config.nope_dim :], turned[:, :-1])
        self._arrange(cached[:, config.rank :], turned[:, -1])
        ops.norm_rope_(turned, None, 0.0, rope_rows)
        return heads

    def _arrange(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` in the order that `norm_rope_` needs.

        `norm_rope_` rotates value i of the first half together with value i of the second half.
        Queries and keys are reordered in the same way, so scores do not change.
        """
        if self.config.is_interleaved:
            source = source.view(*source.shape[:-1], -1, 2).transpose(-1, -2)
            target = target.view(*target.shape[:-1], 2, -1)
        target.copy_(source)
