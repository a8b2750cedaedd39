"""The operations that a decoder needs from a device, and the view of a batch that they read.

Two implementations exist, `TorchOps` (any device, written for CPUs) and `TritonOps` (CUDA). A
decoder is given one and calls nothing else, so tests run both on the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from disagg.kernels.activation import Activation
from disagg.kernels.grouping import Grouping
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.packed_matrix import Largest, PackedMatrix

Weight: TypeAlias = Any  # what an implementation made of a matrix; only it looks inside
Paging: TypeAlias = Any  # what an implementation derived from one batch; only it looks inside


@dataclass(frozen=True, slots=True)
class Scores:
    """How a model makes the scores of its attention from products of queries and keys.

    scale: what they are multiplied by; None: head_dim^-0.5.
    """

    scale: float | None = None


PLAIN_SCORES = Scores()


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: gated MLPs, of which each token goes through a few.

    Attributes:
        gate_up: [len(held), 2 * inner, hidden], the rows of gate first.
        down: [len(held), hidden, inner]. Either may be packed: the rows of all experts, one
            expert after the other, are then those of one matrix.
        gate_up_bias, down_bias: as the first two dimensions of these.
        gate_up_scales, down_scales: uint8 exponents of MXFP4, one for 32 values of a row; the
            matrices are then uint8 with two values a byte, the first one in its low half.
        dtype: of activations.
        num_experts: that the router chooses from.
        num_chosen: experts a token goes through.
        is_normalized: their weights add up to 1; else they are parts of a softmax over all.
        limit: of the clamped SwiGLU: (min(up, limit) + 1) * gate * sigmoid(alpha * gate), with up
            also at least -limit and gate at most limit. None: silu(gate) * up.
        grouping: how experts are chosen; None: those with the largest logits.
        score_bias: float32 [num_experts], of a grouping by sigmoids; or None.
        largest: as in `Ops.pack`, of `down`.
        own: the experts whose matrices and biases these are, where other ranks have the others;
            None: all. What a token's other experts make of it is left out of its sum.
    """

    gate_up: Tensor | PackedMatrix
    down: Tensor | PackedMatrix
    dtype: torch.dtype
    num_experts: int
    num_chosen: int
    is_normalized: bool
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    limit: float | None = None
    alpha: float = 1.0
    grouping: Grouping | None = None
    score_bias: Tensor | None = None
    largest: Largest | None = None
    own: range | None = None

    @property
    def held(self) -> range:
        """The experts whose matrices these are."""
        return range(self.num_experts) if self.own is None else self.own

    @property
    def inner(self) -> int:
        """Values between an expert's two matrices."""
        return math.prod(self.gate_up.shape[:-1]) // len(self.held) // 2


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
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def context_lens_host(self) -> Sequence[int]: ...


class Ops(Protocol):
    """Operations on rows of tokens. `kv_cache` is the slab of `engine/device/kv_cache.py`.

    Attributes:
        keeps_packed: whose kinds of packed matrices it multiplies as they are; None: none.
    """

    keeps_packed: Literal["gpu", "cpu"] | None

    def pack(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None, largest: Largest | None = None
    ) -> Weight:
        """Prepare a matrix [out, in] for `project` and `project_add_norm`. Done once.

        Args:
            largest: of a matrix of which ranks have some columns each: a scale of a row is then
                that of the whole row, whatever the number of ranks.
        """
        ...

    def pack_table(self, weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> Weight:
        """As `pack`, of a matrix that decides: it makes logits, chooses or weighs experts."""
        ...

    def pack_gated(self, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Weight:
        """Prepare the stacked gate and up matrices [2 * inner, in] for `project_gated`."""
        ...

    def pack_experts(self, experts: Experts) -> Weight:
        """Prepare the experts of a layer for `mix_experts`; its tensors are consumed."""
        ...

    def mix_experts(self, x: Tensor, logits: Tensor, experts: Weight) -> Tensor:
        """Return the weighted sum of what each token's experts make of it: [num_tokens, hidden].

        A token goes through the experts with its largest `logits`, [num_tokens, num_experts].
        Which tokens go where is decided on the device, without waiting for it. Of a rank that has
        some of the experts, the sum is over these.
        With a grouping, it chooses and weighs them (`kernels.grouping`).
        """
        ...

    def project(self, x: Tensor, weight: Weight) -> Tensor:
        """Return x W^T + b: [num_tokens, out]."""
        ...

    def project_gated(self, x: Tensor, weight: Weight, activation: Activation = "silu") -> Tensor:
        """Return activation(gate(x)) * up(x): [num_tokens, inner]."""
        ...

    def project_add_norm(
        self, x: Tensor, weight: Weight, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return residual + x W^T + b, and the same after RMS normalisation."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return residual + x, and the same after RMS normalisation."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, of the type of `x`.

        The weight of a norm may be in float32 everywhere: the product is then rounded once.
        """
        ...

    def rope_table(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Lay out float32 tables [num_positions, rope_dim / 2] so that a row serves one token."""
        ...

    def norm_rope_(
        self,
        heads: Tensor,
        norm: Tensor | None,
        eps: float,
        rope_rows: Tensor,
        mean_squares: Tensor | None = None,
    ) -> None:
        """Normalise each head (if `norm` is given), rotate its first `rope_dim` values, in place.

        `heads` is a view [num_tokens, num_heads, head_dim], whose heads need not touch in memory,
        `norm` [num_heads, head_dim], `rope_rows` the rows of `rope_table` at the tokens' positions.
        A head is normalised by the mean of its squares, or by float32 `mean_squares`,
        [num_tokens, num_heads].
        """
        ...

    def plan(self, batch: PagedBatch, kv_cache: KVPages, windows: Iterable[int | None]) -> Paging:
        """Derive once per step what all layers need to find their keys and values."""
        ...

    def attention(
        self,
        qkv: Tensor,
        kv_cache: KVPages,
        layer: int,
        window: int | None,
        paging: Paging,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the keys and values of this step in `kv_cache`, then attend causally.

        `qkv` is [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        A query at position p sees positions > p - window (all, if None) up to p. Scores are made as
        the `Scores` of these operations say. `sinks` are logits, [num_heads], one of which takes
        part in each softmax of its head and has no value. Returns [num_tokens, num_heads *
        head_dim].
        """
        ...

    def latent_attention(
        self,
        heads: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: Paging,
        value_dim: int,
        scale: float,
    ) -> Tensor:
        """As `attention`, of a slab with one vector a token, which all query heads attend to.

        `heads` is [num_tokens, num_heads + 1, head_dim]: queries, and the vector that is stored,
        whose first `value_dim` values are also the value. `scale` is that of the softmax. Returns
        [num_tokens, num_heads, value_dim], whose heads need not touch in memory.
        """
        ...
