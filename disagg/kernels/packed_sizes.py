"""Which quantised weights can be kept packed (`packed_matrix`), and how many bytes they then have.

Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

OnlineKind: TypeAlias = Literal["fp8", "int8", "int4"]  # floats can be quantised to these
Kind: TypeAlias = OnlineKind | Literal["mxfp4", "nvfp4"]
Keeper: TypeAlias = Literal["gpu", "cpu"]  # the device that multiplies packed matrices
BITS: Mapping[Kind, int] = {"fp8": 8, "int8": 8, "int4": 4, "mxfp4": 4, "nvfp4": 4}
UNIT_BITS = 16
LEAST_GROUP = 16  # a matrix product in Triton sums over at least so many numbers
# e2m1 numbers that share a scale: a power of two (e8m0), or an e4m3 beside a float32 of the tensor.
MXFP4_GROUP, NVFP4_GROUP = 32, 16
FP4_KINDS = frozenset[Kind](("mxfp4", "nvfp4"))
EIGHT_BIT_CHUNK = 128  # columns of 8 bits whose units are neighbours: two parts
# From so many rows of activations on, products in 8 bits are faster than in 16, by calculation
# (docs/notebook/gpu.md). `bench.gpu_packed` has the row that measures it.
EIGHT_BIT_ROWS = 192
INT4_GROUP = 32  # group size of weights that are quantised when they are loaded
_PART = {8: 64, 4: 32}  # bits -> numbers of a part, unless a group has fewer
_ORDER_NBYTES = 8  # per column
_ROW_SCALE_NBYTES = 4  # float32


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
    usual = NVFP4_GROUP if kind in FP4_KINDS else _PART[BITS[kind]]
    return usual if group is None else min(usual, group)


class Packing(NamedTuple):
    """How a matrix is kept packed.

    Attributes:
        group: number of neighbouring columns that share a scale; None: all.
        scale_nbytes: bytes of a scale.
        has_least: whether it has least values instead of zeros.
    """

    kind: Kind
    group: int | None
    scale_nbytes: int
    has_zeros: bool = False
    has_order: bool = False
    has_least: bool = False

    def nbytes(self, shape: tuple[int, int], keeper: Keeper) -> int:
        """The size of a matrix [out, in]: of a `PackedMatrix`, or on CPUs of a `NarrowLinear`."""
        num_out, num_in = shape
        bits = BITS[self.kind]
        num_groups = 1 if self.group is None else -(-num_in // self.group)
        if self.kind in FP4_KINDS:  # they are kept in words of four
            num_groups += -num_groups % 4
        group_nbytes = self.scale_nbytes + self.has_zeros
        row_nbytes = -(-num_in * bits // 8)
        if keeper == "cpu":  # all 4-bit numbers have least values there
            group_nbytes = self.scale_nbytes * (2 if bits == 4 else 1)
        else:
            chunk = part_size(self.kind, self.group) * UNIT_BITS // bits
            row_nbytes = -(-num_in // chunk) * chunk * bits // 8
            row_nbytes += _ROW_SCALE_NBYTES * (self.kind == "nvfp4")
        order_nbytes = num_in * _ORDER_NBYTES * self.has_order
        return num_out * (row_nbytes + num_groups * group_nbytes) + order_nbytes


def quantized_packing(kind: Kind, itemsize: int) -> Packing:
    """The packing of floats of `itemsize` bytes that are quantised when they are loaded."""
    return Packing(kind, INT4_GROUP if kind == "int4" else None, itemsize, kind == "int4")
