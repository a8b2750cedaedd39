"""The operations of a decoder on CUDA: cuBLAS for float matrices, Triton kernels for the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.activation import Activation
from disagg.kernels.adapters import AdaptedMatrix
from disagg.kernels.gpu.adapters import AdapterGroups, adapt_rows_
from disagg.kernels.gpu.attention_work import (
    LONG_ROWS,
    MAX_SHORT_QUERIES,
    MAX_SHORT_ROWS,
    AttentionWork,
    attention_work,
)
from disagg.kernels.gpu.delta_net import delta_net
from disagg.kernels.gpu.eight_bit_tile import kinds_of, why_16_bits
from disagg.kernels.gpu.experts import TritonExperts
from disagg.kernels.gpu.gated_mul import gated_mul
from disagg.kernels.gpu.kv_write import kv_write
from disagg.kernels.gpu.latent_attention import LONG_ROWS as LATENT_ROWS
from disagg.kernels.gpu.latent_attention import MAX_TILE, MIN_TILE, latent_attention
from disagg.kernels.gpu.latent_group import MAX_CHOSEN_GROUP, latent_group
from disagg.kernels.gpu.norm_rope import norm_rope_
from disagg.kernels.gpu.packed_linear import PackedProduct
from disagg.kernels.gpu.paged_attention import paged_attention
from disagg.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from disagg.kernels.gpu.token_index import TokenChoice
from disagg.kernels.group_batches import GroupBatches
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import (
    PLAIN_SCORES,
    Experts,
    IndexQueries,
    PagedBatch,
    Scores,
    TokenIndex,
)
from disagg.kernels.packed_matrix import Largest, PackedMatrix, quantized
from disagg.kernels.packed_sizes import EIGHT_BIT_ROWS, Kind

# A tile of a prompt has `LONG_ROWS` for heads of up to so many values, and fewer rows for larger
# heads, because the sums of more rows do not fit into registers.
_MOST_OF_LONG_ROWS, _ROWS_OF_WIDE_HEADS = 128, 64
log = logging.getLogger(__name__)

_PROGRAMS_PER_MULTIPROCESSOR = 3  # shared memory has room for 3 of the short-query kernel


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight that is not packed."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TritonPaging:
    """A step's batch and, by window, the pieces of its attention.

    groups: the batch as each group of layers sees it.
    choice: the tokens to which queries attend, if an index chooses them.
    """

    batch: PagedBatch
    groups: GroupBatches
    work: dict[int | None, AttentionWork]
    choice: TokenChoice | None = None

    def cut(self) -> None:
        """Cut the step that is in the batch's tensors into pieces, on the device."""
        self.groups.locate(self.batch)
        for each in self.work.values():
            each.cut(self.batch.query_start, self.batch.context_lens, self.batch.slots.shape[0])
        if self.choice is not None:
            self.choice.cut(self.batch)


