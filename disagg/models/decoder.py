"""The decoder: one program for all families. A `ModelConfig` describes it layer by layer.

It decides the order of operations of a forward pass. The device's `Ops` compute each operation;
batching and sampling belong to the engine.
"""

from __future__ import annotations

import ctypes
import logging
import math
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.cpu.narrow_linear import NarrowLinear, int4_linear
from disagg.kernels.cpu.step import CpuStep, DenseLayer, DenseModel, cpu_step
from disagg.kernels.dispatch import Quantization, ops_for
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import Ops, Paging, Scores, TokenIndex, Weight
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.models.adapter_weights import Adapt, AdapterTables, StepAdapters
from disagg.models.altup import AltUpTables, cut_off_
from disagg.models.batch import Batch
from disagg.models.communicator import Communicator
from disagg.models.description import ModelDescription
from disagg.models.kept_states import KeptStates
from disagg.models.layers import (
    ExpertMlp,
    Layer,
    LayerPacker,
    Mlp,
    arrange_pairs_,
    mean_squares,
)
from disagg.models.model_config import ModelConfig, not_compiled
from disagg.models.rope import RopeConfig
from disagg.models.share import WHOLE, Share
from disagg.models.weights import DecoderWeights, Progress, load_weights

log = logging.getLogger(__name__)

# The norm of the output of attention or an MLP before it is added, and the norm of the sum for the
# next operation. A family may lack either.
Norms: TypeAlias = tuple[Tensor | None, Tensor | None]


# Keys and values of a step, [num_tokens, 2 * num_kv_heads, head_dim], by the layer that made them.
SharedKV: TypeAlias = dict[int, Tensor]


class Rotation(NamedTuple):
    """What the positions of a step's tokens do to queries and keys, in layers that have the same.

    Attributes:
        rows: of `Ops.rope_table`.
        query_scales: [num_tokens, 1, 1], by which queries are multiplied; None: they are not.
    """

    rows: Tensor
    query_scales: Tensor | None


class RopeTable(NamedTuple):
    """The `Rotation` of every position."""

    table: Tensor
    query_scales: Tensor | None

    @classmethod
    def of(cls, rope: RopeConfig, rope_dim: int, num_positions: int, decoder: Decoder) -> RopeTable:
        cos, sin = rope_tables(rope, rope_dim, num_positions)
        table = decoder.ops.rope_table(cos, sin, decoder.dtype).to(decoder.device)
        if not rope.query_beta:
            return cls(table, None)
        num_lengths = torch.arange(num_positions).div(rope.original_max_position).floor()
        scales = 1 + rope.query_beta * num_lengths.log1p()
        return cls(table, scales.to(decoder.dtype).to(decoder.device).view(-1, 1, 1))

    def at(self, positions: Tensor) -> Rotation:
        scales = self.query_scales
        own = None if scales is None else scales.index_select(0, positions)
        return Rotation(self.table.index_select(0, positions), own)


