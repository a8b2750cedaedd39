"""The operations that a decoder needs from a device, and the view of a batch that they read.

Two implementations exist, `TorchOps` (any device, written for CPUs) and `TritonOps` (CUDA). A
decoder is given one and calls nothing else, so tests run both on the same model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from disagg.kernels.kv_pages import KVPages

Weight: TypeAlias = Any  # what an implementation made of a matrix; only it looks inside
Paging: TypeAlias = Any  # what an implementation derived from one batch; only it looks inside


class PagedBatch(Protocol):
    """The fields of a batch that attention reads. Meaning and shapes: `models.batch.Batch`."""

    @property
    def slots(self) -> Tensor: ...
    @property
    def query_start(self) -> Tensor: ...
    @property
    def context_lens(self) -> Tensor: ...
    @property
    def block_tables(self) -> Tensor: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_context_len(self) -> int: ...
    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def context_lens_host(self) -> tuple[int, ...]: ...


class Ops(Protocol):
    """Operations on rows of tokens. `kv_cache` is the slab of `engine/device/kv_cache.py`."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Weight:
        """Prepare a matrix [out, in] for `project` and `project_add_norm`. Done once."""
        ...

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> Weight:
        """Prepare the stacked gate and up matrices [2 * inner, in] for `project_gated`."""
        ...

    def project(self, x: Tensor, weight: Weight) -> Tensor:
        """Return x W^T + b: [num_tokens, out]."""
        ...

    def project_gated(self, x: Tensor, weight: Weight) -> Tensor:
        """Return silu(gate(x)) * up(x): [num_tokens, inner]."""
        ...

    def project_add_norm(
        self, x: Tensor, weight: Weight, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return residual + x W^T + b, and the same after RMS normalisation."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        ...

    def rope_table(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Lay out float32 tables [num_positions, head_dim / 2] so that a row serves one token."""
        ...

    def norm_rope_(self, heads: Tensor, norm: Tensor | None, eps: float, rope_rows: Tensor) -> None:
        """Normalise (if `norm` is given) and turn each head, in place.

        `heads` is a view [num_tokens, num_heads, head_dim], `norm` [num_heads, head_dim],
        `rope_rows` the rows of `rope_table` at the tokens' positions.
        """
        ...

    def plan(self, batch: PagedBatch, kv_cache: KVPages, windows: Iterable[int | None]) -> Paging:
        """Derive once per step what all layers need to find their keys and values."""
        ...

    def attention(
        self, qkv: Tensor, kv_cache: KVPages, layer: int, window: int | None, paging: Paging
    ) -> Tensor:
        """Store the keys and values of this step in `kv_cache`, then attend causally.

        `qkv` is [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        A query at position p sees positions > p - window (all, if None) up to p. The softmax scale
        is head_dim^-0.5. Returns [num_tokens, num_heads * head_dim].
        """
        ...
