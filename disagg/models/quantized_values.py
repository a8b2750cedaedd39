"""Reads quantised matrices into one normal form, which is widened to floats or packed for a device.

Sources of the layouts of safetensors: `compressors/pack_quantized` of compressed-tensors,
`WQLinear_GEMM` of AutoAWQ (whose numbers are in the order 0, 2, 4, 6, 1, 3, 5, 7),
`BaseQuantLinear` of GPTQModel (whose first version stores zero points minus one), MXFP4 of gpt-oss;
for NVFP4 see `quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from disagg.kernels.packed_matrix import PackedMatrix, pack_scales, pack_units, widen
from disagg.kernels.packed_sizes import FP4_KINDS, Kind, Packing
from disagg.models.checkpoint import Range
from disagg.models.quantized import LAYOUTS, WORD_BITS, QuantizedFormat, QuantizedStored, units

# Values that are widened together: few enough for the CPU's cache, and enough that threads seldom
# wait for each other, which takes much longer if other programs use the CPU.
_WIDENED_AT_ONCE = 1 << 20
_PACKED_AT_ONCE = 1 << 22  # values that are packed together, which takes additional memory
_NAN = 127  # NaN in e4m3, without its sign


class ReadPiece(Protocol):
    """Returns one piece of a matrix by its role."""

    def __call__(self, role: str, box: Sequence[Range] = (), /) -> Tensor:
        """Read a piece. box: the range of each of its dimensions; empty: everything."""
        ...


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Some rows and columns of a matrix: (numbers - zeros) * scales, or numbers * scales + least.

    All are multiplied by `global_scale`, if there is one.

    Attributes:
        shape: the numbers of rows and columns.
        numbers: returns the numbers of some of the rows, contiguous [rows, columns]: float8_e4m3fn,
            the bits of e2m1 ("mxfp4", "nvfp4"), or int8.
        scales: [rows, groups], [1, groups] or [1, 1].
        zeros: int8, with one of the same shapes; None: 0.
        least: floats of the shape of `scales`, instead of zeros; or None.
        size: number of columns of a group; None: each row is one group.
        first: the place of the first column in its group.
        named: int64 [columns], the group of each column if groups are not neighbours. If so, there
            are the groups of all columns of the matrix, otherwise only those of these columns.
        input_scale: as in `PackedMatrix`.
        global_scale: one float32, a second scale of all numbers.
    """

    kind: Kind
    shape: tuple[int, int]
    numbers: Callable[[slice], Tensor]
    scales: Tensor
    zeros: Tensor | None = None
    least: Tensor | None = None
    size: int | None = None
    first: int = 0
    named: Tensor | None = None
    input_scale: float | None = None
    global_scale: Tensor | None = None

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The matrix as floats, computed in float32; some rows at a time."""
        num_columns = self.shape[1]
        tables = self.scales, self.zeros, self.least
        num_groups = max(each.shape[1] for each in tables if each is not None)
        owners = None if self._is_even(num_groups) else self._groups()
        sizes = (num_groups, -1) if owners is None else (1, num_columns)
        out = torch.empty(self.shape, dtype=dtype, device=self.scales.device)

        def of_columns(table: Tensor, rows: slice) -> Tensor:
            own = (table[rows] if len(table) > 1 else table).float()
            if owners is None or own.shape[1] == 1:
                return own.unsqueeze(2)
            return own.index_select(1, owners).unsqueeze(1)

        for rows in self._in_turn(_WIDENED_AT_ONCE):
            numbers = self.numbers(rows).view(rows.stop - rows.start, *sizes)
            wide = widen(
                numbers,
                self.kind,
                of_columns(self.scales, rows),
                None if self.zeros is None else of_columns(self.zeros, rows),
                None if self.least is None else of_columns(self.least, rows),
            )
            if self.global_scale is not None:
                wide *= self.global_scale
            out[rows] = wide.flatten(1)
        return out

    def packed(self, packing: Packing) -> PackedMatrix | None:
        """The matrix in its own bits, on the device of its pieces.

        Args:
            packing: from `packing.packing_of`.

        Returns:
            The matrix; None if its values show that it must be widened. That is so if groups have
            different sizes, or if some columns are in an order that config.json does not announce.

        Raises:
            ValueError: the values of pieces hold NaN.
        """
        num_rows, num_columns = self.shape
        if self.zeros is not None and self.zeros.shape[1] != self.scales.shape[1]:
            return None
        groups, order = self._groups(), None
        if self.named is not None:
            order = torch.argsort(groups, stable=True)
            in_order = torch.arange(num_columns, device=order.device) // (self.size or num_columns)
            if not torch.equal(groups[order], in_order):
                return None
            groups = in_order
        units = []
        for rows in self._in_turn(_PACKED_AT_ONCE):
            numbers = self.numbers(rows)
            units.append(self._units(numbers if order is None else numbers[:, order], packing))
        # For each group that is kept, the stored group that contains it.
        owners = groups[:: packing.group or num_columns]

        def table(of_groups: Tensor | None) -> Tensor | None:
            if of_groups is None:
                return None
            is_split = len(owners) > of_groups.shape[1] > 1
            own = of_groups.index_select(1, owners) if is_split else of_groups
            return own.expand(num_rows, -1).T.contiguous()

        for each in (self.scales, self.least):
            if each is not None and not each.float().isfinite().all():
                raise ValueError("its scales hold NaN or infinite values")
        scales, of_all = table(self.scales), self.global_scale
        assert scales is not None
        if self.kind in FP4_KINDS:
            scales = pack_scales(scales)
        return PackedMatrix(
            packing.kind,
            num_columns,
            packing.group,
            torch.cat(units),
            scales,
            table(self.zeros),
            order,
            table(self.least),
            self.input_scale,
            None if of_all is None else of_all.repeat(num_rows),
        )

    def _in_turn(self, num_values: int) -> Iterator[slice]:
        """The rows, some at a time, with about so many values."""
        num_rows, num_columns = self.shape
        num_together = max(1, num_values // num_columns)
        for begin in range(0, num_rows, num_together):
            yield slice(begin, min(begin + num_together, num_rows))

    def _units(self, numbers: Tensor, packing: Packing) -> Tensor:
        if self.kind == "fp8" and numbers.view(torch.uint8).bitwise_and(_NAN).eq(_NAN).any():
            raise ValueError("it holds NaN")
        if self.kind == "int4" and self.least is not None:
            numbers = numbers - 8  # as in `PackedMatrix`
        return pack_units(numbers, packing.kind, packing.group)

    def _is_even(self, num_groups: int) -> bool:
        """Whether groups are neighbours, and all have equally many of these columns."""
        size = self.size or self.shape[1]
        is_whole = self.first == 0 and num_groups * size == self.shape[1]
        return num_groups == 1 or (self.named is None and is_whole)

    def _groups(self) -> Tensor:
        """The group of each column."""
        if self.named is not None:
            return self.named
        columns = torch.arange(self.first, self.first + self.shape[1], device=self.scales.device)
        return columns // (self.size or self.shape[1])


def quantized(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range] = ()) -> Quantized:
    """Read the numbers, zero points and scales of a matrix, or of a stack of them.

    Args:
        box: the range to read of each of its dimensions; empty: everything. Only the words, groups
            and blocks that it needs are read.

    Raises:
        ValueError: the values of pieces contradict each other.
    """
    format = stored.format
    if "shape" in stored.pieces and (stated := read("shape").tolist()) != [*stored.shape]:
        raise ValueError(
            f"{format.pieces['shape'].end} says {stated}, but {format.pieces['numbers'].end} has"
            f" {[*stored.shape]}"
        )
    box = box or [(0, size) for size in stored.shape]
    *outer, columns = box
    named, size = _named_groups(stored, read), format.num_columns
    if named is not None:  # a few columns may be of any group
        box, named = [*outer, (0, stored.shape[-1])], named[slice(*columns)]
    scales = _table(stored, "scales", read, box)
    assert scales is not None
    return Quantized(
        kind=format.kind,
        shape=(math.prod(end - first for first, end in outer), columns[1] - columns[0]),
        numbers=_numbers(stored, read, [*outer, columns]),
        scales=scales,
        zeros=_table(stored, "zeros", read, box),
        size=size,
        first=columns[0] % size if size else 0,
        named=named,
        input_scale=_input_scale(stored, read),
        global_scale=_global_scale(stored, read),
    )


def _global_scale(stored: QuantizedStored, read: ReadPiece) -> Tensor | None:
    """As in `Quantized`. Raises `ValueError`."""
    if "global" not in stored.pieces:
        return None
    own = read("global").reshape(())
    scale = own.reciprocal() if LAYOUTS[stored.format.layout].divides else own
    if not scale.isfinite():
        raise ValueError(f"its {stored.format.pieces['global'].end} is {float(own)}")
    return scale


def _input_scale(stored: QuantizedStored, read: ReadPiece) -> float | None:
    """As in `PackedMatrix`. Raises `ValueError`."""
    if stored.format.inputs != "static" or "inputs" not in stored.pieces:
        return 0.0 if stored.format.inputs else None
    scale = float(read("inputs"))
    if not 0.0 < scale < math.inf:
        raise ValueError(f"the scale of its activations is {scale}")
    return scale


def _numbers(
    stored: QuantizedStored, read: ReadPiece, box: Sequence[Range]
) -> Callable[[slice], Tensor]:
    """What returns the numbers of some of the rows of a box."""
    format, axes = stored.format, stored.format.pieces["numbers"].axes
    held = _oriented(stored, "numbers", read, box)
    if "R" in axes:
        return lambda some: _of_words_of_rows(format, held, box[-2], some)
    if axes == "rc":
        return lambda some: held[some]
    (axis,) = (axis for axis in axes if axis in "Cg")
    own, places = _within(box[-1], format.unit(axis) or 1), LAYOUTS[format.layout].places
    return lambda some: _unpacked(held[some], format.bits, places)[:, own].contiguous()


def _table(
    stored: QuantizedStored, role: str, read: ReadPiece, box: Sequence[Range]
) -> Tensor | None:
    """Scales or zero points of a box as [rows, groups]; one for the whole matrix is [1, 1].

    Scales that are powers of two become float32, except those of MXFP4.
    """
    if role not in stored.pieces:
        return None
    format, axes, rows = stored.format, stored.format.pieces[role].axes, box[-2]
    if "R" in axes:
        # GPTQ stores the word of zero points minus a word with a one in each number. If a number is
        # 0, the subtraction borrowed from the next number, and the addition gives it back.
        ones = format.zero_offset * sum(1 << shift for shift in range(0, WORD_BITS, format.bits))
        words = _oriented(stored, role, read, box) + ones
        return _of_words_of_rows(format, words, rows, slice(0, rows[1] - rows[0]))
    is_one = stored.pieces[role].num_values == 1
    own = read(role).reshape(1, 1) if is_one else _oriented(stored, role, read, box)
    if own.dtype == torch.uint8:
        own = own.view(torch.float8_e8m0fnu)
    elif own.dtype == torch.float8_e8m0fnu:
        own = own.float()
    own = own.reshape(len(own), -1)
    num_together = 1 if format.block is None else format.block[0]
    if is_one or num_together == 1:
        return own
    return own.repeat_interleave(num_together, 0)[_within(rows, num_together)]


def _oriented(stored: QuantizedStored, role: str, read: ReadPiece, box: Sequence[Range]) -> Tensor:
    """What a piece has for a box, as [rows, columns]; either may be words, groups or blocks."""
    piece = stored.format.pieces[role]
    ranges = stored.format.ranges(piece, box)
    own = read(role, ranges[: len(stored.pieces[role].shape)])
    if piece.axes[0] == "e":
        return own.flatten(2).flatten(0, 1)
    return own.T if piece.axes[0] in "cCg" else own


def _of_words_of_rows(format: QuantizedFormat, words: Tensor, rows: Range, some: slice) -> Tensor:
    """The numbers [rows, columns] of some of the rows.

    Args:
        words: [row words, columns], from the word on that has the first of `rows`.
    """
    in_a_word = WORD_BITS // format.bits
    begin, end = (rows[0] % in_a_word + place for place in (some.start, some.stop))
    of_words = words[slice(*units((begin, end), in_a_word))].T
    places = LAYOUTS[format.layout].places
    unpacked = _unpacked(of_words, format.bits, places)
    return unpacked[:, _within((begin, end), in_a_word)].T.contiguous()


def _within(own: Range, size: int) -> slice:
    """The range `own`, counted from the beginning of the first unit that contains it."""
    first = own[0] % size
    return slice(first, first + own[1] - own[0])


def _unpacked(words: Tensor, bits: int, places: tuple[int, ...]) -> Tensor:
    """The numbers of words or bytes [rows, words] as [rows, words * numbers in one].

    Numbers of words are stored without a sign; half of their range is subtracted, and they become
    int8. Those of bytes are the bits of e2m1.

    Args:
        places: the place of each number in a word; empty: from the lowest bits on.
    """
    if words.dtype == torch.uint8:
        return torch.stack((words & 15, words >> 4), 2).flatten(1)
    bits_before = [bits * place for place in places or range(WORD_BITS // bits)]
    shifts = torch.tensor(bits_before, dtype=torch.int32, device=words.device)
    numbers = words.contiguous().unsqueeze(2).bitwise_right_shift(shifts)
    numbers = numbers.bitwise_and_((1 << bits) - 1).flatten(1)
    narrow = numbers.to(torch.int8)
    return narrow.sub_(8) if bits == 4 else narrow.bitwise_xor_(-128)


def _named_groups(stored: QuantizedStored, read: ReadPiece) -> Tensor | None:
    """The group of each column; None if groups are neighbours. Raises `ValueError`."""
    if "order" not in stored.pieces:
        return None
    num_in, size, end = (
        stored.shape[1],
        stored.format.num_columns,
        stored.format.pieces["order"].end,
    )
    groups, most = read("order").long(), units((0, num_in), size)[1] - 1
    if end == "weight_g_idx" and -1 in groups:  # so compressed-tensors says "in order"
        return None
    if int(groups.min()) < 0 or int(groups.max()) > most:
        raise ValueError(f"{end} names groups that are not from 0 to {most}")
    # GPTQ always names the groups; looking them up takes half as long as all the rest.
    usual = torch.arange(num_in, device=groups.device) // (size or num_in)
    return None if torch.equal(groups, usual) else groups