class TritonOps:
    """`Ops` for CUDA devices.

    Args:
        num_heads: query heads of the model.
        num_multiprocessors: multiprocessors of the device; decides how finely long contexts are
            cut.
        long_rows: rows of a prompt's tile, a power of two.
        is_small: whether the device has less than `LARGE_SHARED_NBYTES` of shared memory for a
            program.
        capability: the device's compute capability.
        quantization: how matrices are quantised when they are packed, also those of experts, but
            not those that make logits or choose experts.
        scores: how attention makes its scores.
        dtype: dtype of activations, for which kernels of packed matrices and of experts are
            compiled at packing, so that no request waits for it. None: they are compiled at their
            first use.
    """

    keeps_packed: Literal["gpu", "cpu"] | None = "gpu"

    def __init__(
        self,
        num_heads: int,
        num_multiprocessors: int,
        *,
        long_rows: int = LONG_ROWS,
        is_small: bool = False,
        capability: tuple[int, int] = (9, 0),
        quantization: Kind | None = None,
        dtype: torch.dtype | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> None:
        self._scores = scores
        self._long_rows = long_rows
        self._latent_tile = MIN_TILE if is_small else MAX_TILE
        self._num_heads = num_heads
        self._num_programs = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
        self._major, self._quantization = capability[0], quantization
        self._eight_bits = kinds_of(capability)
        self._said: set[str] = set()
        self._dtype = dtype
        self._compiled: set[tuple[object, ...]] = set()

    def pack(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None, largest: Largest | None = None
    ) -> Matrix | PackedProduct:
        weight = self._quantized(weight, largest)
        if isinstance(weight, Tensor):
            return Matrix(weight, bias)
        device = self._num_programs, self._major, self._eight_bits
        product = PackedProduct(weight, bias, *device)
        self._say_how(weight)
        self._compile(product)
        return product

    def _quantized(
        self, weight: Tensor | PackedMatrix, largest: Largest | None = None
    ) -> Tensor | PackedMatrix:
        """Quantise the rows of a matrix, or of all experts' matrices [num_experts, out, in]."""
        if self._quantization is None or isinstance(weight, PackedMatrix):
            return weight
        return quantized(weight.flatten(0, -2), self._quantization, largest)

    def _say_how(self, weight: PackedMatrix) -> None:
        """Log how such matrices are multiplied, once."""
        why = why_16_bits(weight, self._eight_bits)
        how = f"16 bits: {why}" if why else f"8 bits from {EIGHT_BIT_ROWS} rows on"
        sentence = f"Products with {weight.kind} weights are in {how}."
        if sentence not in self._said:
            self._said.add(sentence)
            log.info(sentence)

    def _compile(self, made: PackedProduct | TritonExperts) -> None:
        """Compile the programs of a matrix, once for all layers that need the same ones."""
        if self._dtype is not None and made.variant not in self._compiled:
            made.compile(self._dtype)
            self._compiled.add(made.variant)

    def pack_table(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None = None
    ) -> Matrix | PackedProduct:
        return Matrix(weight, bias) if isinstance(weight, Tensor) else self.pack(weight, bias)

    def pack_gated(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None
    ) -> Matrix | PackedProduct:
        return self.pack(weight, bias)

    def pack_experts(self, experts: Experts) -> TritonExperts:
        gate_up = self._quantized(experts.gate_up)
        down = self._quantized(experts.down, experts.largest)
        experts = replace(experts, gate_up=gate_up, down=down, largest=None)
        made = TritonExperts(experts)
        for weight in (gate_up, down):
            if isinstance(weight, PackedMatrix):
                self._say_how(weight)
        self._compile(made)
        return made

    def mix_experts(self, x: Tensor, logits: Tensor, experts: TritonExperts) -> Tensor:
        return experts(x, logits)

    def project(self, x: Tensor, weight: Matrix | PackedProduct) -> Tensor:
        return weight(x)

    def project_gated(
        self, x: Tensor, weight: Matrix | PackedProduct, activation: Activation = "silu"
    ) -> Tensor:
        return self.gated(weight(x), activation)

    def project_stacked(self, x: Tensor, weight: Matrix | PackedProduct) -> Tensor:
        return weight(x)

    def gated(self, stacked: Tensor, activation: Activation = "silu") -> Tensor:
        return gated_mul(stacked, activation)

    def plan_adapters(self, adapters: Tensor, num_slots: int) -> AdapterGroups:
        return AdapterGroups.of(adapters, num_slots)

    def adapt_(self, out: Tensor, x: Tensor, matrix: AdaptedMatrix, rows: AdapterGroups) -> Tensor:
        return adapt_rows_(out, x, matrix, rows)

    def project_add_norm(
        self, x: Tensor, weight: Matrix | PackedProduct, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(weight(x), residual, norm, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, norm, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def rope_table(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Return float32 [num_positions, 2, rope_dim / 2]; `dtype` is that of the heads."""
        return torch.stack((cos, sin), 1)

    def norm_rope_(
        self,
        heads: Tensor,
        norm: Tensor | None,
        eps: float,
        rope_rows: Tensor,
        mean_squares: Tensor | None = None,
    ) -> None:
        norm_rope_(heads, norm, eps, rope_rows, mean_squares)

    def plan(
        self, batch: PagedBatch, kv_cache: KVPages, windows: Iterable[int | None]
    ) -> TritonPaging:
        most = self._short_queries(kv_cache)
        shorts = [query_len for query_len in batch.query_lens if query_len <= most]
        has_long = len(shorts) < len(batch.query_lens)
        index = self._scores.index
        if index is not None and max(batch.context_lens_host, default=0) > index.num_chosen:
            paging = self._choosing(batch, kv_cache, index)
        else:
            paging = self._paging(batch, kv_cache, windows, max(shorts, default=0), has_long)
        paging.cut()
        return paging

    def _choosing(self, batch: PagedBatch, kv_cache: KVPages, index: TokenIndex) -> TritonPaging:
        """For steps whose queries may see more tokens than they attend to."""
        group = latent_group(self._num_heads, MAX_CHOSEN_GROUP)
        num_groups = self._num_heads // group
        choice = TokenChoice.of(batch, index, group, num_groups, self._num_programs)
        return TritonPaging(batch, GroupBatches.of(batch, kv_cache), {}, choice)

    def plan_graph(
        self,
        batch: PagedBatch,
        kv_cache: KVPages,
        windows: Iterable[int | None],
        *,
        are_decodes: bool,
    ) -> TritonPaging:
        """As `plan`, for all steps that a captured graph will find in the tensors of `batch`.

        The graph begins with `cut`. Tokens that belong to no sequence are those of one more, which
        has no context.

        Args:
            are_decodes: whether the sequences of these steps have one token each.
        """
        if self._scores.index is not None:
            return self._choosing(batch, kv_cache, self._scores.index)
        most = 1 if are_decodes else min(self._short_queries(kv_cache), MAX_SHORT_QUERIES)
        return self._paging(batch, kv_cache, windows, most, not are_decodes)

    def _paging(
        self,
        batch: PagedBatch,
        kv_cache: KVPages,
        windows: Iterable[int | None],
        short_queries: int,
        has_long: bool,
    ) -> TritonPaging:
        group, num_groups = self._groups(kv_cache)
        work = {
            window: attention_work(
                batch.context_lens.shape[0],
                batch.slots.shape[0],
                group,
                window,
                max(self._num_programs // num_groups, 1),
                kv_cache.values.device,
                short_queries=short_queries,
                has_long=has_long,
                long_rows=self._rows_of_prompts(kv_cache),
            )
            for window in set(windows)
        }
        return TritonPaging(batch, GroupBatches.of(batch, kv_cache), work)

    def _short_queries(self, kv_cache: KVPages) -> int:
        """The most queries of a sequence that is one tile, which is as high as they need."""
        return max(MAX_SHORT_ROWS // self._groups(kv_cache)[0], 1)

    def _groups(self, kv_cache: KVPages) -> tuple[int, int]:
        """The number of query heads in a program of attention, and the number of such groups."""
        if kv_cache.num_vectors == 1:
            group = latent_group(self._num_heads)
            return group, self._num_heads // group
        num_kv_heads = kv_cache.values.shape[3]
        return self._num_heads // num_kv_heads, num_kv_heads

    def _rows_of_prompts(self, kv_cache: KVPages) -> int:
        if kv_cache.num_vectors == 1:
            return LATENT_ROWS
        is_wide = kv_cache.head_dim > _MOST_OF_LONG_ROWS
        return min(self._long_rows, _ROWS_OF_WIDE_HEADS) if is_wide else self._long_rows

    def attention(
        self,
        qkv: Tensor,
        kv_cache: KVPages,
        layer: int,
        window: int | None,
        paging: TritonPaging,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch = paging.groups.batches[kv_cache.places[layer][0]]
        kv_write(qkv, kv_cache, layer, batch.slots)
        return paged_attention(
            qkv,
            kv_cache,
            layer,
            batch,
            paging.work[window],
            sinks,
            self._scores,
        )

    def latent_attention(
        self,
        heads: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: TritonPaging,
        value_dim: int,
        scale: float,
        asked: IndexQueries | None = None,
    ) -> Tensor:
        batch, choice, index = paging.batch, paging.choice, self._scores.index
        kv_write(heads, kv_cache, layer, batch.slots)
        if choice is not None and asked is not None:
            choice.choose(asked, kv_cache, layer)
        return latent_attention(
            heads,
            kv_cache,
            layer,
            batch if choice is None else choice.batch,
            paging.work[None] if choice is None else choice.work,
            value_dim,
            scale,
            self._latent_tile,
            index_dim=0 if index is None else index.key_dim,
            chosen=None if choice is None else choice.chosen,
        )

    def delta_net(
        self,
        mixed: Tensor,
        decay: Tensor,
        beta: Tensor,
        taps: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: TritonPaging,
    ) -> Tensor:
        return delta_net(mixed, decay, beta, taps, kv_cache, layer, paging.batch)
