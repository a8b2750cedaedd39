"""Decoders that draft with layers of another one; see `draft_layers`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import silu

from disagg.errors import ModelError
from disagg.kernels.cpu.step import DenseModel, cpu_step
from disagg.kernels.dispatch import ops_for
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import Paging, Weight
from disagg.models.batch import Batch
from disagg.models.decoder import CpuDecoder, Decoder, scores_of
from disagg.models.draft_layers import KNOWN_IDS, DraftLayers
from disagg.models.kept_states import KeptStates
from disagg.models.layers import LayerPacker
from disagg.models.model_config import not_compiled
from disagg.models.packing import DeviceFormat
from disagg.models.weights import LayerWeights, WeightReader


class _Part(Decoder):
    """A decoder that shares the tables of another one."""

    def __init__(self, whole: Decoder, drafts: DraftLayers) -> None:
        vars(self).update(vars(whole))
        self.config = drafts.config
        self.adapters = self.kept = None
        self._layers = whole._layers[: drafts.config.num_layers]


def first_layers_of(whole: Decoder, drafts: DraftLayers) -> Decoder:
    """The decoder of the first layers of another one, with the same weights."""
    part = _Part(whole, drafts)
    step, part.step_sentence = cpu_step(part.described(), not_compiled(part.config))
    return part if step is None else CpuDecoder(part, step)


class HeadDecoder(_Part):
    """A head: one layer whose inputs are a token and a hidden state of the model before it.

    Its position i has the token at position i + 1 of a sequence and the model's state at position
    i, so that its logits are those of the token at i + 2. Behind the sequence it goes on with what
    it made itself.

    Args:
        whole: the model, whose tables it uses if it has none.

    Attributes:
        given: [num_tokens, hidden size], the states of the next step; None: zeros.
        made: [num_logits, hidden size], what the last step made of its rows with logits.

    Raises:
        ModelError: the weights are damaged, or its tokens are not those of the model.
    """

    def __init__(self, whole: Decoder, drafts: DraftLayers) -> None:
        super().__init__(whole, drafts)
        config = self.config
        self.ops = ops_for(self.device, config.num_heads, None, self.dtype, scores_of(config))
        self.given: Tensor | None = None
        self.made: Tensor | None = None
        format = DeviceFormat(self.dtype.itemsize)
        reader = WeightReader(drafts.tensors, self.dtype, self.device, 0, None, format)
        outer = reader.read(drafts.outer)
        layer = LayerWeights(**reader.read(drafts.layer))
        self._layers = [LayerPacker(self.ops, config, self.dtype, None).pack(0, layer)]
        self._ropes = self._rope_tables()
        self._norm, self._token_norm = outer["norm"], outer["token_norm"]
        self._state_norm = outer["state_norm"]
        self._norms_residual, self._kept = drafts.norms_residual, drafts.kept
        self._fuse, self._combine = (
            self.ops.pack(outer[name], None) if name in outer else None
            for name in ("fuse", "combine")
        )
        if "embedding" in outer:
            self._embedding, self._embedding_scale = outer["embedding"], 1.0
        if "lm_head" in outer:
            self._lm_head = self.ops.pack_table(outer["lm_head"])
        if self._combine is None:
            self._layers = [replace(self._layers[0], input_norm=self._token_norm)]
        self._step, self.step_sentence = cpu_step(self.described(), "states as its input")
        self._token_ids: Tensor | None = None  # of its logits; None: all tokens
        if "d2t" in drafts.tensors:
            ids = reader.read_stored("d2t") + torch.arange(drafts.num_draft_tokens)
            self._token_ids = _known(ids, "d2t", drafts).to(self.device)

    def keep_states(self, whole: Decoder, num_slots: int) -> KeptStates:
        """Let the model keep the states that the head needs, in so many KV slots."""
        by_slot = _new_states(num_slots + 1, self)
        whole.kept = KeptStates(self._kept, self._fused, by_slot)
        return whole.kept

    def _fused(self, states: Tensor) -> Tensor:
        return states if self._fuse is None else self.ops.project(states, self._fuse)

    def described(self) -> DenseModel | None:
        if self._norms_residual or self._combine is not None:
            return None
        described = super().described()
        return described and replace(described, state_norm=self._state_norm)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv_cache: KVPages,
        paging: Paging | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        if self._step is None:
            return super().forward(batch, kv_cache, paging, logits)
        states = self._given(len(batch.token_ids))
        computed, self.made = self._step.run_head(batch, kv_cache, states)
        computed = self._by_token_id(computed)
        return computed if logits is None else logits.copy_(computed)

    def _given(self, num_tokens: int) -> Tensor:
        return _new_states(num_tokens, self) if self.given is None else self.given

    def _states(
        self, batch: Batch, kv_cache: KVPages, paging: Paging | None
    ) -> tuple[Tensor, Tensor]:
        self.made, _ = made = super()._states(batch, kv_cache, paging)
        return made

    def _inputs(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self._normed(self._embed(token_ids), self._token_norm)
        states = self._given(len(tokens))
        normed = self._normed(states, self._state_norm)
        both = torch.cat((tokens, normed), 1)
        if self._combine is None:
            return (normed if self._norms_residual else states), both
        hidden = self.ops.project(both, self._combine)
        return hidden, self._normed(hidden, self._layers[0].input_norm)

    def _project_vocabulary(self, hidden: Tensor) -> Tensor:
        return self._by_token_id(super()._project_vocabulary(hidden))

    def _by_token_id(self, projected: Tensor) -> Tensor:
        if self._token_ids is None:
            return projected
        logits = projected.new_full((len(projected), self.config.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._token_ids, projected)


class MedusaHeads:
    """Heads that each name a token from a state of the model: the first one the token after that
    which the model names itself, the next one the token after it, and so on.

    Args:
        whole: the model, whose table a head uses that has none.

    Raises:
        ModelError: the weights are damaged, or their tokens are not those of the model.
    """

    def __init__(self, whole: Decoder, drafts: DraftLayers) -> None:
        self.config, self.ops, self.device = drafts.config, whole.ops, whole.device
        self.dtype, self._kept = whole.dtype, drafts.kept
        format = DeviceFormat(self.dtype.itemsize)
        reader = WeightReader(drafts.tensors, self.dtype, self.device, 0, None, format)
        read, blocks = reader.read(drafts.outer), defaultdict[str, list[Weight]](list)
        for name in read:  # in the order of heads, and of the blocks of each
            kind, head, *_ = name.split(".")
            if kind == "blocks" and name.endswith("weight"):
                bias = read.get(f"{name.removesuffix('weight')}bias")
                blocks[head].append(self.ops.pack(read[name], bias))
        self._heads = [
            (own, self.ops.pack_table(read[table]) if table in read else whole._lm_head)
            for own, table in ((own, f"lm_heads.{head}.weight") for head, own in blocks.items())
        ]
        self._token_ids: Tensor | None = None  # of a table's rows; None: all tokens
        if drafts.num_draft_tokens != self.config.vocab_size:
            ids = _known(reader.read_stored(KNOWN_IDS), KNOWN_IDS, drafts)
            self._token_ids = ids.to(self.device)

    @property
    def num_heads(self) -> int:
        return len(self._heads)

    def keep_states(self, whole: Decoder, num_slots: int) -> KeptStates:
        """As `HeadDecoder.keep_states`."""
        by_slot = _new_states(num_slots + 1, self)
        whole.kept = KeptStates(self._kept, lambda states: states, by_slot, of_rows=True)
        return whole.kept

    @torch.inference_mode()
    def token_ids(self, states: Tensor, num_tokens: int) -> Tensor:
        """The likeliest tokens of the first heads, int64 [num_states, num_tokens].

        Args:
            states: [num_states, hidden size], what comes out of the model's last norm.
        """
        named = []
        for blocks, table in islice(self._heads, num_tokens):
            x = states
            for block in blocks:
                x = x + silu(self.ops.project(x, block))
            named.append(self.ops.project(x, table).argmax(-1))
        rows = torch.stack(named, 1)
        return rows if self._token_ids is None else self._token_ids[rows]


def _new_states(num: int, of: HeadDecoder | MedusaHeads) -> Tensor:
    return torch.zeros(num, of.config.hidden_size, dtype=of.dtype, device=of.device)


def _known(ids: Tensor, name: str, drafts: DraftLayers) -> Tensor:
    """Raise `ModelError` unless the model has all these tokens."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < drafts.config.vocab_size:
        raise ModelError(
            f"{name} of {drafts.name} names tokens that the model does not have: it was made for"
            " another model, or is damaged"
        )
    return ids
