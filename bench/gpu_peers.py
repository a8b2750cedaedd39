"""What our attention is measured against: FlashInfer and torch's dense attention.

Both get one contiguous cache per layer, as they want it.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_device import seconds
from bench.gpu_paged import Paged

WORKSPACE_NBYTES = 256 << 20


def dense_layers(paged: Paged) -> list[Tensor]:
    """[num_blocks, 2, num_kv_heads, block_size, head_dim], one tensor a layer as peers want."""
    return [paged.pages.values[:, layer].contiguous() for layer in range(paged.heads.num_layers)]


def flashinfer_decode(layers: list[Tensor], paged: Paged, device: torch.device) -> float:
    import flashinfer

    heads, size = paged.heads, paged.heads.block_size
    workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    contexts = torch.tensor([context for _, context in paged.lens])
    counts = (contexts + size - 1) // size
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    indices = torch.cat(
        [table[:count] for table, count in zip(paged.tables, counts.tolist(), strict=True)]
    )
    wrapper.plan(
        indptr.to(device),
        indices,
        ((contexts - 1) % size + 1).int().to(device),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = paged.qkv[:, : heads.num_heads].contiguous()

    def run() -> None:
        for layer in layers:
            wrapper.run(q, layer)

    return seconds(run, device) / len(layers)


def sdpa_decode(layers: list[Tensor], paged: Paged, device: torch.device) -> float:
    """Over dense keys of the same size, which a paged engine would first have to gather."""
    heads, context = paged.heads, paged.lens[0][1]
    shape = (len(paged.lens), heads.num_kv_heads, context, heads.head_dim)
    num_values = len(paged.lens) * heads.num_kv_heads * context * heads.head_dim
    dense = [
        (flat[:num_values].view(shape), flat[-num_values:].view(shape))
        for flat in (layer.flatten() for layer in layers)
    ]
    q = paged.qkv[:, : heads.num_heads].unsqueeze(2)
    return seconds(_sdpa_over(q, dense, causal=False), device) / len(layers)


def _sdpa_over(
    q: Tensor, dense: list[tuple[Tensor, Tensor]], *, causal: bool
) -> Callable[[], None]:
    def run() -> None:
        for keys, values in dense:
            scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)

    return run


def flashinfer_prompt(paged: Paged, device: torch.device) -> float:
    import flashinfer

    heads, size = paged.heads, paged.heads.block_size
    workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    ((query, context),) = paged.lens
    count = -(-context // size)
    wrapper.plan(
        torch.tensor([0, query], dtype=torch.int32, device=device),
        torch.tensor([0, count], dtype=torch.int32, device=device),
        paged.tables[0, :count],
        torch.tensor([(context - 1) % size + 1], dtype=torch.int32, device=device),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        size,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = paged.qkv[:, : heads.num_heads].contiguous()
    layer = paged.pages.values[:, 0].contiguous()
    return seconds(lambda: wrapper.run(q, layer), device)


def sdpa_prompt(paged: Paged, device: torch.device) -> float:
    """Causal over the prompt's own keys: there must be none before it."""
    heads = paged.heads
    own = paged.qkv.transpose(0, 1).unsqueeze(0)
    q = own[:, : heads.num_heads]
    keys = own[:, heads.num_heads : -heads.num_kv_heads]
    values = own[:, -heads.num_kv_heads :]
    return seconds(_sdpa_over(q, [(keys, values)], causal=True), device)
