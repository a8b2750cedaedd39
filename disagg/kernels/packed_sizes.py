"""Which quantised weights can be kept packed (`packed_matrix`), and how many bytes they then have.

Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["fp8", "int8", "int4"]
BITS: Mapping[Kind, int] = {"fp8": 8, "int8": 8, "int4": 4}
UNIT_BITS = 16
LEAST_GROUP = 16  # a matrix product in Triton sums over at least so many numbers
INT4_GROUP = 32  # group size of weights that are quantised when they are loaded
_PART = {8: 64, 4: 32}  # bits -> numbers of a part, unless a group has fewer


def kept_group(size: int) -> int:
    """The size of the groups into which a group of `size` numbers is split when it is kept.

    It is the largest power of two that divides `size`; these groups have the same scale.
    """
    return size & -size


def can_pack(group: int | None) -> bool:
    """Whether a matrix whose rows have groups of so many numbers can be kept packed.

    None: each row is one group.
    """
    return group is None or (group >= LEAST_GROUP and group == kept_group(group))


def part_size(kind: Kind, group: int | None) -> int:
    """The number of numbers in a part (see `packed_matrix`)."""
    usual = _PART[BITS[kind]]
    return usual if group is None else min(usual, group)


def packed_nbytes(
    kind: Kind, shape: tuple[int, int], group: int | None, scale_nbytes: int, *, has_zeros: bool
) -> int:
    """The size of a packed matrix [out, in] whose columns are in order."""
    num_out, num_in = shape
    chunk = part_size(kind, group) * UNIT_BITS // BITS[kind]
    num_groups = 1 if group is None else -(-num_in // group)
    row_nbytes = -(-num_in // chunk) * chunk * BITS[kind] // 8
    return num_out * (row_nbytes + num_groups * (scale_nbytes + has_zeros))


def quantized_nbytes(kind: Kind, shape: tuple[int, int], itemsize: int) -> int:
    """The size of a matrix that `packed_matrix.quantized` made. itemsize: bytes of its scales."""
    group = INT4_GROUP if kind == "int4" else None
    return packed_nbytes(kind, shape, group, itemsize, has_zeros=kind == "int4")
