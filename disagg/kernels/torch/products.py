"""Attention as two matrix products and a softmax, for cases that torch's own attention lacks."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_by_products(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    cap: float | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend with a softmax in float32.

    Args:
        q: [num_seqs, num_heads, num_queries, head_dim].
        keys, values: [num_seqs, num_kv_heads, num_keys, head_dim].
        mask: added to the scores, or None.
        sinks: [num_heads, num_queries or 1, 1], or None.
        scale, cap: as in `ops.Scores`.
        scales: factors of keys and of values, [num_seqs, num_kv_heads, 1, num_keys] each; or None.

    Returns:
        [num_seqs, num_heads, num_queries, head_dim].
    """
    packed = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])  # queries that share a KV head
    scores = torch.matmul(packed, keys.transpose(2, 3)).float()
    scores *= scale if scales is None else scales[0] * scale
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    by_head = scores.view(*q.shape[:3], -1)
    if mask is not None:
        by_head.add_(mask)
    if sinks is None:
        weights = torch.softmax(by_head, -1)
    else:  # sinks take part in the softmax and have no value
        own = sinks.float().expand(*by_head.shape[:-1], 1)
        weights = torch.softmax(torch.cat((by_head, own), -1), -1)[..., :-1].contiguous()
    weights = weights.view(scores.shape)
    if scales is not None:
        weights.mul_(scales[1])
    return torch.matmul(weights.to(q.dtype), values).view(q.shape)
