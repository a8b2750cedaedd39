"""A packed weight of 4 or 8 bits: W = (numbers - zeros) * scales, or with least values for zeros.

Numbers are e4m3, integers of 8 or 4 bits, or e2m1 (MXFP4, NVFP4). The numbers of a row are cut into
chunks, and a chunk into as many parts as a unit of 16 bits holds numbers. Unit j of a chunk has the
j-th number of each part, the first one in its lowest bits. So a product splits units with shifts,
and multiplies each part with neighbouring columns of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.packed_sizes import BITS, FP4_KINDS, INT4_GROUP, UNIT_BITS, Kind, part_size

# Replaces each number by the largest one of all ranks.
Largest: TypeAlias = Callable[[Tensor], Tensor]

LARGEST: dict[Kind, float] = {"fp8": 448.0, "int8": 127.0, "int4": 15.0}
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by the bits of the number, without a sign
_E2M1 += [-each for each in _E2M1]
_ROWS_AT_ONCE = 4096  # rows that are packed or quantised together, which takes additional memory


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed weight.

    Attributes:
        units: int16 [num_out, num_chunks * part], padded with zeros.
        scales: floats [num_groups, num_out]; FP4: as `pack_scales` makes them.
        zeros: int8 [num_groups, num_out]; None: all are 0.
        order: int64 [num_in]: column i of the numbers is column order[i] of W; None: the same.
        least: floats [num_groups, num_out], for int4 without zeros: W = (numbers + 8) * scales +
            least. Only CPUs multiply such weights.
        group: number of neighbouring numbers that share a scale, for which `can_pack` is true;
            None: all of a row.
        input_scale: the scale with which activations may be quantised; 0: each row of them has its
            own; None: they may not, and products are in 16 bits.
        row_scales: float32 [num_out], a second scale of all numbers of a row: in NVFP4 that of the
            tensor from which the row comes; None: there are none.
    """

    kind: Kind
    num_in: int
    group: int | None
    units: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    least: Tensor | None = None
    input_scale: float | None = None
    row_scales: Tensor | None = None

    @property
    def num_out(self) -> int:
        return self.units.shape[0]

    @property
    def num_groups(self) -> int:
        return 1 if self.group is None else -(-self.num_in // self.group)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_out, self.num_in

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def nbytes(self) -> int:
        pieces = (self.units, self.scales, self.zeros, self.order, self.least, self.row_scales)
        return sum(piece.nbytes for piece in pieces if piece is not None)

    def rows(self, first: int, end: int) -> PackedMatrix:
        """The rows [first, end), in the same memory."""
        zeros = None if self.zeros is None else self.zeros[:, first:end]
        least = None if self.least is None else self.least[:, first:end]
        units, scales = self.units[first:end], self.scales[:, first:end]
        of_rows = None if self.row_scales is None else self.row_scales[first:end]
        pieces: dict[str, Any] = {"zeros": zeros, "least": least, "row_scales": of_rows}
        return replace(self, units=units, scales=scales, **pieces)

    def least_values(self) -> Tensor:
        """The values of int4's least number: float32 [num_groups, num_out]."""
        if self.least is not None:
            return self.least.float()
        zeros = 0.0 if self.zeros is None else self.zeros.float()
        return (-8.0 - zeros) * self.scales.float()

    def _scales(self) -> Tensor:
        """The scales as floats [num_groups, num_out]."""
        if self.kind not in FP4_KINDS:
            return self.scales
        words = self.scales.view(torch.uint8).reshape(-1, self.num_out, 4)
        each = words.transpose(1, 2).flatten(0, 1)
        dtype = torch.float8_e8m0fnu if self.kind == "mxfp4" else torch.float8_e4m3fn
        return each[: self.num_groups].view(dtype).float()

    def numbers(self) -> Tensor:
        """The unpacked numbers [num_out, num_in]: float8_e4m3fn or int8, also for bits of e2m1."""
        bits, part = BITS[self.kind], part_size(self.kind, self.group)
        units = self.units.view(self.num_out, -1, 1, part)
        shifts = torch.arange(0, UNIT_BITS, bits, dtype=torch.int16, device=self.device)
        numbers = (units >> shifts.view(1, 1, -1, 1)).flatten(1)[:, : self.num_in]
        if bits == 4:
            return (numbers & 15).to(torch.int8) - (8 if self.kind == "int4" else 0)
        numbers = ((numbers & 255) ^ 128).sub_(128).to(torch.int8)
        return numbers.view(torch.float8_e4m3fn) if self.kind == "fp8" else numbers

    def widened(self, dtype: torch.dtype) -> Tensor:
        """W as [num_out, num_in] of `dtype`, computed in float32 and rounded once."""
        size, num_groups = self.group or self.num_in, self.num_groups
        padded = (0, num_groups * size - self.num_in)
        numbers = functional.pad(self.numbers().view(torch.int8), padded)
        numbers = numbers.view(torch.float8_e4m3fn) if self.kind == "fp8" else numbers
        if self.least is not None:
            numbers = numbers + 8
        groups = widen(
            numbers.view(self.num_out, num_groups, size),
            self.kind,
            self._scales().T.unsqueeze(2),
            None if self.zeros is None else self.zeros.T.unsqueeze(2),
            None if self.least is None else self.least.T.unsqueeze(2),
        )
        if self.row_scales is not None:
            groups *= self.row_scales[:, None, None]
        wide = groups.flatten(1)[:, : self.num_in].to(dtype)
        return (
            wide if self.order is None else torch.empty_like(wide).index_copy_(1, self.order, wide)
        )


def widen(
    numbers: Tensor,
    kind: Kind,
    scales: Tensor,
    zeros: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    """Return (numbers - zeros) * scales + least in float32; all have as many dimensions."""
    if kind in FP4_KINDS:
        wide = torch.tensor(_E2M1, device=numbers.device)[numbers.int()]
    else:
        wide = numbers.float()
    if zeros is not None:
        wide = wide.sub_(zeros.float())
    wide = wide.mul_(scales.float())
    return wide if least is None else wide.add_(least.float())


def pack_scales(scales: Tensor) -> Tensor:
    """Pack e8m0 or e4m3 [num_groups, num_out] into int32 [num_groups / 4, num_out]: neighbouring
    groups of a row in a word, the first one in its lowest bits. An sm_80 knows neither type."""
    padded = functional.pad(scales.view(torch.uint8), (0, 0, 0, -len(scales) % 4))
    by_word = padded.view(-1, 4, scales.shape[1]).transpose(1, 2).contiguous()
    return by_word.view(torch.int32).squeeze(2)


def pack_units(numbers: Tensor, kind: Kind, group: int | None) -> Tensor:
    """Pack numbers, as `PackedMatrix.numbers` returns them, into `PackedMatrix.units`."""
    bits, part = BITS[kind], part_size(kind, group)
    num_parts = UNIT_BITS // bits
    num_out, num_in = numbers.shape
    chunk = part * num_parts
    num_chunks = -(-num_in // chunk)
    units = torch.zeros(num_out, num_chunks, part, dtype=torch.int16, device=numbers.device)
    whole = numbers.view(torch.int8)
    for rows, units_of_rows in zip(
        torch.split(whole, _ROWS_AT_ONCE), torch.split(units, _ROWS_AT_ONCE), strict=True
    ):
        filled = functional.pad(rows, (0, num_chunks * chunk - num_in))
        parts = filled.view(-1, num_chunks, num_parts, part).unbind(2)
        for place, signed in enumerate(parts):
            field = (
                signed.to(torch.int16)
                .add_(8 if kind == "int4" else 0)
                .bitwise_and_((1 << bits) - 1)
            )
            units_of_rows |= field << (place * bits)
    return units.flatten(1)


def stack(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Join the rows of several matrices; None if their formats differ too much."""
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
    scales: list[Any] = [each.input_scale for each in matrices]
    of_rows = [each.row_scales for each in matrices if each.row_scales is not None]
    return PackedMatrix(
        first.kind,
        first.num_in,
        first.group,
        torch.cat([each.units for each in matrices]),
        torch.cat([each.scales for each in matrices], 1),
        zeros,
        first.order,
        least,
        None if None in scales else 0.0 if 0.0 in scales else max(scales),
        torch.cat(of_rows) if of_rows else None,
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
    """Quantise floats [num_out, num_in]. The scales have their dtype.

    fp8 and int8 have one scale per row, which maps the row's largest magnitude to the format's
    largest number; products with fp8 may quantise activations. int4 has a scale and a zero for
    every `INT4_GROUP` numbers; its range is from the least (or 0) to the largest (or 0) of these.

    Args:
        largest: given if `weight` has only some columns of the rows. It replaces the largest
            magnitudes of these columns by those of the whole rows. Not used for int4, whose groups
            must not be cut.
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
    most = LARGEST[kind]
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
        input_scale=0.0 if kind == "fp8" else None,
    )


def _scales(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to `dtype`; the scale of a group of zeros becomes 1."""
    kept = exact.to(dtype)
    return kept.masked_fill_(kept == 0, 1.0)
