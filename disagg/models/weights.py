"""Reads weights from safetensors or GGUF into a decoder's fused tensors or packed matrices.

It checks every name, shape and value before the first forward pass. `parts` defines which tensors
are fused, and in which order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ModelError
from disagg.kernels.packed_matrix import PackedMatrix, stack
from disagg.kernels.packed_sizes import Keeper, Packing
from disagg.models.checkpoint import Range, StoredTensor
from disagg.models.description import ModelDescription
from disagg.models.gguf_model import GgufStored
from disagg.models.gguf_values import read_values
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.parts import Fields, Part, all_fields, check_weights
from disagg.models.quantized import QuantizedStored
from disagg.models.quantized_values import Quantized, quantized
from disagg.models.share import WHOLE, Share

log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]  # bytes loaded so far, bytes in all
Matrix: TypeAlias = Any  # a Tensor, or a `PackedMatrix` if `load_weights` keeps it packed


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]. Fields that a family does not have are None.

    In a layer with experts, `gate_up`, `down` and their biases have the rows of all experts, one
    expert after the other. Matrices are packed if `load_weights` keeps them so.
    """

    # [(num_heads + 2 * num_kv_heads) * head_dim, hidden], and num_heads * head_dim rows for gates;
    # of a layer that reads the KV of another: [num_heads * head_dim, hidden];
    # latent: [q | q_a, kv_a, key of the index]; delta net: [q, k, v, gates]
    qkv: Matrix
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [head_dim], or of all heads [num_heads * head_dim]
    k_norm: Tensor | None = None  # [head_dim], or of all heads [num_kv_heads * head_dim]
    output: Matrix  # [hidden, num_heads * head_dim]
    output_bias: Tensor | None = None
    gate_up: Matrix  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None = None
    down: Matrix  # [hidden, intermediate]
    down_bias: Tensor | None = None
    input_norm: Tensor | None = None  # [hidden]: before attention
    output_norm: Tensor | None = None  # [hidden]: after attention
    post_norm: Tensor | None = None  # [hidden]: before the MLP
    down_norm: Tensor | None = None  # [hidden]: after the MLP
    sinks: Tensor | None = None  # [num_heads]
    q_a_norm: Tensor | None = None  # [query_rank] of latent attention
    q_b: Matrix | None = None  # [num_heads * query_dim, query_rank], then queries of the index
    kv_a_norm: Tensor | None = None  # [rank]
    kv_b: Tensor | None = None  # [num_heads * (nope_dim + value_dim), rank]
    index_norm: Tensor | None = None  # [head_dim] of `IndexConfig`
    index_norm_bias: Tensor | None = None
    index_weights: Tensor | None = None  # float32 [num_heads of `IndexConfig`, hidden]
    delta_gates: Tensor | None = None  # [2 * num_heads of `DeltaHeads`, hidden]: beta, decay
    taps: Tensor | None = None  # [channels, taps]
    decay_rate: Tensor | None = None  # float32 [num_heads], its logarithm
    decay_bias: Tensor | None = None  # float32 [num_heads]
    delta_norm: Tensor | None = None  # [value_dim]
    router: Tensor | None = None  # [num_experts, hidden]
    router_bias: Tensor | None = None
    score_bias: Tensor | None = None  # float32 [num_experts]
    shared_gate_up: Matrix | None = None  # [2 * shared intermediate, hidden]
    shared_down: Matrix | None = None
    shared_gate: Tensor | None = None  # [1, hidden]
    altup: Mapping[str, Matrix] | None = None  # of several residual streams, see `models.altup`


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a decoder. `lm_head` is `embedding` itself if the two are tied.

    The `layers` of a checkpoint can be iterated once. Each layer is read when the iteration reaches
    it, so that code that packs layers never holds all of them twice.
    """

    embedding: Matrix  # [vocab, hidden]
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Matrix  # [vocab, hidden]
    dtype: torch.dtype  # dtype of activations
    altup: Mapping[str, Matrix] | None = None  # of several residual streams, see `models.altup`


def load_weights(
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    share: Share = WHOLE,
    *,
    keeps_packed: Keeper | None = None,
) -> DecoderWeights:
    """Read a checkpoint, cast to `dtype`, onto `device`; layers are read later, one by one.

    Args:
        share: the rank's share, which is read; shapes are those of this part.
        keeps_packed: quantised matrices that `packing` keeps for this device become
            `PackedMatrix`; None: all are widened.

    Raises:
        ModelError: tensors are missing, unexpected, of the wrong shape, unreadable or hold NaN;
            the message names them. The values of a layer are checked when the layer is read.
    """
    check_weights(model)
    config = model.config
    outer, *layers = all_fields(config, share)
    kept = model.tensors if keeps_packed is not None else None
    format = DeviceFormat(dtype.itemsize, keeps_packed or "gpu", kept)
    total_nbytes = weights_nbytes(config, format, share)
    reader = WeightReader(model.tensors, dtype, device, total_nbytes, progress, format)
    tables = nested(reader.read(outer))
    tables.setdefault("lm_head", tables["embedding"])
    # The reader and its mapped files are freed after the last layer.
    read_layers = (LayerWeights(**nested(reader.read(fields))) for fields in layers)
    return DecoderWeights(layers=read_layers, dtype=dtype, **tables)


def nested(fields: Mapping[str, Matrix]) -> dict[str, Any]:
    """By name; a field "x.y" is one of the mapping x."""
    found: dict[str, Any] = {}
    for name, matrix in fields.items():
        whole, _, part = name.rpartition(".")
        (found.setdefault(whole, {}) if whole else found)[part] = matrix
    return found


def _in_order(stored: Tensor, part: Part) -> Tensor:
    """Separate the rows of gate and up of all experts, [experts, rows, ...], if they alternate."""
    if not part.is_interleaved:
        return stored
    return stored.view(len(stored), -1, 2, *stored.shape[2:]).transpose(1, 2).reshape(stored.shape)


class WeightReader:
    """Reads parts into fused tensors, with one file open at a time."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        device: torch.device,
        total_nbytes: int,
        progress: Progress | None,
        format: DeviceFormat,
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._format = format
        self._total_nbytes = total_nbytes
        self._loaded_nbytes = 0
        self._opened: dict[Path, safe_open] = {}

    def read(self, fields: Fields) -> dict[str, Matrix]:
        """Read the fields of a layer, or those outside the layers."""
        packings = self._format.packings(fields)
        return {name: self._field(its, packings.get(name)) for name, its in fields.items()}

    def read_stored(self, name: str) -> Tensor:
        """Read a tensor that is no weight as it is stored, onto the host."""
        with self._naming(Part(name, ())):
            return self._read(self._stored[name].name or name, self._stored[name], ())

    def _field(self, parts: list[Part], packing: Packing | None) -> Matrix:
        """Read `parts`, and stack them along their first dimension."""
        made: Matrix = None if packing is None else self._packed(parts, packing)
        nbytes = self._format.nbytes(parts, None if made is None else packing)
        self._loaded_nbytes += nbytes
        if made is None:
            made = self._floats(parts)
        if self._progress is not None:
            self._progress(self._loaded_nbytes, self._total_nbytes)
        return made

    def _packed(self, parts: list[Part], packing: Packing) -> PackedMatrix | None:
        matrices = []
        for part in parts:
            with self._naming(part):
                matrix = self._one(part, self._device)
                assert isinstance(matrix, Quantized)
                own = matrix.packed(packing)
            if own is not None:
                matrices.append(own)
        made = stack(matrices) if len(matrices) == len(parts) else None
        if made is None:
            names = ", ".join(part.name for part in parts)
            log.warning("%s: converted to floats, because their columns differ in order.", names)
        return made

    def _floats(self, parts: list[Part]) -> Tensor:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        dtype = torch.float32 if parts[0].is_exact else self._dtype
        fused = torch.empty(shape, dtype=dtype, device=self._device)
        row = 0
        for part in parts:
            rows = fused[row : row + part.shape[0]]
            with self._naming(part):
                read = self._one(part)
                read = read.widened(dtype) if isinstance(read, Quantized) else read
            rows.copy_(read.reshape(part.shape))
            if part.is_less_one:
                rows += 1.0
            # The extremes are NaN if any value is. This takes a tenth of the time of `isfinite`.
            if not all(math.isfinite(float(extreme)) for extreme in torch.aminmax(rows)):
                raise ModelError(
                    f"{part.name} in {self._stored[part.name].file} holds NaN or infinite values "
                    f"as {self._dtype}; the file is damaged, download it again"
                )
            row += part.shape[0]
        return fused

    @contextmanager
    def _naming(self, part: Part) -> Iterator[None]:
        """Convert the errors of reading a tensor to `ModelError`s that name it."""
        name, file = part.name, self._stored[part.name].file
        try:
            yield
        except ValueError as error:
            raise ModelError(f"{name} in {file} is damaged: {error}; download it again") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{name} cannot be read from {file}: {error}") from error

    def _one(self, part: Part, device: torch.device | None = None) -> Tensor | Quantized:
        """Read a tensor. device: where the pieces of a quantised one are moved before."""
        name, stored = part.name, self._stored[part.name]
        if isinstance(stored, GgufStored):
            return read_values(stored, part.box)
        if isinstance(stored, QuantizedStored):

            def piece(role: str, box: Sequence[Range] = ()) -> Tensor:
                own = stored.pieces[role]
                read = self._read(own.name, own, box)
                return _in_order(read if device is None else read.to(device), part)

            return quantized(stored, piece, part.box)
        read = self._read(stored.name or name, stored, part.box)
        return _in_order(read.transpose(-2, -1) if part.is_transposed else read, part)

    def _read(self, name: str, stored: StoredTensor, box: Sequence[Range]) -> Tensor:
        if stored.file not in self._opened:
            self._opened[stored.file] = safe_open(stored.file, framework="pt")
        opened = self._opened[stored.file]
        if [*box] in ([], [(0, size) for size in stored.shape]):
            tensor: Tensor = opened.get_tensor(name)  # type: ignore[no-untyped-call]
        else:  # read only these bytes
            whole = opened.get_slice(name)  # type: ignore[no-untyped-call]
            tensor = whole[tuple(slice(*own) for own in box)]
        return tensor
