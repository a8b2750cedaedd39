"""Which weights can be kept in the bits that they were quantised to, and how many bytes they then
have (`packed_matrix`). Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["fp8", "int8", "int4"]
BITS: Mapping[Kind, int] = {"fp8": 8, "int8": 8, "int4": 4}
UNIT_BITS = 16
LEAST_GROUP = 16  # a matrix product goes over so many numbers or more
INT4_GROUP = 32  # of weights that are quantised when they are loaded: decision 120
_PART = {8: 64, 4: 32}  # numbers of a part, unless a group has fewer


def kept_group(size: int) -> int:
    """The groups as which groups of `size` numbers are kept: parts of them with the same scale, the
    largest whose size is a power of two.
    """
    return size & -size


def can_pack(group: int | None) -> bool:
    """Whether a matrix can be kept whose rows have groups of so many numbers; None: one each."""
    return group is None or (group >= LEAST_GROUP and group == kept_group(group))


def part_size(kind: Kind, group: int | None) -> int:
    """Numbers of a part."""
    usual = _PART[BITS[kind]]
    return usual if group is None else min(usual, group)


def packed_nbytes(
    kind: Kind, shape: tuple[int, int], group: int | None, scale_nbytes: int, *, has_zeros: bool
) -> int:
    """Of a matrix [out, in] whose columns are in order."""
    num_out, num_in = shape
    chunk = part_size(kind, group) * UNIT_BITS // BITS[kind]
    num_groups = 1 if group is None else -(-num_in // group)
    row_nbytes = -(-num_in // chunk) * chunk * BITS[kind] // 8
    return num_out * (row_nbytes + num_groups * (scale_nbytes + has_zeros))


def quantized_nbytes(kind: Kind, shape: tuple[int, int], itemsize: int) -> int:
    """Of a matrix that `packed_matrix.quantized` made. itemsize: of the floats before."""
    group = INT4_GROUP if kind == "int4" else None
    return packed_nbytes(kind, shape, group, itemsize, has_zeros=kind == "int4")
