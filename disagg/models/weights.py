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
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ModelError
from disagg.kernels.packed_matrix import PackedMatrix, stack
from disagg.kernels.packed_sizes import Keeper, Packing
from disagg.models.checkpoint import StoredTensor
from disagg.models.description import ModelDescription
from disagg.models.gguf_model import GgufStored
from disagg.models.model_config import ModelConfig
from disagg.models.packed_values import packed_values
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.parts import Fields, Part, Range, layer_parts, outer_parts
from disagg.models.quantized_tensors import QuantizedStored
from disagg.models.quantized_values import widened
from disagg.models.rank_parts import rank_layer_parts, rank_outer_parts
from disagg.models.share import WHOLE, Share
from disagg.models.tensor_check import check_weights

log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]  # bytes loaded so far, bytes in all
Matrix: TypeAlias = Any  # a Tensor, or a `PackedMatrix` if `load_weights` keeps it packed

_NAN_SCALE = 255  # NaN among the scales of MXFP4


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]. Fields that a family does not have are None.

    In a layer with experts, `gate_up`, `down` and their biases have the rows of all experts, one
    expert after the other. If there are scales, these matrices are MXFP4, with two values per byte.
    Matrices are packed if `load_weights` keeps them so.
    """

    qkv: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]; latent: [q | q_a, kv_a]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim], or of all heads [num_heads * head_dim]
    k_norm: Tensor | None  # [head_dim], or of all heads [num_kv_heads * head_dim]
    output: Matrix  # [hidden, num_heads * head_dim]
    output_bias: Tensor | None
    gate_up: Matrix  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Matrix  # [hidden, intermediate]
    down_bias: Tensor | None
    input_norm: Tensor | None = None  # [hidden]: before attention
    output_norm: Tensor | None = None  # [hidden]: after attention
    post_norm: Tensor | None = None  # [hidden]: before the MLP
    down_norm: Tensor | None = None  # [hidden]: after the MLP
    sinks: Tensor | None = None  # [num_heads]
    q_a_norm: Tensor | None = None  # [query_rank] of latent attention
    q_b: Matrix | None = None  # [num_heads * query_dim, query_rank]
    kv_a_norm: Tensor | None = None  # [rank]
    kv_b: Tensor | None = None  # [num_heads * (nope_dim + value_dim), rank]
    router: Tensor | None = None  # [num_experts, hidden]
    router_bias: Tensor | None = None
    score_bias: Tensor | None = None  # float32 [num_experts]
    gate_up_scales: Tensor | None = None  # uint8 [rows of gate_up, hidden / 32]: powers of two
    down_scales: Tensor | None = None
    shared_gate_up: Matrix | None = None  # [2 * shared intermediate, hidden]
    shared_down: Matrix | None = None
    shared_gate: Tensor | None = None  # [1, hidden]


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
    outer = rank_outer_parts(config, share)
    layers = [rank_layer_parts(config, layer, share) for layer in range(config.num_layers)]
    kept = model.tensors if keeps_packed is not None else None
    format = DeviceFormat(dtype.itemsize, keeps_packed or "gpu", kept)
    total_nbytes = weights_nbytes(config, format, share)
    reader = _Reader(model.tensors, dtype, device, total_nbytes, progress, format)
    tables = reader.read(outer)
    tables.setdefault("lm_head", tables["embedding"])
    # The reader and its mapped files are freed after the last layer.
    read_layers = (_layer(reader.read(fields)) for fields in layers)
    return DecoderWeights(layers=read_layers, dtype=dtype, **tables)


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> DecoderWeights:
    """Draw random weights: matrices are normal with deviation 0.02, norms are one."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(parts: list[Part]) -> Tensor:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if parts[0].name.endswith(("norm.weight",)):
            own = torch.float32 if parts[0].is_exact else dtype
            return torch.ones(shape, dtype=own, device=device)
        if parts[0].is_raw:
            low, high = (118, 121) if parts[0].is_scales else (0, 256)
            return torch.randint(
                low, high, shape, dtype=torch.uint8, device=device, generator=generator
            )
        drawn = torch.empty(shape, dtype=torch.float32, device=device)
        drawn.normal_(0.0, 0.02, generator=generator)
        return drawn if parts[0].is_exact else drawn.to(dtype)

    tables = {field: draw(parts) for field, parts in outer_parts(config).items()}
    tables.setdefault("lm_head", tables["embedding"])
    layers = []
    for layer in range(config.num_layers):
        fields = {field: draw(parts) for field, parts in layer_parts(config, layer).items()}
        layers.append(_layer(fields))
    return DecoderWeights(layers=tuple(layers), dtype=dtype, **tables)


