"""Multi-head latent attention of a layer (DeepSeek-V2, arXiv 2405.04434), with absorbed weights.

A head's key is a matrix times the latent, and so is its value. Instead of making keys, the head's
query is multiplied by the first matrix. Instead of making values, the latents are summed, and the
sum is multiplied by the second matrix. So all heads attend to the latents in the cache directly.

With an index (DeepSeek-V3.2, arXiv 2512.02556) a query attends only to the tokens whose keys in the
index fit it best. DeepSeek's own kernels multiply the queries and keys of the index by a Hadamard
matrix and round them to 8 bits. The matrix is orthogonal, so it would change no score if nothing
were rounded, and nothing is rounded here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import IndexQueries, Ops, Paging, Weight
from disagg.models.model_config import IndexConfig, LatentConfig, ModelConfig
from disagg.models.weights import LayerWeights

_EPS = 1e-6  # epsilon of the norms of latents and indices, whatever `rms_norm_eps` says


@dataclass(frozen=True, slots=True)
class LatentIndex:
    """The index of one layer, which chooses the tokens that a query attends to."""

    config: IndexConfig
    rope_dim: int
    norm: tuple[Tensor, Tensor]  # weight and bias
    weights: Weight  # [num_heads, hidden]: of the index's heads

    @classmethod
    def pack(cls, ops: Ops, config: LatentConfig, layer: LayerWeights) -> LatentIndex | None:
        """The layer's index; None if it has none of its own."""
        if config.index is None or layer.index_weights is None:
            return None
        assert layer.index_norm is not None and layer.index_norm_bias is not None
        norm = layer.index_norm, layer.index_norm_bias
        return cls(config.index, config.rope_dim, norm, ops.pack_table(layer.index_weights))

    def ask(
        self, ops: Ops, normed: Tensor, queries: Tensor, keys: Tensor, rope_rows: Tensor
    ) -> tuple[IndexQueries, Tensor]:
        """What a step asks the index, and the keys that it adds, [num_tokens, head_dim].

        Args:
            normed: [num_tokens, hidden].
            queries, keys: as projected, [num_tokens, num_heads * head_dim] and [.., head_dim].
        """
        config, rope_dim, num_tokens = self.config, self.rope_dim, len(keys)
        heads = keys.new_empty(num_tokens, config.num_heads + 1, config.head_dim)
        by_head = queries.view(num_tokens, config.num_heads, config.head_dim)
        normal = layer_norm(keys, (config.head_dim,), *self.norm, _EPS)
        for source, target in ((by_head, heads[:, :-1]), (normal, heads[:, -1])):
            ends = source[..., :rope_dim], target[..., :rope_dim]
            _arrange(*ends, is_interleaved=config.is_interleaved)
            target[..., rope_dim:] = source[..., rope_dim:]
        ops.norm_rope_(heads, None, 0.0, rope_rows)
        weights = ops.project(normed.float(), self.weights)
        weights = weights * (config.num_heads * config.head_dim) ** -0.5
        return IndexQueries(heads[:, :-1], weights), heads[:, -1]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention of one layer, with its weights in the form that the device wants."""

    config: LatentConfig
    num_heads: int
    query_norm: Tensor | None
    query: Weight | None  # [num_heads * query_dim (and queries of the index), query_rank]
    index: LatentIndex | None
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
            index=LatentIndex.pack(ops, latent, layer),
            norm=layer.kv_a_norm,
            keys=keys.contiguous(),
            values=values.transpose(1, 2).contiguous(),
        )

    def __call__(
        self,
        ops: Ops,
        normed: Tensor,
        projected: Tensor,
        rope_rows: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: Paging,
    ) -> Tensor:
        """Compute attention.

        Args:
            normed: [num_tokens, hidden], of which `projected` was made.
            projected: [num_tokens, query width + cached_dim]: the queries, or the vectors from
                which they are made; then the cached vectors before norms and rotation.

        Returns:
            [num_tokens, num_heads * value_dim].
        """
        config = self.config
        heads, asked = self._heads(ops, normed, projected, rope_rows)
        summed = ops.latent_attention(
            heads, kv_cache, layer, paging, config.rank, config.scale, asked
        )
        made = projected.new_empty(len(projected), self.num_heads, config.value_dim)
        torch.bmm(summed.transpose(0, 1), self.values, out=made.transpose(0, 1))
        return made.flatten(1)

    def _heads(
        self, ops: Ops, normed: Tensor, projected: Tensor, rope_rows: Tensor
    ) -> tuple[Tensor, IndexQueries | None]:
        """Absorbed queries, and the cached vectors: [num_tokens, num_heads + 1, cached_dim]; and
        what the layer asks its index, if it has one."""
        config, index = self.config, self.index
        num_cached = config.key_dim if index is None else config.cached_dim
        low, cached = projected.tensor_split((-num_cached,), dim=1)
        if self.query is not None:
            assert self.query_norm is not None
            low = ops.project(ops.rms_norm(low.contiguous(), self.query_norm, _EPS), self.query)
        low, of_index = low.tensor_split((self.num_heads * config.query_dim,), dim=1)
        queries = low.view(len(low), self.num_heads, config.query_dim)
        heads = projected.new_empty(projected.shape[0], self.num_heads + 1, config.cached_dim)
        absorbed = heads[:, :-1, : config.rank].transpose(0, 1)
        torch.bmm(queries[..., : config.nope_dim].transpose(0, 1), self.keys, out=absorbed)
        latents = cached[:, : config.rank].contiguous()
        heads[:, -1, : config.rank] = ops.rms_norm(latents, self.norm, _EPS)
        key, key_of_index = cached[:, config.rank :].tensor_split((config.rope_dim,), dim=1)
        turned, is_interleaved = heads[..., config.rank : config.key_dim], config.is_interleaved
        _arrange(queries[..., config.nope_dim :], turned[:, :-1], is_interleaved=is_interleaved)
        _arrange(key, turned[:, -1], is_interleaved=is_interleaved)
        ops.norm_rope_(turned, None, 0.0, rope_rows)
        if index is None:
            if config.index is not None:  # the layer shares another's choice
                heads[:, -1, config.key_dim :] = 0
            return heads, None
        asked, keys = index.ask(ops, normed, of_index, key_of_index, rope_rows)
        heads[:, -1, config.key_dim :] = keys
        return heads, asked


def _arrange(source: Tensor, target: Tensor, *, is_interleaved: bool) -> None:
    """Copy `source` in the order that `norm_rope_` needs.

    `norm_rope_` rotates value i of the first half together with value i of the second half.
    Queries and keys are reordered in the same way, so scores do not change.
    """
    if is_interleaved:
        source = source.view(*source.shape[:-1], -1, 2).transpose(-1, -2)
        target = target.view(*target.shape[:-1], 2, -1)
    target.copy_(source)
