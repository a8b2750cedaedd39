"""The gated delta net of a layer (arXiv 2412.06464), as Qwen3-Next has it.

Instead of attending to all tokens, a layer has a state of constant size that each token changes
(`kernels.recurrent_state`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import Ops, Paging, Weight
from disagg.kernels.recurrent_state import DeltaHeads
from disagg.models.model_config import ModelConfig
from disagg.models.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The gated delta net of one layer, with its weights in the form that the device wants."""

    heads: DeltaHeads
    eps: float
    gates: Weight  # [2 * num_heads, hidden]: beta, decay
    taps: Tensor  # [channels, taps]
    rate: Tensor  # float32 [num_heads]
    bias: Tensor  # float32 [num_heads]
    norm: Tensor  # [value_dim]

    @classmethod
    def pack(cls, ops: Ops, config: ModelConfig, layer: LayerWeights) -> DeltaNet | None:
        """The layer's delta net; None if it has attention."""
        if layer.taps is None:
            return None
        heads = config.delta_heads
        assert heads is not None and layer.delta_gates is not None and layer.delta_norm is not None
        assert layer.decay_rate is not None and layer.decay_bias is not None
        return cls(
            heads=heads,
            eps=config.rms_norm_eps,
            gates=ops.pack_table(layer.delta_gates),
            taps=layer.taps,
            rate=layer.decay_rate.exp(),
            bias=layer.decay_bias,
            norm=layer.delta_norm,
        )

    def __call__(
        self,
        ops: Ops,
        normed: Tensor,
        projected: Tensor,
        kv_cache: KVPages,
        layer: int,
        paging: Paging,
    ) -> Tensor:
        """Advance the state, and read it.

        Args:
            normed: [num_tokens, hidden].
            projected: [num_tokens, channels + num_heads * value_dim]: queries, keys and values, and
                the gates of the output.

        Returns:
            [num_tokens, num_heads * value_dim].
        """
        heads = self.heads
        mixed, gates = projected.tensor_split((heads.num_channels,), dim=1)
        beta, decay = ops.project(normed, self.gates).float().chunk(2, 1)
        decay = functional.softplus(decay + self.bias) * -self.rate
        read = ops.delta_net(mixed, decay, beta.sigmoid(), self.taps, kv_cache, layer, paging)
        made = ops.rms_norm(read.flatten(0, 1), self.norm, self.eps).view(read.shape)
        gates = functional.silu(gates.float()).view(read.shape)
        return (made * gates).to(projected.dtype).flatten(1)