def _arranged(stored: Tensor, part: Part) -> Tensor:
    """Rearrange a tensor of a checkpoint as its part describes."""
    if part.is_transposed:
        stored = stored.transpose(-2, -1)
    if part.is_interleaved:
        stored = stored.view(stored.shape[0], -1, 2, *stored.shape[2:]).transpose(1, 2)
    return stored.reshape(part.shape)


def _is_finite(values: Tensor, part: Part) -> bool:
    if part.is_raw:
        return not part.is_scales or int(values.max()) < _NAN_SCALE
    # The extremes are NaN if any value is. This takes a tenth of the time of `isfinite`.
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(values))


def _layer(fields: Mapping[str, Matrix]) -> LayerWeights:
    optional = ("qkv_bias", "q_norm", "k_norm", "output_bias", "gate_up_bias", "down_bias")
    return LayerWeights(**{**dict.fromkeys(optional), **fields})


@contextmanager
def _naming(name: str, file: Path) -> Iterator[None]:
    """Convert the errors of reading a tensor to `ModelError`s that name it."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{name} in {file} is damaged: {error}; download it again") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{name} cannot be read from {file}: {error}") from error


class _Reader:
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
            stored = self._stored[part.name]
            if isinstance(stored, GgufStored):
                from disagg.models import gguf_values

                with _naming(part.name, stored.file):
                    matrices.append(gguf_values.packed_values(stored, packing, part.box))
                continue
            assert isinstance(stored, QuantizedStored)
            with _naming(part.name, stored.file):
                own = packed_values(stored, partial(self._moved_piece, stored), packing, part.box)
            if own is not None:
                matrices.append(own)
        made = stack(matrices) if len(matrices) == len(parts) else None
        if made is None:
            names = ", ".join(part.name for part in parts)
            log.warning("%s: converted to floats, because their columns differ in order.", names)
        return made

    def _floats(self, parts: list[Part]) -> Tensor:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        exact = torch.float32 if parts[0].is_exact else self._dtype
        dtype = torch.uint8 if parts[0].is_raw else exact
        fused = torch.empty(shape, dtype=dtype, device=self._device)
        row = 0
        for part in parts:
            rows = fused[row : row + part.shape[0]]
            rows.copy_(_arranged(self._one(part), part))
            if part.is_less_one:
                rows += 1.0
            if not _is_finite(rows, part):
                raise ModelError(
                    f"{part.name} in {self._stored[part.name].file} holds NaN or infinite values "
                    f"as {self._dtype}; the file is damaged, download it again"
                )
            row += part.shape[0]
        return fused

    def _one(self, part: Part) -> Tensor:
        name, stored = part.name, self._stored[part.name]
        with _naming(name, stored.file):
            if isinstance(stored, GgufStored):
                from disagg.models.gguf_values import read_values

                return read_values(stored, part.box)
            if isinstance(stored, QuantizedStored):
                return widened(stored, partial(self._piece, stored), self._dtype, part.box)
            return self._read(stored.name or name, stored.file, part.box)

    def _piece(self, stored: QuantizedStored, end: str, box: Sequence[Range] = ()) -> Tensor:
        piece = stored.pieces[end]
        is_whole = [*box] in ([], [(0, size) for size in piece.shape])
        name = piece.name or f"{stored.module}.{end}"
        return self._read(name, piece.file, () if is_whole else box)

    def _moved_piece(self, stored: QuantizedStored, end: str, box: Sequence[Range] = ()) -> Tensor:
        return self._piece(stored, end, box).to(self._device)

    def _read(self, name: str, file: Path, box: Sequence[Range] = ()) -> Tensor:
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        opened = self._opened[file]
        if box:  # read only these bytes
            whole = opened.get_slice(name)  # type: ignore[no-untyped-call]
            tensor: Tensor = whole[tuple(slice(*own) for own in box)]
        else:
            tensor = opened.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor
