"""Steps as one call of a compiled program (`csrc/step.cpp`), for dense decoders in bf16.

A step in torch has some hundred calls, and with few rows starting them takes as long as their work.
The program reads weights in oneDNN's packed layout, or weights of 8 or 4 bits, so that torch can
compute from the same copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Array, Structure, addressof, byref, c_float, c_int32, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from disagg.kernels.cpu.attention import LayerPlace, cpu_pages, plan_sequences
from disagg.kernels.cpu.huge_pages import use_huge_pages
from disagg.kernels.cpu.library import LANES, find_step
from disagg.kernels.cpu.linear import OnednnLinear, PanelLinear
from disagg.kernels.cpu.narrow_linear import NarrowLinear
from disagg.kernels.cpu.panels import CpuMatrix
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch, Weight

# With more tokens, or more of one sequence, products and attention share what they read.
MOST_ROWS = 256
MOST_ROWS_OF_CHUNK = 16
_UNKNOWN_TOKEN = 2  # `Status` of csrc/model.h
_Matrix: TypeAlias = OnednnLinear | PanelLinear | NarrowLinear
_IN_PANELS = OnednnLinear, PanelLinear  # weights of 16 bits


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """One layer's weights, packed by `TorchOps`."""

    input_norm: Tensor  # [hidden]
    qkv: Weight
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Weight
    post_norm: Tensor  # [hidden]
    gate_up: Weight
    down: Weight
    window: int | None  # number of positions that a token sees, including itself; None: all


