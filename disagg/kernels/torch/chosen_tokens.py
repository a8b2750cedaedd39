"""Latent attention of each query to the tokens that an index chooses, from torch's operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import IndexQueries, TokenIndex
from disagg.kernels.torch.attention import TorchPaging, read, store

VALUES_AT_ONCE = 1 << 24  # of scores, or of the vectors that some queries have chosen


def attend_to_chosen(
    paging: TorchPaging,
    heads: Tensor,
    kv_cache: KVPages,
    layer: int,
    index: TokenIndex,
    asked: IndexQueries | None,
    value_dim: int,
    scale: float,
) -> Tensor:
    """Write this step's vectors, choose tokens, then attend. See `Ops.latent_attention`."""
    assert paging.chosen is not None
    store(heads[:, -1:, None], kv_cache, layer, paging)
    size, key_dim = kv_cache.values.shape[4], kv_cache.head_dim - index.key_dim
    pages = paging.pages + kv_cache.places[layer][1]
    out = heads.new_empty(len(heads), heads.shape[1] - 1, value_dim)
    for row, (start, end, length) in enumerate(paging.spans):
        of_sequence = pages[:, :, row, : -(-length // size)]
        stored = read(kv_cache, of_sequence, paging.gathered)[0, 0, :length]
        own = torch.arange(end - start)
        seen = length - (end - start) + 1 + own  # tokens that each query sees
        chosen = paging.chosen[start:end, :length]
        if asked is not None:
            queries, weights = asked.queries[start:end], asked.weights[start:end]
            keys = stored[:, key_dim:]
            for rows in torch.split(own, _at_once(queries.shape[1] * length)):
                scores = index_scores(queries[rows], weights[rows], keys)
                choose(scores, seen[rows], chosen[rows[0] : rows[-1] + 1])
        is_chosen = torch.arange(chosen.shape[1]) < seen.unsqueeze(1)
        for rows in torch.split(own, _at_once(chosen.shape[1] * kv_cache.head_dim)):
            vectors = stored[chosen[rows]]
            out[start + rows] = scaled_dot_product_attention(  # a head is a query of its own here
                heads[start + rows, :-1, :key_dim].to(stored.dtype),
                vectors[..., :key_dim],
                vectors[..., :value_dim],
                attn_mask=is_chosen[rows].unsqueeze(1),
                scale=scale,
            )
    return out


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The score of each key for each query, as `IndexQueries` says: [num_queries, num_keys].

    Args:
        keys: [num_keys, key_dim].
    """
    products = torch.matmul(queries.float(), keys.float().t()).relu_()
    return torch.matmul(weights.unsqueeze(1), products).squeeze(1)


def choose(scores: Tensor, seen: Tensor, chosen: Tensor) -> None:
    """Find the keys with the largest scores, the earlier ones of equal scores.

    Args:
        scores: [num_queries, num_keys]; changed.
        seen: int64 [num_queries]: the first so many keys may be chosen.
        chosen: int64 [num_queries, num_chosen], where they are written, in order. If fewer than
            that are seen, keys that are not seen follow.
    """
    places = torch.arange(scores.shape[1])
    scores.masked_fill_(scores.isnan(), torch.inf)
    scores.masked_fill_(places >= seen.unsqueeze(1), -torch.inf)
    least = scores.topk(chosen.shape[1], sorted=False).values.amin(-1, keepdim=True)
    is_above, is_equal = scores > least, scores == least
    num_left = chosen.shape[1] - is_above.sum(-1, keepdim=True)
    is_chosen = is_above | (is_equal & (is_equal.cumsum(-1) <= num_left))
    chosen.copy_(is_chosen.nonzero()[:, 1].view(chosen.shape))


def _at_once(num_values: int) -> int:
    """How many queries with so many values each are computed at once."""
    return max(1, VALUES_AT_ONCE // num_values)
