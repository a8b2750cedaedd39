"""Which matrices of a checkpoint stay in the bits that they were quantised to, on a device that
multiplies them so, and how many bytes they have there. Knows no torch.

The headers decide it, so that memory is planned before anything is read. Groups whose size is no
power of two, or that ranks cut, are kept as smaller ones. What is left is widened: groups that are
smaller than `LEAST_GROUP` then, and experts and parts of columns in the order of activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from disagg.kernels.packed_sizes import BITS, Kind, can_pack, kept_group, packed_nbytes
from disagg.models.checkpoint import DTYPE_NBYTES, StoredTensor
from disagg.models.parts import Fields, Part
from disagg.models.quantized_config import QuantizedFormat
from disagg.models.quantized_tensors import QuantizedStored

# Of a layer; with experts, the last two are theirs.
LAYER_FIELDS = ("qkv", "output", "shared_gate_up", "shared_down", "gate_up", "down")
_OF_EXPERTS = LAYER_FIELDS[-2:]
_EXPONENT_NBYTES = 4  # a scale that is stored as a power of two becomes a float32
_ORDER_NBYTES = 8  # of a column
_COLUMNS = 1


class Packing(NamedTuple):
    """How a matrix is kept.

    Attributes:
        group: neighbouring columns that share a scale; None: all.
    """

    kind: Kind
    group: int | None
    scale_nbytes: int
    has_zeros: bool
    has_order: bool


def packing_of(tensors: Mapping[str, StoredTensor], parts: Sequence[Part]) -> Packing | None:
    """How the matrix that parts make up is kept; None: it is stored or computed with as floats."""
    found: set[Packing] = set()
    for part in parts:
        packing = _packing(tensors.get(part.name), part)
        if packing is None:
            return None
        found.add(packing)
    alike = {each._replace(has_zeros=False, has_order=False) for each in found}
    if len(alike) > 1:
        return None
    return alike.pop()._replace(
        has_zeros=any(each.has_zeros for each in found),
        has_order=any(each.has_order for each in found),
    )


def packed_parts_nbytes(packing: Packing, parts: Sequence[Part]) -> int:
    """On a device."""
    num_in = parts[0].shape[_COLUMNS]
    shape = sum(part.shape[0] for part in parts), num_in
    kind, group, scale_nbytes, has_zeros, has_order = packing
    nbytes = packed_nbytes(kind, shape, group, scale_nbytes, has_zeros=has_zeros)
    return nbytes + num_in * _ORDER_NBYTES * has_order


def packed_fields(
    fields: Fields, has_experts: bool, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Packing]]:
    """The fields of a layer, or of what lies outside the layers, that are kept, and how."""
    for field in (*LAYER_FIELDS, "lm_head"):
        packing = packing_of(tensors, fields[field]) if field in fields else None
        if packing is None:
            continue
        # The experts of a layer are one matrix, but each would have an order of its own.
        if not (packing.has_order and has_experts and field in _OF_EXPERTS):
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


def _packing(stored: StoredTensor | None, part: Part) -> Packing | None:
    """Of one tensor, or the box of it that a rank has."""
    if not isinstance(stored, QuantizedStored):
        return None
    size, num_in = stored.group_size, stored.shape[_COLUMNS]
    has_order = stored.format.has_order and size is not None  # one group has the same in any order
    first, end = part.box[_COLUMNS] if part.box else (0, num_in)
    is_cut = (first, end) != (0, num_in)
    if is_cut and has_order:
        return None
    # All ranks have as many columns, so all decide alike.
    group = size and kept_group(math.gcd(size, end - first) if is_cut else size)
    if not can_pack(group):
        return None
    scales = stored.pieces[stored.scales_end]
    nbytes = _EXPONENT_NBYTES if scales.dtype == "F8_E8M0" else DTYPE_NBYTES[scales.dtype]
    has_zeros = any(end in stored.pieces for end in ("qzeros", "weight_zero_point"))
    return Packing(kind_of(stored.format), group, nbytes, has_zeros, has_order)
