"""Decides which matrices of a checkpoint stay packed on a device, and how many bytes they have.

Knows no torch. The headers decide it, so that memory is planned before anything is read. Groups
whose size is no power of two, or that ranks cut, are kept as smaller groups. A matrix is widened if
its groups would then be smaller than `LEAST_GROUP`, and if it has experts, or only a part of the
columns, in activation order. CPUs keep fewer formats of safetensors (`_on_cpu`), but they also keep
GGUF blocks and embedding tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.kernels.packed_sizes import (
    FP4_KINDS,
    Keeper,
    Kind,
    Packing,
    can_pack,
    kept_group,
    quantized_packing,
)
from disagg.models.checkpoint import StoredTensor
from disagg.models.gguf_model import GgufStored
from disagg.models.model_config import ModelConfig
from disagg.models.parts import Fields, Part, all_fields
from disagg.models.share import WHOLE, Share

# The packed fields of a layer; in a layer with experts the last two belong to the experts.
LAYER_FIELDS = ("qkv", "q_b", "output", "shared_gate_up", "shared_down", "gate_up", "down")
_OF_EXPERTS = LAYER_FIELDS[-2:]
_TABLES = ("lm_head", "embedding")
_EXACT_NBYTES = 4  # bytes of a value that is read as float32
_COLUMNS = 1
_CPU_UNIT = 8  # compiled code for CPUs reads so many 4-bit numbers together


def packing_of(
    tensors: Mapping[str, StoredTensor], parts: Sequence[Part], keeper: Keeper = "gpu"
) -> Packing | None:
    """How the matrix made of `parts` is kept; None if it is stored or kept as floats."""
    found: set[Packing] = set()
    for part in parts:
        packing = _packing(tensors.get(part.name), part, keeper)
        if packing is None:
            return None
        found.add(packing)
    alike = {Packing(*each[:3]) for each in found}
    has_zeros = any(each.has_zeros for each in found)
    has_least = any(each.has_least for each in found)
    if len(alike) > 1 or (has_zeros and has_least):
        return None
    has_order = any(each.has_order for each in found)
    return alike.pop()._replace(has_zeros=has_zeros, has_order=has_order, has_least=has_least)


@dataclass(frozen=True)
class DeviceFormat:
    """How a device holds a model's weights.

    Attributes:
        itemsize: bytes of the model's floats.
        keeper: the device.
        kept: tensors of a checkpoint, whose quantised matrices stay packed if the device can
            multiply them; None: all are widened.
        quantization: how matrices of floats are quantised when they are loaded. A GPU quantises
            layers only. A CPU also quantises tables, but not to int8 if they are only looked up.
    """

    itemsize: int
    keeper: Keeper = "gpu"
    kept: Mapping[str, StoredTensor] | None = None
    quantization: Kind | None = None

    def packings(self, fields: Fields) -> dict[str, Packing]:
        """The packed fields, of a layer or outside the layers, and how they are packed."""
        found = {field: self._packing(field, fields) for field in fields}
        return {field: packing for field, packing in found.items() if packing is not None}

    def nbytes(self, parts: Sequence[Part], packing: Packing | None) -> int:
        """Bytes of one field. packing: how it is packed; None: it has floats."""
        if packing is not None:
            shape = sum(part.shape[0] for part in parts), parts[0].shape[_COLUMNS]
            return packing.nbytes(shape, self.keeper)
        itemsizes = (_EXACT_NBYTES if part.is_exact else self.itemsize for part in parts)
        return sum(
            math.prod(part.shape) * size for part, size in zip(parts, itemsizes, strict=True)
        )

    def _packing(self, field: str, fields: Fields) -> Packing | None:
        is_on_cpu, is_in_layer = self.keeper == "cpu", field in LAYER_FIELDS
        if self.quantization is not None:
            is_only_looked_up = field == "embedding" and "lm_head" in fields
            is_table = field in _TABLES and not (is_only_looked_up and self.quantization == "int8")
            is_quantized = is_in_layer or (is_on_cpu and is_table)
            return quantized_packing(self.quantization, self.itemsize) if is_quantized else None
        is_multiplied = is_in_layer or field == "lm_head" or (is_on_cpu and field in _TABLES)
        if self.kept is None or not is_multiplied:
            return None
        packing = packing_of(self.kept, fields[field], self.keeper)
        # The experts of a layer are one matrix, but each would have its own column order; CPUs
        # support no order.
        if "router" in fields and field in _OF_EXPERTS:
            return None if is_on_cpu or (packing and packing.has_order) else packing
        # Scales become the model's floats on a CPU.
        return packing._replace(scale_nbytes=self.itemsize) if packing and is_on_cpu else packing


def weights_nbytes(config: ModelConfig, format: DeviceFormat, share: Share = WHOLE) -> int:
    """Bytes of a rank's weights on a device."""
    nbytes = 0
    for fields in all_fields(config, share):
        packings = format.packings(fields)
        nbytes += sum(format.nbytes(its, packings.get(field)) for field, its in fields.items())
    return nbytes


@dataclass(frozen=True)
class _Stated(StoredTensor):
    """A matrix of which no header is known, only how its bits are kept."""

    stated: Packing

    @property
    def packing(self) -> Packing:
        return self.stated


def stated_tensors(
    config: ModelConfig, fields: Fields, others: Packing | None = None
) -> dict[str, StoredTensor]:
    """The matrices of a layer that config.json says are quantised, for `DeviceFormat.kept`.

    Args:
        others: how the bits are kept of all matrices that are no MXFP4; None: as config.json says.
    """
    format, found = config.quantized, dict[str, StoredTensor]()
    for field in fields.keys() & LAYER_FIELDS:
        packing = others
        if format is not None and format.layout == "mxfp4":
            packing = format.packing if field in _OF_EXPERTS and "router" in fields else others
        elif format is not None and others is None:
            packing = format.packing
        if packing is not None:
            for part in fields[field]:
                shape = part.stored_shape
                found[part.name] = _Stated(Path(), "", shape, 0, 0, packing)
    return found


def _packing(stored: StoredTensor | None, part: Part, keeper: Keeper) -> Packing | None:
    """How one tensor, or a rank's box of it, is kept; None if it is widened."""
    packing = None if stored is None else stored.packing
    is_for_cpus = isinstance(stored, GgufStored)
    if stored is None or packing is None or (is_for_cpus and keeper == "gpu"):
        return None
    first, end = part.box[-1] if part.box else (0, stored.shape[-1])
    is_cut, size = end - first < stored.shape[-1], packing.group
    if is_cut and packing.has_order:
        return None
    # All ranks that share a matrix have the same number of its columns, so all decide the same.
    group = size and kept_group(math.gcd(size, end - first) if is_cut else size)
    if not can_pack(group) or (keeper == "cpu" and not _on_cpu(packing, part)):
        return None
    return packing._replace(group=group)


def _on_cpu(packing: Packing, part: Part) -> bool:
    """Whether CPUs can multiply it: no floats, column orders, or 8 bits with zeros."""
    if packing.kind in ("fp8", *FP4_KINDS) or packing.has_order:
        return False
    if packing.kind == "int8":
        return not packing.has_zeros
    return part.shape[_COLUMNS] % _CPU_UNIT == 0