class Decoder:
    """A decoder-only transformer over a paged KV cache.

    Args:
        weights: the caller may not use them again; packed copies may replace them.
        ops: the device's operations; by default those that `ops_for` chooses.
        quantization: how the default `ops` quantise matrices when they pack them.
        communicator: connects the ranks, if `config` and `weights` are one rank's part.

    Attributes:
        ranks: the communicator.
        adapters: the LoRA adapters that sequences may have; None: they have none.
        kept: keeps the hidden states from which a head drafts; None: none drafts.
        step_sentence: tells people what computes decode steps, and why.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ops: Ops | None = None,
        quantization: Quantization | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.config = config
        self.ranks = communicator
        self.device = weights.norm.device
        self.dtype = weights.dtype
        self.ops = ops or ops_for(
            self.device, config.num_heads, quantization, self.dtype, scores_of(config)
        )
        self._norm = weights.norm
        self._lm_head = self.ops.pack_table(weights.lm_head)
        self._embedding = self._table(weights)
        packer = LayerPacker(self.ops, config, self.dtype, communicator)
        self._altup = AltUpTables.pack(self.ops, config, weights)
        self._layers = [packer.pack(index, layer) for index, layer in enumerate(weights.layers)]
        self._ropes = self._rope_tables()
        self._embedding_scale = config.embedding_scale
        if config.scaled_embedding:  # in the type of activations, as transformers rounds it
            scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype)
            self._embedding_scale = scale.item()
        self.step_sentence = "torch"
        self.adapters: AdapterTables | None = None
        self.kept: KeptStates | None = None

    def _rope_tables(self) -> list[RopeTable]:
        sizes = self.config.rope_dim, self.config.max_model_len
        return [RopeTable.of(rope, *sizes, self) for rope in self.config.ropes]

    def _table(self, weights: DecoderWeights) -> Tensor | NarrowLinear:
        """The table in which embeddings are looked up."""
        if isinstance(self._lm_head, NarrowLinear):
            if weights.lm_head is weights.embedding:  # one quantised table serves both
                return self._lm_head
            if self._lm_head.bits == 4 and isinstance(weights.embedding, Tensor):
                return int4_linear(weights.embedding, None)
        if isinstance(weights.embedding, PackedMatrix):
            table: NarrowLinear = self.ops.pack_table(weights.embedding)
            return table
        embedding: Tensor = weights.embedding
        return embedding

    @property
    def num_logits(self) -> int:
        """The number of columns of the logits that `forward` returns."""
        if self.ranks is None or self.ranks.share.is_first:
            return self.config.vocab_size
        first, end = self.ranks.share.of(self.config.vocab_size)
        return end - first

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv_cache: KVPages,
        paging: Paging | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Compute one step, and write the keys and values of its tokens to `kv_cache`.

        Args:
            batch: the step's tokens; see `models.batch.Batch` for the shapes.
            kv_cache: in the model's dtype, or in a format with scales.
            paging: the result of `ops.plan` for both, if it was computed before.
            logits: the tensor for the result; None: a new one.

        Returns:
            float32 [num_logits, vocab_size] for the tokens of `batch.logits_rows`. With a
            communicator only the first rank has all columns; the others have their part.
        """
        projected = self._project_vocabulary(self.hidden(batch, kv_cache, paging))
        return self._scaled(projected.float() if logits is None else logits.copy_(projected))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits, float32 [num_rows, vocab_size], of some rows of the result of `hidden`."""
        return self._scaled(self._project_vocabulary(hidden).float())

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv_cache: KVPages, paging: Paging | None = None) -> Tensor:
        """As `forward`, but returns the normed hidden states, [num_logits, hidden_size]."""
        return self._states(batch, kv_cache, paging)[1]

    def _states(
        self, batch: Batch, kv_cache: KVPages, paging: Paging | None
    ) -> tuple[Tensor, Tensor]:
        """The hidden states before and after the last norm, [num_logits, hidden_size] each."""
        ops, kept = self.ops, self.kept
        num_tokens = batch.token_ids.shape[0]
        if paging is None:
            paging = ops.plan(batch, kv_cache, self.config.sliding_windows)
        adapted = StepAdapters.of(batch, self.adapters, ops)
        rotations = [table.at(batch.positions) for table in self._ropes]
        shared: SharedKV = {}
        hidden, normed = self._inputs(batch.token_ids)
        streams = None
        if self._altup is not None:
            streams = self._altup.begin(ops, batch.token_ids, hidden)
        last = len(self._layers) - 1
        states: dict[int, Tensor] = {}
        keeps_last = kept is not None and last + 1 in kept.layers and not kept.of_rows
        is_cut = batch.logits_rows.shape[0] != num_tokens
        for index, layer in enumerate(self._layers):
            if streams is not None and layer.altup is not None:
                hidden, normed = streams.enter(layer.altup)
            if kept is not None and index in kept.layers:
                states[index] = hidden
            rotation = rotations[layer.rope]
            attended = self._attend(
                layer, index, normed, rotation, kv_cache, paging, adapted, shared
            )
            if index == last and is_cut and not keeps_last:
                # After the last attention only the rows whose logits are needed matter (if there
                # are as many rows as tokens, they are all rows in order).
                attended = attended.index_select(0, batch.logits_rows)
                hidden = hidden.index_select(0, batch.logits_rows)
                adapted = None if adapted is None else adapted.of_rows(batch.logits_rows)
                streams = None if streams is None else streams.of_rows(batch.logits_rows)
            norms = layer.output_norm, layer.post_norm
            adapt = None if adapted is None else adapted.adding(index, "output")
            hidden, normed = self._project_add_norm(attended, layer.output, hidden, norms, adapt)
            next_norm = self._norm if index == last else self._layers[index + 1].input_norm
            next_norm = next_norm if streams is None else None
            norms = layer.down_norm, next_norm
            hidden, normed = self._mlp(layer.mlp, index, normed, hidden, norms, adapted)
            if streams is not None and layer.altup is not None:
                streams.leave(layer.altup, hidden)
        if streams is not None:
            hidden = streams.join()
            normed = self._normed(hidden, self._norm)
        if kept is not None:
            states[last + 1] = normed
            kept.write(batch, torch.cat([states[each] for each in kept.layers], 1))
        if keeps_last and is_cut:
            rows = batch.logits_rows
            return hidden.index_select(0, rows), normed.index_select(0, rows)
        return hidden, normed

    def _inputs(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states before the first layer, and what its attention multiplies."""
        hidden = self._embed(token_ids)
        return hidden, self._normed(hidden, self._layers[0].input_norm)

    def _attend(
        self,
        layer: Layer,
        index: int,
        normed: Tensor,
        rotation: Rotation,
        kv_cache: KVPages,
        paging: Paging,
        adapted: StepAdapters | None,
        shared: SharedKV,
    ) -> Tensor:
        """The attention of layer `index`, without the projection of its output."""
        ops, config = self.ops, self.config
        projected = ops.project(normed, layer.qkv)
        if adapted is not None:
            adapted.adding(index, "qkv")(projected, normed)
        if layer.latent is not None:
            return layer.latent(ops, normed, projected, rotation.rows, kv_cache, index, paging)
        if layer.delta_net is not None:
            return layer.delta_net(ops, normed, projected, kv_cache, index, paging)
        gates = None
        if config.gates_output:
            num_values = config.num_heads * config.head_dim
            projected, gates = projected.tensor_split((-num_values,), 1)
            projected = projected.contiguous()
        heads = projected.view(len(projected), -1, config.head_dim)
        turned = heads[:, : config.num_heads + config.num_kv_heads]
        if config.rotates_pairs:
            arrange_pairs_(turned[..., : config.rope_dim])
        squares = None
        if config.qk_norm_all_heads:
            squares = mean_squares(turned, config.num_heads, self.ranks)
        ops.norm_rope_(turned, layer.qk_norm, config.rms_norm_eps, rotation.rows, squares)
        if rotation.query_scales is not None:
            heads[:, : config.num_heads].mul_(rotation.query_scales)
        heads = self._with_kv(heads, layer, index, shared)
        attended = ops.attention(heads, kv_cache, index, layer.window, paging, layer.sinks)
        return attended if gates is None else attended * gates.sigmoid()

    def _with_kv(self, heads: Tensor, layer: Layer, index: int, shared: SharedKV) -> Tensor:
        """The queries, keys and values of a step, those of another layer if it shares them.

        The layer then writes the same numbers to the same place again, so that no device needs a
        second form of attention.
        """
        config = self.config
        if layer.kv_source != index:
            return torch.cat((heads, shared[layer.kv_source]), 1)
        if layer.v_norm is not None:
            values = heads[:, config.num_heads + config.num_kv_heads :]
            flat = values.reshape(-1, config.head_dim)
            values.copy_(self._normed(flat, layer.v_norm).view(values.shape))
        if config.num_shared_layers:
            shared[index] = heads[:, config.num_heads :]
        return heads

    def _mlp(
        self,
        mlp: Mlp | ExpertMlp,
        index: int,
        normed: Tensor,
        hidden: Tensor,
        norms: Norms,
        adapted: StepAdapters | None,
    ) -> tuple[Tensor, Tensor]:
        """Add the MLP's output for `normed` to `hidden`. Returns the sum, and the sum normalised
        for the next layer."""
        ops = self.ops
        if isinstance(mlp, Mlp):
            activation = self.config.activation
            if adapted is None and mlp.cutoff is None:
                inner = ops.project_gated(normed, mlp.gate_up, activation)
                return self._project_add_norm(inner, mlp.down, hidden, norms)
            stacked = ops.project_stacked(normed, mlp.gate_up)
            if adapted is not None:
                adapted.adding(index, "gate_up")(stacked, normed)
            if mlp.cutoff is not None:
                cut_off_(stacked.chunk(2, 1)[0], mlp.cutoff)
            inner = ops.gated(stacked, activation)
            adapt = None if adapted is None else adapted.adding(index, "down")
            return self._project_add_norm(inner, mlp.down, hidden, norms, adapt)
        logits = ops.project(normed.to(mlp.router_dtype), mlp.router)
        mixed = ops.mix_experts(normed, logits, mlp.experts)
        if mlp.shared is not None:
            shared = ops.project(ops.project_gated(normed, mlp.shared.gate_up), mlp.shared.down)
            if mlp.shared_gate is not None:
                shared = shared * ops.project(normed, mlp.shared_gate).sigmoid()
            mixed = mixed + shared
        if self.ranks is not None:
            self.ranks.all_reduce_(mixed)
        return self._add_norm(mixed, hidden, norms)

    def _project_add_norm(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor,
        norms: Norms,
        adapt: Adapt | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Ops.project_add_norm`, summed over the ranks, each of which has some columns."""
        own, following = norms
        is_plain = own is None and adapt is None and self.config.residual_scale == 1.0
        if self.ranks is None and is_plain and following is not None:
            eps = self.config.rms_norm_eps
            return self.ops.project_add_norm(x, weight, residual, following, eps)
        projected = self.ops.project(x, weight)
        if adapt is not None:  # before the sum: a rank has the same columns of A as of the weight
            adapt(projected, x)
        if self.ranks is not None:
            projected = self.ranks.all_reduce_(projected)
        return self._add_norm(projected, residual, norms)

    def _add_norm(self, x: Tensor, residual: Tensor, norms: Norms) -> tuple[Tensor, Tensor]:
        """Return residual + x, and the same after RMS normalisation."""
        own, following = norms
        x = self._normed(x, own)
        if self.config.residual_scale != 1.0:
            x = x * self.config.residual_scale
        if following is None:
            total = residual + x
            return total, total
        return self.ops.add_norm(x, residual, following, self.config.rms_norm_eps)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else self.ops.rms_norm(x, norm, self.config.rms_norm_eps)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings of tokens, [num_tokens, hidden_size]."""
        if self.ranks is None:
            found = self._looked_up(token_ids)
        else:
            first, end = self.ranks.share.of(self.config.vocab_size)
            rows = token_ids - first
            elsewhere = (rows < 0) | (rows >= end - first)
            found = self._looked_up(rows.masked_fill_(elsewhere, 0))
            found = self.ranks.all_reduce_(found.masked_fill_(elsewhere.unsqueeze(1), 0))
        return found if self._embedding_scale == 1.0 else found.mul_(self._embedding_scale)

    def _looked_up(self, rows: Tensor) -> Tensor:
        if isinstance(self._embedding, Tensor):
            return functional.embedding(rows, self._embedding)
        return self._embedding.rows(rows)

    def _project_vocabulary(self, hidden: Tensor) -> Tensor:
        projected = self.ops.project(hidden, self._lm_head)
        if self.ranks is None:
            return projected
        num_ranks = self.ranks.share.num_ranks
        parts = [Share(rank, num_ranks).of(self.config.vocab_size) for rank in range(num_ranks)]
        return self.ranks.gather(projected, [end - first for first, end in parts])

    def _scaled(self, logits: Tensor) -> Tensor:
        """Scale and cap float32 logits in place: they need no more memory than other models'."""
        cap = self.config.logit_cap
        if self.config.logit_divisor != 1.0:
            logits.div_(self.config.logit_divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def described(self) -> DenseModel | None:
        """The packed weights, for the compiled step; None if it lacks a feature of the model."""
        if not_compiled(self.config):
            return None
        layers = []
        for layer in self._layers:
            assert isinstance(layer.mlp, Mlp)
            assert layer.input_norm is not None and layer.post_norm is not None
            layers.append(
                DenseLayer(
                    input_norm=layer.input_norm,
                    qkv=layer.qkv,
                    qk_norm=layer.qk_norm,
                    output=layer.output,
                    post_norm=layer.post_norm,
                    gate_up=layer.mlp.gate_up,
                    down=layer.mlp.down,
                    window=layer.window,
                )
            )
        return DenseModel(
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            eps=self.config.rms_norm_eps,
            embedding=self._embedding,
            rope=self._ropes[0].table,
            layers=layers,
            norm=self._norm,
            head=self._lm_head,
        )


class CpuDecoder(Decoder):
    """A decoder of which each step is one call of a compiled program (`csrc/step.cpp`).

    Args:
        decoder: its twin, whose packed weights it reads.
        step: the program with these weights.
    """

    def __init__(self, decoder: Decoder, step: CpuStep) -> None:
        vars(self).update(vars(decoder))
        self.step = step

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv_cache: KVPages,
        paging: Paging | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        if not self._knows(batch):
            return super().forward(batch, kv_cache, paging, logits)
        computed = self.step.run(batch, kv_cache, self._kept_layers)
        self._keep(batch)
        return computed if logits is None else logits.copy_(computed)

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv_cache: KVPages, paging: Paging | None = None) -> Tensor:
        if not self._knows(batch):
            return super().hidden(batch, kv_cache, paging)
        computed = self.step.hidden(batch, kv_cache, self._kept_layers)
        self._keep(batch)
        return computed

    def _knows(self, batch: Batch) -> bool:
        """The program knows no adapters and no positions beside those of the context, and states
        only before layers or of rows with logits."""
        kept = self.kept
        knows_states = kept is None or kept.of_rows or len(self._layers) not in kept.layers
        return batch.adapters is None and not batch.are_shifted and knows_states

    @property
    def _kept_layers(self) -> tuple[int, ...]:
        return () if self.kept is None else self.kept.layers

    def _keep(self, batch: Batch) -> None:
        if self.kept is not None:
            self.kept.write(batch, self.step.states)


def build_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    ops: Ops | None = None,
    quantization: Quantization | None = None,
    communicator: Communicator | None = None,
) -> Decoder:
    """The fastest decoder for the device of the weights. The arguments are those of `Decoder`."""
    decoder = Decoder(config, weights, ops, quantization, communicator)
    is_rank, has = communicator is not None, not_compiled(config)
    step, decoder.step_sentence = cpu_step(decoder.described(), has, is_rank=is_rank)
    return decoder if step is None else CpuDecoder(decoder, step)


def load_model(
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    quantization: Quantization | None = None,
    communicator: Communicator | None = None,
    ops: Ops | None = None,
) -> Decoder:
    """Load a checkpoint's weights, or a rank's part of them, into a decoder that is ready to run.

    Args:
        progress: called with (bytes loaded, bytes in all) after each tensor.
        quantization: how matrices are quantised, each as soon as its layer was read.
        ops: as in `Decoder`.

    Raises:
        ModelError: the weights do not fit the model's config, or are damaged.
    """
    share = WHOLE if communicator is None else communicator.share
    config = share.config(model.config)
    ops = ops or ops_for(device, config.num_heads, quantization, dtype, scores_of(config))
    quantises = quantization not in (None, "packed")
    keeps_packed = None if quantises else ops.keeps_packed
    weights = load_weights(model, dtype, device, progress, share, keeps_packed=keeps_packed)
    decoder = build_decoder(config, weights, ops, communicator=communicator)
    del weights
    _give_back_freed_memory()
    if device.type == "cpu":
        log.info("Decode steps: %s.", decoder.step_sentence)
    if isinstance(decoder, CpuDecoder):
        # This comes after memory was freed; otherwise freeing would split the huge pages again.
        log.info("%d MB of weights are in huge pages.", decoder.step.use_huge_pages() >> 20)
    return decoder


def scores_of(config: ModelConfig) -> Scores:
    """How attention makes its scores (with latents, their scale is that of `LatentConfig`)."""
    index = None if config.latent is None else config.latent.index
    found = None if index is None else TokenIndex(index.num_chosen, index.head_dim)
    return Scores(config.score_scale, config.score_cap, found)


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 [num_positions, head_dim / 2] each, as transformers does.

    Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), and
    `apply_scaling` of Llama 3.1's reference code.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return float32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "none":
        return torch.zeros_like(inverse)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "longrope":
        return inverse / torch.tensor(rope.long_factors if rope.is_long else rope.short_factors)
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between them."""
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    ramp = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - ramp) * inverse / rope.factor + ramp * inverse
    scaled = torch.where(
        wavelength > rope.original_max_position / low, inverse / rope.factor, blended
    )
    return torch.where(wavelength < rope.original_max_position / high, inverse, scaled)


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> Tensor:
    """Interpolate dimensions that rotate less than `beta_slow` times in the original length."""

    def dimension(num_turns: float) -> float:
        rotations = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(rotations) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # If the original length is only a few positions, the ends may be in the wrong order. Then the
    # ramp is 0 everywhere beyond `low`, as in transformers.
    width = high - low if high != low else 0.001
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / width).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def _give_back_freed_memory() -> None:
    """Return freed memory between packed weights, which glibc keeps: 100 MB for a 160M model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
