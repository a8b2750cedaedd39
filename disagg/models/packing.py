"""Which matrices of a checkpoint stay in the bits that they were quantised to, on a device that
multiplies them so, and how many bytes they have there. Knows no torch.

The headers decide it, so that memory is planned before anything is read. Groups whose size is no
power of two, or that ranks cut, are kept as smaller ones. All other matrices are widened: those
whose groups are then smaller than `LEAST_GROUP`, and experts and parts of columns in the order of
activations. CPUs keep fewer formats of safetensors (`_on_cpu`), but they also keep blocks of GGUF
and embedding tables.
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

Keeper: TypeAlias = Literal["gpu", "cpu"]  # whose products they are kept for

# Of a layer; with experts, the last two are theirs.
LAYER_FIELDS = ("qkv", "q_b", "output", "shared_gate_up", "shared_down", "gate_up", "down")
_OF_EXPERTS = LAYER_FIELDS[-2:]
_EXPONENT_NBYTES = 4  # a scale that is stored as a power of two becomes a float32
_ORDER_NBYTES = 8  # of a column
_COLUMNS = 1
_CPU_UNIT = 8  # numbers of 4 bits that compiled code for CPUs takes together


class Packing(NamedTuple):
    """How a matrix is kept.

    Attributes:
        group: neighbouring columns that share a scale; None: all.
        has_least: least values, in place of zeros.
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
    """How the matrix that parts make up is kept; None: it is stored or computed with as floats."""
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
    """On a device. itemsize: of a float as it is computed with."""
    num_in = parts[0].shape[_COLUMNS]
    shape = sum(part.shape[0] for part in parts), num_in
    if keeper == "cpu":
        return _on_cpu_nbytes(packing, shape, itemsize)
    kind, group, scale_nbytes, has_zeros, has_order, _ = packing
    nbytes = packed_nbytes(kind, shape, group, scale_nbytes, has_zeros=has_zeros)
    return nbytes + num_in * _ORDER_NBYTES * has_order


def _on_cpu_nbytes(packing: Packing, shape: tuple[int, int], itemsize: int) -> int:
    """Scales are of the model's floats there, and numbers of 4 bits have least values."""
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
    """The fields of a layer, or of what lies outside the layers, that are kept, and how."""
    for field in (*LAYER_FIELDS, "lm_head", *(("embedding",) if keeper == "cpu" else ())):
        packing = packing_of(tensors, fields[field], keeper) if field in fields else None
        if packing is None:
            continue
        # The experts of a layer are one matrix, but each would have an order of its own; CPUs
        # multiply with none.
        is_shut = packing.has_order or keeper == "cpu"
        if not (is_shut and has_experts and field in _OF_EXPERTS):
            yield field, packing


def value_nbytes(format: QuantizedFormat) -> float | None:
    """Of a value of a matrix that is kept, as far as config.json says it; None: it is widened.

    Scales are taken to have 2 bytes, and formats that may have zeros to have them.
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
    """Of one tensor, or the box of it that a rank has."""
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
    """Whether there is a product for it on a CPU: not of fp8, orders, or 8 bits with zeros."""
    if packing.kind == "fp8" or packing.has_order:
        return False
    if packing.kind == "int8":
        return not packing.has_zeros
    return part.shape[_COLUMNS] % _CPU_UNIT == 0


def _quantized_packing(stored: StoredTensor | None, part: Part) -> Packing | None:
    if not isinstance(stored, QuantizedStored):
        return None
    size, num_in = stored.group_size, stored.shape[_COLUMNS]
    has_order = stored.format.has_order and size is not None  # one group has the same in any order
    first, end = part.box[_COLUMNS] if part.box else (0, num_in)
    is_cut = (first, end) != (0, num_in)
    if is_cut and has_order:
        return None
    # All ranks that share a matrix have as many columns of it, so all decide alike.
    group = size and kept_group(math.gcd(size, end - first) if is_cut else size)
    if not can_pack(group):
        return None
    scales = stored.pieces[stored.scales_end]
    nbytes = _EXPONENT_NBYTES if scales.dtype == "F8_E8M0" else DTYPE_NBYTES[scales.dtype]
    has_zeros = any(end in stored.pieces for end in ("qzeros", "weight_zero_point"))
    return Packing(kind_of(stored.format), group, nbytes, has_zeros, has_order)