@dataclass(frozen=True, slots=True)
class DenseModel:
    """All weights of a decoder without experts."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    embedding: Tensor | NarrowLinear  # [vocab, hidden]
    rope: Tensor  # of `TorchOps.rope_table`
    layers: Sequence[DenseLayer]
    norm: Tensor  # [hidden]
    head: Weight
    state_norm: Tensor | None = None  # [hidden]: the first layer also reads states (`models.heads`)


class StepBatch(PagedBatch, Protocol):
    """The fields of `models.batch.Batch` that a step reads."""

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def logits_rows(self) -> Tensor: ...


class _LayerPointers(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", CpuMatrix),
        ("output", CpuMatrix),
        ("gate", CpuMatrix),
        ("up", CpuMatrix),
        ("down", CpuMatrix),
        ("window", c_int32),
    )


class _Model(Structure):
    _fields_ = (
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("vocab", c_int32),
        ("eps", c_float),
        ("embedding", c_void_p),
        ("rope", c_void_p),
        ("norm", c_void_p),
        ("state_norm", c_void_p),
        ("head", CpuMatrix),
        ("table", CpuMatrix),
        ("layers", POINTER(_LayerPointers)),
    )


class _Batch(Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("states", c_void_p),
        ("sequences", c_void_p),
        ("places", c_void_p),
        ("logits_rows", c_void_p),
        ("hidden", c_void_p),
        ("made", c_void_p),
        ("logits", c_void_p),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_logits", c_int32),
        ("is_each_alone", c_int32),
    )


class CpuStep:
    """The compiled step of one model. Only one thread at a time may use it.

    Args:
        library: the one that `library.find_step` loaded.
        model: the model whose weights it reads; kept alive.

    Attributes:
        states: bfloat16 [num_tokens, len(kept_layers) * hidden], the inputs of the layers that the
            last step was to keep, side by side; or [num_logits, hidden], what came out of the last
            norm, for which the number of layers stands.
    """

    def __init__(self, library: ctypes.CDLL, model: DenseModel) -> None:
        library.disagg_step_new.restype = c_void_p
        library.disagg_step_free.argtypes, library.disagg_step_free.restype = [c_void_p], None
        library.disagg_step_run.argtypes = [c_void_p, c_void_p, c_void_p, c_int32]
        self._library = library
        self._model = model
        self.states = torch.empty(0, 0, dtype=torch.bfloat16)
        self._behind_layers = (len(model.layers),)
        self._num_logits, self._hidden_size = model.head.num_out, model.head.num_in
        table = model.embedding
        self._vocab_size = len(table) if isinstance(table, Tensor) else table.num_out
        layers = (_LayerPointers * len(model.layers))(*map(_layer, model.layers))
        described = _Model(
            num_layers=len(model.layers),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            hidden=self._hidden_size,
            inner=model.layers[0].down.num_in,
            vocab=self._vocab_size,
            eps=model.eps,
            embedding=table.data_ptr() if isinstance(table, Tensor) else None,
            rope=model.rope.data_ptr(),
            norm=model.norm.data_ptr(),
            state_norm=None if model.state_norm is None else model.state_norm.data_ptr(),
            head=model.head.described(),
            table=CpuMatrix() if isinstance(table, Tensor) else table.described(),
            layers=layers,
        )
        self._step = library.disagg_step_new(byref(described))
        if not self._step:
            raise MemoryError("there is not enough memory for a decode step")

    def __del__(self) -> None:
        if getattr(self, "_step", None):
            self._library.disagg_step_free(self._step)
            self._step = None

    def use_huge_pages(self) -> int:
        """Move the weights into huge pages. Returns how many bytes are in huge pages now."""
        return use_huge_pages(map(_region, _matrices(self._model)))

    def run(self, batch: StepBatch, kv_cache: KVPages, kept_layers: tuple[int, ...] = ()) -> Tensor:
        """As `Decoder.forward`, for sequences without adapters.

        Args:
            kept_layers: the layers whose inputs will be `states`.

        Raises:
            IndexError: a token id is not in the vocabulary.
            MemoryError: there is not enough memory for the step.
        """
        num_rows = batch.logits_rows.shape[0]
        given = {"logits": torch.empty(num_rows, self._num_logits)}
        if kept_layers == self._behind_layers:
            given["hidden"], kept_layers = self._new_hidden(num_rows), ()
        self._run(batch, kv_cache, kept_layers, given, has_drafts=True)
        self.states = given.get("hidden", self.states)
        return given["logits"]

    def run_head(
        self, batch: StepBatch, kv_cache: KVPages, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `run`, for a model with a `state_norm`.

        Args:
            states: bfloat16 [num_tokens, hidden].

        Returns:
            The logits, and the states before the last norm, bfloat16 [num_logits, hidden].
        """
        num_rows, states = batch.logits_rows.shape[0], states.contiguous()
        logits = torch.empty(num_rows, self._num_logits)
        made = states.new_empty(num_rows, self._hidden_size)
        given = {"logits": logits, "made": made, "states": states}
        self._run(batch, kv_cache, (), given, has_drafts=True)
        return logits, made

    def hidden(
        self, batch: StepBatch, kv_cache: KVPages, kept_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """As `Decoder.hidden`; arguments and errors are those of `run`."""
        hidden, is_kept = self._new_hidden(batch.logits_rows.shape[0]), False
        if kept_layers == self._behind_layers:
            is_kept, kept_layers = True, ()
        self._run(batch, kv_cache, kept_layers, {"hidden": hidden})
        self.states = hidden if is_kept else self.states
        return hidden

    def _new_hidden(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._hidden_size, dtype=torch.bfloat16)

    def _run(
        self,
        batch: StepBatch,
        kv_cache: KVPages,
        kept_layers: tuple[int, ...],
        given: Mapping[str, Tensor],
        *,
        has_drafts: bool = False,  # otherwise rows with logits may also be of a prompt
    ) -> None:
        num_tokens, drafts = batch.token_ids.shape[0], set[int]()
        if has_drafts and batch.max_query_len > 1:
            drafts = _begins_of_drafts(batch)
        sequences = plan_sequences(batch, kv_cache, drafts, kv_cache.num_groups)
        num_columns = batch.block_tables.shape[1] // kv_cache.num_groups
        places = _layer_places(kv_cache.places, num_columns)
        described = _Batch(
            token_ids=batch.token_ids.data_ptr(),
            sequences=sequences.address,
            places=addressof(places),
            logits_rows=batch.logits_rows.data_ptr(),
            num_tokens=num_tokens,
            num_sequences=len(sequences.fields),
            num_logits=batch.logits_rows.shape[0],
            is_each_alone=has_drafts and _is_short(batch),
            **{name: each.data_ptr() for name, each in given.items()},
        )
        num_kept = len(kept_layers)
        if num_kept or self.states.shape[1]:
            layers = (c_int32 * num_kept)(*kept_layers)
            self.states = self.states.new_empty(num_tokens, num_kept * self._hidden_size)
            out = c_void_p(self.states.data_ptr())
            self._library.disagg_step_keep(c_void_p(self._step), layers, num_kept, out)
        status = self._library.disagg_step_run(
            self._step, byref(described), byref(cpu_pages(kv_cache)), torch.get_num_threads()
        )
        if status == _UNKNOWN_TOKEN:
            raise IndexError(f"a token id is not between 0 and {self._vocab_size - 1}")
        if status:
            raise MemoryError(f"there is not enough memory for a step of {num_tokens} tokens")


@lru_cache(maxsize=64)  # 13 us for 32 layers in each step otherwise (EPYC Zen 4)
def _layer_places(places: tuple[tuple[int, int], ...], num_columns: int) -> Array[LayerPlace]:
    """Where the layers with these `KVPages.places` are; num_columns: of a group's block table."""
    found = [LayerPlace(group * num_columns, layer) for group, layer in places]
    return (LayerPlace * len(found))(*found)


def _is_short(batch: StepBatch) -> bool:
    """Whether a step has decodes and drafts only: few tokens, whose logits are all needed."""
    num_tokens = batch.token_ids.shape[0]
    return (
        num_tokens <= MOST_ROWS
        and batch.logits_rows.shape[0] == num_tokens
        and max(batch.query_lens) <= MOST_ROWS_OF_CHUNK
    )


def _begins_of_drafts(batch: StepBatch) -> set[int]:
    """The first rows of sequences whose rows are few and all have logits."""
    begins, wanted = accumulate(batch.query_lens, initial=0), set(batch.logits_rows.tolist())
    return {
        begin
        for begin, length in zip(begins, batch.query_lens, strict=False)
        if length <= MOST_ROWS_OF_CHUNK and begin in wanted
    }


def cpu_step(
    model: DenseModel | None, why_none: str = "", *, is_rank: bool = False
) -> tuple[CpuStep | None, str]:
    """The compiled step of a model, or None; and a sentence that says what computes, and why.

    Args:
        model: the model; None if the step cannot compute it.
        why_none: the features of the model that the step cannot compute.
        is_rank: whether this is a rank's part of a model.
    """
    found = find_step()
    if found.loaded is None:
        return None, found.sentence
    if is_rank:
        return None, "torch, because the sum over ranks is not compiled"
    if model is None:
        return None, f"torch, because the model has {why_none}"
    problem = _problem(model, found.loaded)
    if problem:
        return None, f"torch, because {problem}"
    return CpuStep(found.loaded, model), found.sentence


def _problem(model: DenseModel, library: ctypes.CDLL) -> str:
    """Why the compiled step does not compute this model; empty if it does."""
    if model.norm.device.type != "cpu":
        return "the model is not on a CPU"
    if model.norm.dtype != torch.bfloat16:
        return f"the model computes in {str(model.norm.dtype).removeprefix('torch.')}"
    if model.head_dim % LANES:
        return f"the head size {model.head_dim} is not a multiple of {LANES}"
    matrices = _matrices(model)
    if not all(each.can_be_in_panels for each in matrices if isinstance(each, NarrowLinear)):
        return "a 4-bit weight has rows whose length is no multiple of 8"
    wide = [each for each in matrices if not isinstance(each, NarrowLinear)]
    widths = {each.panel_width if isinstance(each, _IN_PANELS) else 0 for each in wide}
    if not all(library.disagg_step_reads_panels(width) for width in widths):
        return "oneDNN packs the weights in an unknown layout on this CPU"
    if model.state_norm is not None and len(model.state_norm) % LANES:
        return f"the hidden size is not a multiple of {LANES}"
    if any(matrix.num_in % 2 for matrix in wide):
        return "a weight has an odd number of columns"
    return ""


def _matrices(model: DenseModel) -> list[_Matrix]:
    matrices = [model.head]
    if not isinstance(model.embedding, Tensor) and model.embedding is not model.head:
        matrices.append(model.embedding)
    for layer in model.layers:
        matrices += [layer.qkv, layer.output, *layer.gate_up, layer.down]
    return matrices


def _layer(layer: DenseLayer) -> _LayerPointers:
    gate, up = layer.gate_up
    return _LayerPointers(
        input_norm=layer.input_norm.data_ptr(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        qkv=layer.qkv.described(),
        output=layer.output.described(),
        gate=gate.described(),
        up=up.described(),
        down=layer.down.described(),
        window=layer.window or 0,
    )


def _region(linear: _Matrix) -> tuple[int, int]:
    """The memory of a weight's numbers: its address and number of bytes."""
    if isinstance(linear, _IN_PANELS):
        return linear.panels, linear.panels_nbytes
    return linear.numbers.data_ptr(), linear.numbers.nbytes
