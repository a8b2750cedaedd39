"""The norms of q and k: per head, or over all heads together (MiniMax-M2), also across ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.models.communicator import Communicator
from disagg.models.model_config import ModelConfig


def norms_of_heads(
    config: ModelConfig, q_norm: Tensor | None, k_norm: Tensor | None
) -> Tensor | None:
    """Return [num_heads + num_kv_heads, head_dim]; None if the model has no such norms.

    Args:
        q_norm, k_norm: [head_dim], used for each head, or the values of all heads.
    """
    if q_norm is None or k_norm is None:
        return None
    counts = (config.num_heads, config.num_kv_heads)
    return torch.cat(
        [
            norm.view(-1, config.head_dim).expand(count, -1)
            for norm, count in zip((q_norm, k_norm), counts, strict=True)
        ]
    )


def mean_squares(heads: Tensor, num_heads: int, ranks: Communicator | None) -> Tensor:
    """Return float32 [num_tokens, num_heads + num_kv_heads]: the mean square for each head's norm.

    For a head of q it is the mean square of all heads of q, and for a head of k that of all heads
    of k, including those of other ranks. If there are more ranks than KV heads, several ranks have
    copies of a head; all heads have the same number of copies, so the mean does not change.

    Args:
        heads: [num_tokens, num_heads + num_kv_heads, head_dim]: q and k of this rank.
    """
    counts = [num_heads, heads.shape[1] - num_heads]
    squares = torch.linalg.vector_norm(heads, dim=-1, dtype=torch.float32).square_()
    sums = torch.stack([own.sum(-1) for own in squares.split(counts, -1)], -1)
    num_ranks = 1
    if ranks is not None:
        sums, num_ranks = ranks.all_reduce_(sums), ranks.share.num_ranks
    columns = [
        (own / (num_ranks * count * heads.shape[2])).unsqueeze(-1).expand(-1, count)
        for own, count in zip(sums.unbind(-1), counts, strict=True)
    ]
    return torch.cat(columns, -1)
