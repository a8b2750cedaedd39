"""A weight in the few bits that it was quantised to: W = (numbers - zeros) * scales, or with least
values in place of zeros.

Numbers are e4m3, or integers of 8 or 4 bits. What a row has of them is cut into chunks, and a chunk
into as many parts as a unit of 16 bits holds numbers: unit j of a chunk has the j-th number of each
part, the first one in its lowest bits. So a product takes units apart with shifts, and multiplies
each part with neighbouring columns of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.packed_sizes import BITS, INT4_GROUP, UNIT_BITS, Kind, part_size

# In place of each number, the largest of all ranks.
Largest: TypeAlias = Callable[[Tensor], Tensor]

_LARGEST: dict[Kind, float] = {"fp8": 448.0, "int8": 127.0, "int4": 15.0}
_ROWS_AT_ONCE = 4096  # that are packed or quantised together, which takes memory of their own


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """
    Attributes:
        units: int16 [num_out, num_chunks * part], filled up with zeros.
        scales: floats [num_groups, num_out].
        zeros: int8 [num_groups, num_out]; None: 0.
        order: int64 [num_in]: column i of the numbers is column order[i] of W; None: the same.
        least: floats [num_groups, num_out], of int4 without zeros: W = (numbers + 8) * scales +
            least. Only CPUs multiply with it.
        group: neighbouring numbers that share a scale, as `can_pack` allows; None: all of a row.
    """

    kind: Kind
    num_in: int
    group: int | None
    units: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    least: Tensor | None = None

    @property
    def num_out(self) -> int:
        return self.units.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_out, self.num_in

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def nbytes(self) -> int:
        pieces = (self.units, self.scales, self.zeros, self.order, self.least)
        return sum(piece.nbytes for piece in pieces if piece is not None)

    def rows(self, first: int, end: int) -> PackedMatrix:
        """Some of its rows, in the same memory."""
        zeros = None if self.zeros is None else self.zeros[:, first:end]
        least = None if self.least is None else self.least[:, first:end]
        units, scales = self.units[first:end], self.scales[:, first:end]
        return replace(self, units=units, scales=scales, zeros=zeros, least=least)

    def least_values(self) -> Tensor:
        """What the least number stands for, of int4: float32 [num_groups, num_out]."""
        if self.least is not None:
            return self.least.float()
        zeros = 0.0 if self.zeros is None else self.zeros.float()
        return (-8.0 - zeros) * self.scales.float()

    def numbers(self) -> Tensor:
        """[num_out, num_in]: float8_e4m3fn, or int8."""
        bits, part = BITS[self.kind], part_size(self.kind, self.group)
        units = self.units.view(self.num_out, -1, 1, part)
        shifts = torch.arange(0, UNIT_BITS, bits, dtype=torch.int16, device=self.device)
        numbers = (units >> shifts.view(1, 1, -1, 1)).flatten(1)[:, : self.num_in]
        if bits == 4:
            return (numbers & 15).to(torch.int8) - 8
        numbers = ((numbers & 255) ^ 128).sub_(128).to(torch.int8)
        return numbers.view(torch.float8_e4m3fn) if self.kind == "fp8" else numbers

    def widened(self, dtype: torch.dtype) -> Tensor:
        """W, [num_out, num_in] of `dtype`: computed in float32 and rounded once."""
        size, num_groups = self.group or self.num_in, self.scales.shape[0]
        values = functional.pad(self.numbers().float(), (0, num_groups * size - self.num_in))
        groups = values.view(self.num_out, num_groups, size)
        if self.zeros is not None:
            groups.sub_(self.zeros.float().T.unsqueeze(2))
        if self.least is not None:
            groups.add_(8.0)
        groups.mul_(self.scales.float().T.unsqueeze(2))
        if self.least is not None:
            groups.add_(self.least.float().T.unsqueeze(2))
        wide = values[:, : self.num_in].to(dtype)
        return (
            wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)
        )


def pack_units(numbers: Tensor, kind: Kind, group: int | None) -> Tensor:
    """The units of numbers, float8_e4m3fn or int8 [num_out, num_in]: int16 [num_out, units]."""
    bits, part = BITS[kind], part_size(kind, group)
    num_parts = UNIT_BITS // bits
    num_out, num_in = numbers.shape
    chunk = part * num_parts
    num_chunks = -(-num_in // chunk)
    units = torch.zeros(num_out, num_chunks, part, dtype=torch.int16, device=numbers.device)
    whole = numbers.view(torch.int8)
    for some, its_units in zip(
        torch.split(whole, _ROWS_AT_ONCE), torch.split(units, _ROWS_AT_ONCE), strict=True
    ):
        filled = functional.pad(some, (0, num_chunks * chunk - num_in))
        parts = filled.view(-1, num_chunks, num_parts, part).unbind(2)
        for place, its in enumerate(parts):
            own = its.to(torch.int16).add_(8 if bits == 4 else 0).bitwise_and_((1 << bits) - 1)
            its_units |= own << (place * bits)
    return units.flatten(1)


def stack(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """The rows of all of them, one after the other; None: they share too little for that."""
    first, *others = matrices
    if not others:
        return first
    for each in others:
        if (each.kind, each.shape[1], each.group) != (first.kind, first.shape[1], first.group):
            return None
        if each.scales.dtype != first.scales.dtype or not _is_same(each.order, first.order):
            return None
    least = None
    if any(each.least is not None for each in matrices):
        if any(each.zeros is not None for each in matrices):
            return None
        least = torch.cat([_least_of(each) for each in matrices], 1)
    zeros = None
    if any(each.zeros is not None for each in matrices):
        zeros = torch.cat([_zeros_of(each) for each in matrices], 1)
    return PackedMatrix(
        first.kind,
        first.num_in,
        first.group,
        torch.cat([each.units for each in matrices]),
        torch.cat([each.scales for each in matrices], 1),
        zeros,
        first.order,
        least,
    )


def _is_same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def _zeros_of(matrix: PackedMatrix) -> Tensor:
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.zeros_like(matrix.scales, dtype=torch.int8)


def _least_of(matrix: PackedMatrix) -> Tensor:
    return matrix.least_values().to(matrix.scales.dtype) if matrix.least is None else matrix.least


def quantized(weight: Tensor, kind: Kind, largest: Largest | None = None) -> PackedMatrix:
    """Quantise floats [num_out, num_in]; scales are of their type.

    fp8 and int8 have a scale for each row, whose largest number becomes the format's. int4 has a
    scale and a zero for every `INT4_GROUP` numbers, which reach from the least (or 0) to the
    largest (or 0).

    Args:
        largest: replaces the largest magnitudes of rows by those of the whole rows, of which
            `weight` has some columns; not for int4, whose groups must not be cut.
    """
    group = INT4_GROUP if kind == "int4" else None
    split = torch.split(weight, _ROWS_AT_ONCE)
    parts = [_rows_quantized(some, kind, group, largest) for some in split]
    matrix = stack(parts)
    assert matrix is not None
    return matrix


def _rows_quantized(
    rows: Tensor, kind: Kind, group: int | None, largest: Largest | None
) -> PackedMatrix:
    num_out, num_in = rows.shape
    most = _LARGEST[kind]
    size = group or num_in
    groups = functional.pad(rows.float(), (0, -num_in % size)).view(num_out, -1, size)
    zeros = None
    if kind == "int4":
        least = groups.amin(2).clamp_(max=0.0)
        scales = _scales((groups.amax(2).clamp_(min=0.0) - least) / most, rows.dtype)
        zeros = (-least / scales.float()).round_().clamp_(0, most)
        numbers = groups / scales.float().unsqueeze(2) + zeros.unsqueeze(2)
        numbers, zeros = numbers.round_().clamp_(0, most) - 8.0, (zeros - 8.0).to(torch.int8)
    else:
        peaks = groups.abs().amax(2)
        scales = _scales((peaks if largest is None else largest(peaks)) / most, rows.dtype)
        numbers = (groups / scales.float().unsqueeze(2)).clamp_(-most, most)
        numbers = numbers if kind == "fp8" else numbers.round_()
    stored = numbers.flatten(1)[:, :num_in]
    stored = stored.to(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    return PackedMatrix(
        kind,
        num_in,
        group,
        pack_units(stored.contiguous(), kind, group),
        scales.T.contiguous(),
        None if zeros is None else zeros.T.contiguous(),
    )


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """As they are kept; 1 for a group of zeros."""
    kept = wanted.to(dtype)
    return kept.masked_fill_(kept == 0, 1.0)
