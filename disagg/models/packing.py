"""Decides which matrices of a checkpoint stay packed on a device, and how many bytes they have.

Knows no torch. The headers decide it, so that memory is planned before anything is read. Groups
whose size is no power of two, or that ranks cut, are kept as smaller groups. A matrix is widened if
its groups would then be smaller than `LEAST_GROUP`, and if it has experts, or only a part of the
columns, in activation order. CPUs keep fewer formats of safetensors (`_on_cpu`), but they also keep
GGUF blocks and embedding tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from disagg.kernels.packed_sizes import BITS, Kind, can_pack, kept_group, packed_nbytes
from disagg.models.checkpoint import DTYPE_NBYTES, StoredTensor
from disagg.models.gguf_model import GgufStored
from disagg.models.parts import Fields, Part
from disagg.models.quantized_config import QuantizedFormat
from disagg.models.quantized_tensors import QuantizedStored

Keeper: TypeAlias = Literal["gpu", "cpu"]  # the device that multiplies the packed matrices

# The packed fields of a layer; in a layer with experts the last two belong to the experts.
LAYER_FIELDS = ("qkv", "q_b", "output", "shared_gate_up", "shared_down", "gate_up", "down")
_OF_EXPERTS = LAYER_FIELDS[-2:]
_EXPONENT_NBYTES = 4  # a scale that is stored as a power of two becomes a float32
_ORDER_NBYTES = 8  # per column
_COLUMNS = 1
_CPU_UNIT = 8  # compiled code for CPUs reads so many 4-bit numbers together


class Packing(NamedTuple):
    """How a matrix is kept packed.

    Attributes:
        group: number of neighbouring columns that share a scale; None: all.
        has_least: whether it has least values instead of zeros.
    """

    kind: Kind
    group: int | None
    scale_nbytes: int
    has_zeros: bool = False
    has_order: bool = False
    has_least: bool = False


_OF_BLOCKS: Mapping[str, Packing] = {
    "Q4_0": Packing("int4", 32, 2),
    "Q4_1": Packing("int4", 32, 2, has_least=True),
    "Q8_0": Packing("int8", 32, 2),
    "Q4_K": Packing("int4", 32, 4, has_least=True),
    "Q6_K": Packing("int8", 16, 4),
}


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


def packed_parts_nbytes(
    packing: Packing, parts: Sequence[Part], itemsize: int, keeper: Keeper = "gpu"
) -> int:
    """Bytes of a packed matrix on a device. itemsize: bytes of the model's floats."""
    num_in = parts[0].shape[_COLUMNS]
    shape = sum(part.shape[0] for part in parts), num_in
    if keeper == "cpu":
        return _on_cpu_nbytes(packing, shape, itemsize)
    kind, group, scale_nbytes, has_zeros, has_order, _ = packing
    nbytes = packed_nbytes(kind, shape, group, scale_nbytes, has_zeros=has_zeros)
    return nbytes + num_in * _ORDER_NBYTES * has_order


def _on_cpu_nbytes(packing: Packing, shape: tuple[int, int], itemsize: int) -> int:
    """Bytes on a CPU, where scales are the model's floats, and 4-bit numbers have least values."""
    num_out, num_in = shape
    num_groups = 1 if packing.group is None else -(-num_in // packing.group)
    if packing.kind == "int4":
        return num_out * (-(-num_in // 2) + 2 * num_groups * itemsize)
    return num_out * (num_in + num_groups * itemsize)


def packed_fields(
    fields: Fields,
    has_experts: bool,
    tensors: Mapping[str, StoredTensor],
    keeper: Keeper = "gpu",
) -> Iterator[tuple[str, Packing]]:
    """The fields, of a layer or outside the layers, that stay packed, and how."""
    for field in (*LAYER_FIELDS, "lm_head", *(("embedding",) if keeper == "cpu" else ())):
        packing = packing_of(tensors, fields[field], keeper) if field in fields else None
        if packing is None:
            continue
        # The experts of a layer are one matrix, but each would have its own column order; CPUs
        # support no order.
        is_shut = packing.has_order or keeper == "cpu"
        if not (is_shut and has_experts and field in _OF_EXPERTS):
            yield field, packing


def value_nbytes(format: QuantizedFormat) -> float | None:
    """Bytes per value of a matrix that stays packed, as far as config.json tells; None: widened.

    Assumes that scales have 2 bytes, and that formats that may have zeros have them.
    """
    size = format.group_size if format.block is None else format.block[_COLUMNS]
    group = size and kept_group(size)
    if not can_pack(group):
        return None
    has_zeros = format.layout in ("awq", "gptq")
    return BITS[kind_of(format)] / 8 + (0 if group is None else (2 + has_zeros) / group)


def kind_of(format: QuantizedFormat) -> Kind:
    if format.dtype == "F8_E4M3":
        return "fp8"
    return "int4" if format.bits == 4 else "int8"


def _packing(stored: StoredTensor | None, part: Part, keeper: Keeper) -> Packing | None:
    """How one tensor, or a rank's box of it, is kept; None if it is widened."""
    if keeper == "gpu":
        return _quantized_packing(stored, part)
    packing = _quantized_packing(stored, part)
    if isinstance(stored, GgufStored):
        packing = _OF_BLOCKS.get(stored.dtype)
        if packing is not None and packing.group is not None and part.box:
            group = kept_group(math.gcd(packing.group, part.shape[_COLUMNS]))
            packing = packing._replace(group=group) if can_pack(group) else None
    return packing if packing is not None and _on_cpu(packing, part) else None


def _on_cpu(packing: Packing, part: Part) -> bool:
    """Whether CPUs can multiply it: not fp8, column orders, or 8 bits with zeros."""
    if packing.kind == "fp8" or packing.has_order:
        return False
    if packing.kind == "int8":
        return not packing.has_zeros
    return part.shape[_COLUMNS] % _CPU_UNIT == 0


def _quantized_packing(stored: StoredTensor | None, part: Part) -> Packing | None:
    if not isinstance(stored, QuantizedStored):
        return None
    size, num_in = stored.group_size, stored.shape[_COLUMNS]
    has_order = stored.format.has_order and size is not None  # one group has no order
    first, end = part.box[_COLUMNS] if part.box else (0, num_in)
    is_cut = (first, end) != (0, num_in)
    if is_cut and has_order:
        return None
    # All ranks that share a matrix have the same number of its columns, so all decide the same.
    group = size and kept_group(math.gcd(size, end - first) if is_cut else size)
    if not can_pack(group):
        return None
    scales = stored.pieces[stored.scales_end]
    nbytes = _EXPONENT_NBYTES if scales.dtype == "F8_E8M0" else DTYPE_NBYTES[scales.dtype]
    has_zeros = any(end in stored.pieces for end in ("qzeros", "weight_zero_point"))
    return Packing(kind_of(stored.format), group, nbytes, has_zeros, has_order)
