"""The layers of a decoder, with their weights packed for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disagg.kernels.ops import Experts, Ops, Weight
from disagg.kernels.packed_matrix import Largest, PackedMatrix
from disagg.models.altup import HALF, AltUp, cutoff_of
from disagg.models.communicator import Communicator
from disagg.models.delta_net import DeltaNet
from disagg.models.latent import LatentAttention
from disagg.models.model_config import ModelConfig
from disagg.models.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Weight
    down: Weight
    # Inner values are cut to 0 that are not so many deviations above their mean; None: none are.
    cutoff: float | None = None


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    router: Weight
    router_dtype: torch.dtype
    experts: Weight
    shared: Mlp | None
    shared_gate: Weight | None  # makes the factor of the shared expert's output for a token


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. A norm that the family does not have is None."""

    input_norm: Tensor | None
    qkv: Weight
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    v_norm: Tensor | None  # [head_dim]
    kv_source: int  # the layer whose keys and values it reads
    sinks: Tensor | None  # float32 [num_heads]
    output: Weight
    output_norm: Tensor | None
    post_norm: Tensor | None
    mlp: Mlp | ExpertMlp
    down_norm: Tensor | None
    window: int | None
    rope: int  # its number among the `ropes` of the config
    latent: LatentAttention | None
    delta_net: DeltaNet | None
    altup: AltUp | None


class LayerPacker:
    """Packs the layers of a model, or of one rank's part of it.

    Args:
        dtype: dtype of activations.
    """

    def __init__(
        self, ops: Ops, config: ModelConfig, dtype: torch.dtype, ranks: Communicator | None
    ) -> None:
        self._ops, self._config, self._dtype, self._ranks = ops, config, dtype, ranks
        self._ropes = config.ropes
        self._largest: Largest | None = None if ranks is None else ranks.largest_

    def pack(self, index: int, layer: LayerWeights) -> Layer:
        ops, config = self._ops, self._config
        output_norm, v_norm = layer.output_norm, None
        if config.altup is not None:  # the sum of attention and residuals is multiplied by HALF
            assert output_norm is not None and layer.q_norm is not None
            output_norm, v_norm = output_norm.float() * HALF, torch.ones_like(layer.q_norm)
        return Layer(
            input_norm=layer.input_norm,
            qkv=ops.pack(layer.qkv, layer.qkv_bias),
            qk_norm=norms_of_heads(config, layer.q_norm, layer.k_norm),
            v_norm=v_norm,
            kv_source=config.kv_sources[index] if config.shares_kv(index) else index,
            sinks=None if layer.sinks is None else layer.sinks.float(),
            output=ops.pack(layer.output, layer.output_bias, self._largest),
            output_norm=output_norm,
            post_norm=layer.post_norm,
            mlp=self._mlp(layer, index),
            down_norm=layer.down_norm,
            window=config.sliding_windows[index],
            rope=self._ropes.index(config.rope_in(index)),
            latent=LatentAttention.pack(ops, config, layer),
            delta_net=DeltaNet.pack(ops, config, layer),
            altup=AltUp.pack(ops, config, index, layer),
        )

    def _mlp(self, layer: LayerWeights, index: int) -> Mlp | ExpertMlp:
        ops, largest, experts = self._ops, self._largest, self._config.experts_in(index)
        if experts is None:
            gate_up = ops.pack_gated(layer.gate_up, layer.gate_up_bias)
            down = ops.pack(layer.down, layer.down_bias, largest)
            return Mlp(gate_up, down, cutoff_of(self._config, index))
        assert layer.router is not None
        own = None if self._ranks is None else self._ranks.share.own_experts(experts)
        num_held = experts.num_experts if own is None else len(own)

        def by_expert(rows: Any) -> Any:
            stays = rows is None or isinstance(rows, PackedMatrix)
            return rows if stays else rows.unflatten(0, (num_held, -1))

        shared = shared_gate = None
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            gate_up = ops.pack_gated(layer.shared_gate_up, None)
            shared = Mlp(gate_up, ops.pack(layer.shared_down, None, largest))
        if layer.shared_gate is not None:
            shared_gate = ops.pack_table(layer.shared_gate)
        matrices = Experts(
            gate_up=by_expert(layer.gate_up),
            down=by_expert(layer.down),
            dtype=self._dtype,
            num_experts=experts.num_experts,
            num_chosen=experts.num_experts_per_tok,
            is_normalized=experts.is_normalized,
            gate_up_bias=by_expert(layer.gate_up_bias),
            down_bias=by_expert(layer.down_bias),
            limit=experts.swiglu_limit,
            alpha=experts.swiglu_alpha,
            grouping=experts.grouping,
            score_bias=layer.score_bias,
            largest=largest if own is None else None,  # no row is divided
            own=own,
        )
        dtype = self._dtype if experts.grouping is None else torch.float32  # as in DeepSeek's code
        router = ops.pack_table(layer.router.to(dtype), layer.router_bias)
        return ExpertMlp(router, dtype, ops.pack_experts(matrices), shared, shared_gate)


def norms_of_heads(
    config: ModelConfig, q_norm: Tensor | None, k_norm: Tensor | None
) -> Tensor | None:
    """Return [num_heads + num_kv_heads, head_dim]; None if the model has no such norms. A layer
    that reads the KV of another has those of its queries only.

    Args:
        q_norm, k_norm: [head_dim], used for each head, or the values of all heads.
    """
    counts = (q_norm, config.num_heads), (k_norm, config.num_kv_heads)
    found = [
        norm.view(-1, config.head_dim).expand(count, -1)
        for norm, count in counts
        if norm is not None
    ]
    return torch.cat(found) if found else None


def arrange_pairs_(values: Tensor) -> None:
    """Put values 0, 2, 4, ... of each head before 1, 3, 5, ..., in place.

    RoPE that rotates neighbours then rotates the first half together with the second one. Queries
    and keys are reordered in the same way, so scores do not change.
    """
    pairs = values.reshape(*values.shape[:-1], -1, 2)
    values.copy_(pairs.transpose(-1, -2).flatten(-2))


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
