"""The operations that a decoder needs from a device, and the view of a batch that they read.

There are two implementations, `TorchOps` (any device, written for CPUs) and `TritonOps` (CUDA). A
decoder gets one of them and calls nothing else, so tests run both on the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from disagg.kernels.activation import Activation
from disagg.kernels.adapters import AdaptedMatrix
from disagg.kernels.grouping import Grouping
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.packed_matrix import Largest, PackedMatrix

Weight: TypeAlias = Any  # a matrix as an implementation packed it; opaque to others
Paging: TypeAlias = Any  # an implementation's plan of one batch's attention; opaque to others
StepRows: TypeAlias = Any  # an implementation's plan of which rows have which LoRA adapter


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """The index by which each query chooses the tokens whose latents it attends to.

    num_chosen: most tokens of a query. It attends to all that it sees if these are not more.
    key_dim: the last values of a cached vector, which are the token's key in the index.
    """

    num_chosen: int
    key_dim: int


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What a layer asks its index, for each token of a step.

    A token's score is the sum over the heads of the index of weight * max(0, query * key), as
    DeepSeek-V3.2 computes it. The tokens with the largest scores are chosen: of equal scores the
    earlier tokens, and a score that is NaN counts as infinity.

    queries: [num_tokens, num_heads, key_dim].
    weights: float32 [num_tokens, num_heads].
    """

    queries: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """How a model makes the scores of its attention, and of which tokens.

    scale: products of queries and keys are multiplied by this; None: head_dim^-0.5.
    cap: scores become cap * tanh(score / cap); None: they are not capped.
    index: chooses the tokens of latent attention; None: a query attends to all that it sees.
    """

    scale: float | None = None
    cap: float | None = None
    index: TokenIndex | None = None


PLAIN_SCORES = Scores()


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: gated MLPs, of which each token goes through a few.

    Attributes:
        gate_up: [len(held), 2 * inner, hidden]; the rows of gate come first.
        down: [len(held), hidden, inner]. If one of the two is packed, it is a single matrix with
            the rows of all experts, one expert after the other.
        gate_up_bias, down_bias: with the first two dimensions of these matrices.
        dtype: dtype of the activations.
        num_experts: number of experts from which the router chooses.
        num_chosen: number of experts that a token goes through.
        is_normalized: whether the weights of a token's experts add up to 1; if not, they are taken
            from the softmax over all experts.
        limit: limit of the clamped SwiGLU, (min(up, limit) + 1) * gate * sigmoid(alpha * gate),
            where up is also at least -limit and gate is at most limit. None: silu(gate) * up.
        grouping: how experts are chosen; None: those with the largest logits.
        score_bias: float32 [num_experts], for a grouping with sigmoids; or None.
        largest: see `Ops.pack`; for `down`.
        own: the experts whose matrices and biases these are, if other ranks have the others; None:
            all. The outputs of a token's other experts are left out of its sum.
    """

    gate_up: Tensor | PackedMatrix
    down: Tensor | PackedMatrix
    dtype: torch.dtype
    num_experts: int
    num_chosen: int
    is_normalized: bool
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
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
        """The number of values between an expert's two matrices."""
        return math.prod(self.gate_up.shape[:-1]) // len(self.held) // 2


