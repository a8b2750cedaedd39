"""The operations of a decoder in plain torch, arranged for CPUs.

Operations are one torch call where possible, because in a step with few tokens the calls take most
of the time. Attention, with the block tables, is in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.activation import Activation
from disagg.kernels.adapters import AdaptedMatrix, AdapterRows, adapt_rows_
from disagg.kernels.cpu.attention import CpuAttention, CpuPaging, takes_cache
from disagg.kernels.cpu.linear import Linear, linear
from disagg.kernels.cpu.narrow_linear import int4_linear, int8_linear, packed_linear
from disagg.kernels.group_batches import GroupBatches
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PLAIN_SCORES, Experts, IndexQueries, PagedBatch, Scores
from disagg.kernels.packed_matrix import Largest, PackedMatrix
from disagg.kernels.torch.attention import TorchPaging, plan_paging
from disagg.kernels.torch.chosen_tokens import attend_to_chosen
from disagg.kernels.torch.delta_net import StatePaging, delta_net, plan_states
from disagg.kernels.torch.experts import TorchExperts

_FEW_ROWS = 16


class TorchOps:
    """`Ops` for CPUs. Weights become oneDNN's packed matrices where that is possible.

    Args:
        bits: bits of the weights except for experts; with 8 or 4 they become `NarrowLinear`.
        keeps_packed: whether numbers of 4 or 8 bits stay as they are in a checkpoint.
        dtype: dtype of the scales of these; by default float32.
        attention: compiled attention, for a model in bfloat16; None: torch computes it.
        scores: how attention makes its scores.
    """

    keeps_packed: Literal["gpu", "cpu"] | None = None

    def __init__(
        self,
        *,
        bits: Literal[4, 8, 16] = 16,
        keeps_packed: bool = False,
        dtype: torch.dtype | None = None,
        attention: CpuAttention | None = None,
        scores: Scores = PLAIN_SCORES,
    ) -> None:
        if keeps_packed:
            self.keeps_packed = "cpu"
        self._dtype = dtype or torch.float32
        self._bits = bits
        self._mirrors = {
            dtype: torch.tensor([[1.0], [-1.0]], dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        self._attention = attention
        self._scores = scores

    def pack(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None, largest: Largest | None = None
    ) -> Linear:
        if isinstance(weight, PackedMatrix):
            return packed_linear(weight, bias, self._dtype)
        if self._bits == 8:
            return int8_linear(weight, bias, largest)
        return int4_linear(weight, bias) if self._bits == 4 else linear(weight, bias)

    def pack_table(self, weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> Linear:
        return self.pack(weight, bias)

    def pack_gated(
        self, weight: Tensor | PackedMatrix, bias: Tensor | None
    ) -> tuple[Linear, Linear]:
        half = weight.shape[0] // 2
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        if isinstance(weight, PackedMatrix):
            gate, up = weight.rows(0, half), weight.rows(half, 2 * half)
            return self.pack(gate, gate_bias), self.pack(up, up_bias)
        return self.pack(weight[:half], gate_bias), self.pack(weight[half:], up_bias)

    def pack_experts(self, experts: Experts) -> TorchExperts:
        return TorchExperts(experts)

    def mix_experts(self, x: Tensor, logits: Tensor, experts: TorchExperts) -> Tensor:
        return experts(x, logits)

    def project(self, x: Tensor, weight: Linear) -> Tensor:
        return weight(x)

    def project_gated(
        self, x: Tensor, weight: tuple[Linear, Linear], activation: Activation = "silu"
    ) -> Tensor:
        gate, up = weight
        return up.times(x, gate.silu(x) if activation == "silu" else gate.gelu_tanh(x))

    def project_stacked(self, x: Tensor, weight: tuple[Linear, Linear]) -> Tensor:
        return torch.cat([each(x) for each in weight], 1)

    def gated(self, stacked: Tensor, activation: Activation = "silu") -> Tensor:
        return reference.gated_mul(stacked, activation)

    def plan_adapters(self, adapters: Tensor, num_slots: int) -> AdapterRows:
        return AdapterRows.of(adapters)

    def adapt_(self, out: Tensor, x: Tensor, matrix: AdaptedMatrix, rows: AdapterRows) -> Tensor:
        return adapt_rows_(out, x, matrix, rows)

    def project_add_norm(
        self, x: Tensor, weight: Linear, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = weight.plus(x, residual)
        return total, self.rms_norm(total, norm, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, self.rms_norm(total, norm, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return self.rms_norm(x.float(), weight, eps).to(x.dtype)
        size = x.shape[-1]
        if x.dim() == 2 and x.shape[0] <= _FEW_ROWS:
            # The mean of (x, -x) is 0, so its LayerNorm is the RMSNorm of x: two calls, not eight.
            mirrored = x.unsqueeze(1) * self._mirrors[x.dtype]
            return torch.layer_norm(mirrored, (2, size), None, None, eps)[:, 0] * weight
        wide = x.to(torch.float32, copy=True)
        inverse = torch.linalg.vector_norm(wide, 2, -1, True)
        inverse.square_().div_(size).add_(eps).rsqrt_()
        return wide.mul_(inverse).to(x.dtype).mul_(weight)

    def rope_table(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [num_positions, 2, rope_dim]: cosines, and sines with the signs of both halves."""
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)

    def norm_rope_(
        self,
        heads: Tensor,
        norm: Tensor | None,
        eps: float,
        rope_rows: Tensor,
        mean_squares: Tensor | None = None,
    ) -> None:
        if norm is not None and mean_squares is not None:
            inverse = mean_squares.add(eps).rsqrt_().unsqueeze(-1)
            heads.copy_((heads * inverse).to(heads.dtype).mul_(norm))
        elif norm is not None:
            heads.copy_(self.rms_norm(heads, norm, eps))
        cos, sin = rope_rows.unsqueeze(2).unbind(1)
        rotated = heads[..., : cos.shape[-1]]
        swapped = rotated.roll(cos.shape[-1] // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)

    def plan(
        self, batch: PagedBatch, kv_cache: KVPages, windows: Iterable[int | None]
    ) -> list[TorchPaging | CpuPaging | StatePaging]:
        """A plan for each group of layers; those of states have the last one."""
        groups = GroupBatches.of(batch, kv_cache)
        groups.locate(batch)
        plans: list[TorchPaging | CpuPaging | StatePaging]
        index = self._scores.index
        if self._attention is not None and index is None and takes_cache(kv_cache):
            plans = [self._attention.plan(each, kv_cache) for each in groups.batches]
        else:
            plans = [plan_paging(each, kv_cache, index) for each in groups.batches]
        if kv_cache.states is not None:
            assert groups.tables is not None
            of_states = groups.tables[:, kv_cache.num_kv_groups :]
            plans.append(plan_states(batch, of_states, groups.block_size))
        return plans

    def attention(
        self,
        qkv: Tensor,
        kv_cache: KVPages,
        layer: int,
        window: int | None,
        paging: list[Any],
        sinks: Tensor | None = None,
    ) -> Tensor:
        own: TorchPaging | CpuPaging = paging[kv_cache.places[layer][0]]
        return own.attend(qkv, kv_cache, layer, window, sinks, self._scores)

    def latent_attention(
        self,
        heads: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: list[Any],
        value_dim: int,
        scale: float,
        asked: IndexQueries | None = None,
    ) -> Tensor:
        own: TorchPaging | CpuPaging = paging[kv_cache.places[layer][0]]
        index = self._scores.index
        if index is not None and isinstance(own, TorchPaging):
            where = own, heads, kv_cache, layer
            return attend_to_chosen(*where, index, asked, value_dim, scale)
        # The rest of the vector is summed too: an eighth more work saves a copy of the values.
        attended = own.attend(heads, kv_cache, layer, None, None, Scores(scale))
        return attended.view(len(heads), -1, heads.shape[2])[..., :value_dim]

    def delta_net(
        self,
        mixed: Tensor,
        decay: Tensor,
        beta: Tensor,
        taps: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: list[Any],
    ) -> Tensor:
        return delta_net(mixed, decay, beta, taps, kv_cache, layer, paging[-1])
