"""The decoder family: Llama, Mistral, Qwen2 and Qwen3 are one program with a few switches.

Decides the order of operations of a forward pass. Each operation is done by the `Ops` of the
device; batching and sampling are the engine's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.dispatch import ops_for
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import Ops, Paging, Weight
from disagg.models.batch import Batch
from disagg.models.description import ModelDescription
from disagg.models.model_config import ModelConfig
from disagg.models.rope_tables import rope_tables
from disagg.models.weights import (
    DecoderWeights,
    LayerWeights,
    Progress,
    load_weights,
    random_weights,
)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights in the form the device wants."""

    input_norm: Tensor
    qkv: Weight
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Weight
    post_norm: Tensor
    gate_up: Weight
    down: Weight
    window: int | None


class Decoder:
    """A decoder-only transformer over a paged KV cache.

    Args:
        weights: consumed; packed copies may replace them.
        ops: the device's operations; by default what `ops_for` chooses.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: Ops | None = None
    ) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.ops = ops or ops_for(self.device, config.num_heads)
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._lm_head = self.ops.pack(weights.lm_head, None)
        self._layers = [
            self._pack(layer, window)
            for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
        ]
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_model_len)
        self._rope = self.ops.rope_table(cos, sin, self.dtype).to(self.device)

    def _pack(self, layer: LayerWeights, window: int | None) -> _Layer:
        ops, config = self.ops, self.config
        qk_norm = None
        if layer.q_norm is not None and layer.k_norm is not None:
            qk_norm = torch.cat(
                (
                    layer.q_norm.expand(config.num_heads, -1),
                    layer.k_norm.expand(config.num_kv_heads, -1),
                )
            )
        return _Layer(
            input_norm=layer.input_norm,
            qkv=ops.pack(layer.qkv, layer.qkv_bias),
            qk_norm=qk_norm,
            output=ops.pack(layer.output, layer.output_bias),
            post_norm=layer.post_norm,
            gate_up=ops.pack_gated(layer.gate_up, layer.gate_up_bias),
            down=ops.pack(layer.down, layer.down_bias),
            window=window,
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv_cache: KVPages,
        paging: Paging | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Compute one step; the keys and values of its tokens are written to `kv_cache`.

        Args:
            batch: the step's tokens; `models.batch.Batch` gives the shapes.
            kv_cache: of the model's dtype, or of a format with scales.
            paging: what `ops.plan` would derive from both, where that was done before.
            logits: where to write the result; a new tensor if None.

        Returns:
            float32 [num_logits, vocab_size] for the tokens of `batch.logits_rows`.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        num_turned = self.config.num_heads + self.config.num_kv_heads
        num_tokens = batch.token_ids.shape[0]
        if paging is None:
            paging = ops.plan(batch, kv_cache, self.config.sliding_windows)
        rope_rows = self._rope.index_select(0, batch.positions)
        hidden = functional.embedding(batch.token_ids, self._embedding)
        normed = ops.rms_norm(hidden, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = ops.project(normed, layer.qkv)
            heads = qkv.view(num_tokens, -1, self.config.head_dim)
            ops.norm_rope_(heads[:, :num_turned], layer.qk_norm, eps, rope_rows)
            attended = ops.attention(heads, kv_cache, index, layer.window, paging)
            if index == last and batch.logits_rows.shape[0] != num_tokens:
                # After the last attention only the rows whose logits are wanted matter (as many
                # rows as tokens are all of them, in order).
                attended = attended.index_select(0, batch.logits_rows)
                hidden = hidden.index_select(0, batch.logits_rows)
            hidden, normed = ops.project_add_norm(
                attended, layer.output, hidden, layer.post_norm, eps
            )
            inner = ops.project_gated(normed, layer.gate_up)
            next_norm = self._norm if index == last else self._layers[index + 1].input_norm
            hidden, normed = ops.project_add_norm(inner, layer.down, hidden, next_norm, eps)
        projected = ops.project(normed, self._lm_head)
        return projected.float() if logits is None else logits.copy_(projected)


def load_model(
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Decoder:
    """Load a checkpoint's weights into a decoder that is ready to run.

    Args:
        progress: called with (bytes loaded, bytes in all) after each tensor.

    Raises:
        ModelError: the weights do not fit the model's config, or are damaged.
    """
    decoder = Decoder(model.config, load_weights(model, dtype, device, progress))
    _give_back_freed_memory()
    return decoder


def random_decoder(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Decoder:
    """Build a decoder with random weights, for measurements that need no checkpoint."""
    return Decoder(config, random_weights(config, dtype, device, seed))


def _give_back_freed_memory() -> None:
    """Else glibc keeps what was freed between packed weights: 100 MB of a 160M model's 730."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