class PagedBatch(Protocol):
    """The fields of a batch that attention reads. Meaning and shapes: `models.batch.Batch`."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def query_start(self) -> Tensor: ...
    @property
    def context_lens(self) -> Tensor: ...
    @property
    def block_tables(self) -> Tensor: ...
    @property
    def table_rows(self) -> Tensor | None: ...
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
        keeps_packed: the device whose kinds of packed matrices it multiplies as they are; None: it
            widens packed matrices.
    """

    keeps_packed: Literal["gpu", "cpu"] | None

    def pack(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None, largest: Largest | None = None
    ) -> Weight:
        """Prepare a matrix [out, in] for `project` and `project_add_norm`. Done once.

        Args:
            largest: given if each rank has some columns of the matrix. It turns the largest
                magnitudes of the rank's rows into those of the whole rows, so that the scales do
                not depend on the number of ranks.
        """
        ...

    def pack_table(self, weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> Weight:
        """As `pack`, for a matrix whose precision matters: it makes logits or routes to experts."""
        ...

    def pack_gated(self, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Weight:
        """Prepare the stacked gate and up matrices [2 * inner, in] for `project_gated`."""
        ...

    def pack_experts(self, experts: Experts) -> Weight:
        """Prepare the experts of a layer for `mix_experts`. Their tensors may not be used again."""
        ...

    def mix_experts(self, x: Tensor, logits: Tensor, experts: Weight) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: [num_tokens, hidden].

        A token goes through the experts with its largest `logits`, [num_tokens, num_experts]. With
        a grouping, the grouping chooses and weighs the experts (`kernels.grouping`). The device
        decides which tokens go where, and the host does not wait for it. If a rank has some of the
        experts, the sum is over these.
        """
        ...

    def project(self, x: Tensor, weight: Weight) -> Tensor:
        """Return x W^T + b: [num_tokens, out]."""
        ...

    def project_gated(self, x: Tensor, weight: Weight, activation: Activation = "silu") -> Tensor:
        """Return activation(gate(x)) * up(x): [num_tokens, inner]."""
        ...

    def project_stacked(self, x: Tensor, weight: Weight) -> Tensor:
        """Return the gate(x) and up(x) of `project_gated`: [num_tokens, 2 * inner]."""
        ...

    def gated(self, stacked: Tensor, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up of a result of `project_stacked`."""
        ...

    def plan_adapters(self, adapters: Tensor, num_slots: int) -> StepRows:
        """Prepare for `adapt_` which rows of a step have which adapter.

        Args:
            adapters: int32 [num_tokens]: the slot of each row's adapter, or -1.
        """
        ...

    def adapt_(self, out: Tensor, x: Tensor, matrix: AdaptedMatrix, rows: StepRows) -> Tensor:
        """Add to `out`, [num_tokens, out], what each row's adapter makes of `x`. Returns `out`."""
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

        `heads` is a view [num_tokens, num_heads, head_dim], whose heads need not be adjacent in
        memory, `norm` is [num_heads, head_dim], and `rope_rows` are the rows of `rope_table` at the
        tokens' positions.
        A head is normalised by the mean of its squares, or by float32 `mean_squares`,
        [num_tokens, num_heads].
        """
        ...

    def plan(self, batch: PagedBatch, kv_cache: KVPages, windows: Iterable[int | None]) -> Paging:
        """Prepare, once per step, the plan by which all layers find their keys and values."""
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
        A query at position p sees positions > p - window (all, if None) up to p. The `Scores` of
        these operations say how scores are made. `sinks` [num_heads] has one logit per head, which
        takes part in each softmax of the head and has no value. Returns [num_tokens, num_heads *
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
        asked: IndexQueries | None = None,
    ) -> Tensor:
        """As `attention`, for a slab with one vector per token, to which all query heads attend.

        `heads` is [num_tokens, num_heads + 1, head_dim]: the queries, and the vector that is
        stored, whose first `value_dim` values are also the value. `scale` is the softmax scale.

        If `Scores` have an index, the last `key_dim` values of the vector are no part of the key,
        and those of queries are not read. `asked` chooses the tokens of each query; without it,
        each attends to those that the last layer with `asked` has chosen.

        Returns [num_tokens, num_heads, value_dim], whose heads need not be adjacent in memory.
        """
        ...

    def delta_net(
        self,
        mixed: Tensor,
        decay: Tensor,
        beta: Tensor,
        taps: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: Paging,
    ) -> Tensor:
        """Advance the recurrent states of a layer by the tokens of this step, and read them.

        `mixed` is [num_tokens, channels]: queries, keys and values of all heads before a causal
        convolution with `taps`, [channels, taps], and SiLU. Queries and keys are then normalised.
        `decay` and `beta` are float32 [num_tokens, num_heads]: the logarithm of what each token
        leaves of the state, and how much of the error it corrects (the gated delta rule, arXiv
        2412.06464). Returns [num_tokens, num_heads, value_dim].
        """
        ...
