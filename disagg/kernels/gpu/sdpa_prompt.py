"""Attention of whole prompts by torch: cuDNN's kernel, or FlashAttention if cuDNN has none.

A prompt without a cached prefix has all its keys and values in the projection of its own step, so a
dense kernel that reads no pages suffices. The libraries' kernels are tuned for each chip; ours are
not. It is not yet measured which is faster (`bench.gpu_kernels`), so this is off by default. It
does not support a cached prefix, a window inside the prompt, capped scores, or a quantised cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# `paged_attention` launches shorter prompts together; here each prompt would be one launch.
MIN_TOKENS = 1024
# None of these kernels stores a matrix of scores, for which torch's fallback would take gigabytes.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def whole_prompts(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None,
    min_tokens: int = MIN_TOKENS,
) -> dict[int, slice]:
    """Return the sequences that `attend_prompt` supports, each with its rows of the step."""
    found, first = {}, 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        is_whole = query_len == context_len and (window is None or context_len <= window)
        if is_whole and query_len >= min_tokens:
            found[sequence] = slice(first, first + query_len)
        first += query_len
    return found


def attend_prompt(qkv: Tensor, num_kv_heads: int, out: Tensor, scale: float | None = None) -> None:
    """Attend causally to the keys and values of one prompt.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        out: [num_tokens, num_heads * head_dim], which is written.
        scale: softmax scale; None: head_dim^-0.5.

    Raises:
        RuntimeError: torch has neither kernel for this device, dtype or head size.
    """
    heads = qkv.transpose(0, 1).unsqueeze(0)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    with sdpa_kernel(_BACKENDS, set_priority=True):
        result = scaled_dot_product_attention(
            q, keys, values, is_causal=True, enable_gqa=True, scale=scale
        )
    out.view(-1, num_heads, heads.shape[3]).copy_(result.squeeze(0).transpose(0, 1))
