"""Reads quantised matrices into one normal form, which is widened to floats or packed for a device.

Sources of the layouts of safetensors: `compressors/pack_quantized` of compressed-tensors,
`WQLinear_GEMM` of AutoAWQ (whose numbers are in the order 0, 2, 4, 6, 1, 3, 5, 7),
`BaseQuantLinear` of GPTQModel (whose first version stores zero points minus one), MXFP4 of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from disagg.kernels.packed_matrix import PackedMatrix, pack_units, widen
from disagg.kernels.packed_sizes import Kind, Packing
from disagg.models.parts import Range
from disagg.models.quantized import WORD_BITS, Layout, QuantizedStored

# Values that are widened together: few enough for the CPU's cache, and enough that threads seldom
# wait for each other, which takes much longer if other programs use the CPU.
_WIDENED_AT_ONCE = 1 << 20
_PACKED_AT_ONCE = 1 << 22  # values that are packed together, which takes additional memory
_NAN = 127  # NaN in e4m3, without its sign
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of the first number, of the second, ...


class ReadPiece(Protocol):
    """Returns one piece by the end of its name."""

    def __call__(self, end: str, box: Sequence[Range] = (), /) -> Tensor:
        """Read a piece. box: the range of each of its dimensions; empty: everything."""
        ...


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Some rows and columns of a matrix: (numbers - zeros) * scales, or numbers * scales + least.

    Attributes:
        shape: the numbers of rows and columns.
        numbers: returns the numbers of some of the rows, contiguous [rows, columns]: float8_e4m3fn,
            or for "mxfp4" the bits of e2m1, or int8.
        scales: [rows, groups], [1, groups] or [1, 1].
        zeros: int8, with one of the same shapes; None: 0.
        least: floats of the shape of `scales`, instead of zeros; or None.
        size: number of columns of a group; None: each row is one group.
        first: the place of the first column in its group.
        named: int64 [columns], the group of each column if groups are not neighbours. If so, there
            are the groups of all columns of the matrix, otherwise only those of these columns.
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

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The matrix as floats, computed in float32; some rows at a time."""
        num_columns = self.shape[1]
        tables = self.scales, self.zeros, self.least
        num_groups = max(each.shape[1] for each in tables if each is not None)
        owners = None if self._is_even(num_groups) else self._groups()
        sizes = (num_groups, -1) if owners is None else (1, num_columns)
        out = torch.empty(self.shape, dtype=dtype, device=self.scales.device)

        def of_columns(table: Tensor, rows: slice) -> Tensor:
            own = table[rows] if len(table) > 1 else table
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
            rows = own.expand(num_rows, -1)
            return rows.T if self.kind == "mxfp4" else rows.T.contiguous()

        for each in (self.scales, self.least):
            if each is not None and not each.float().isfinite().all():
                raise ValueError("its scales hold NaN or infinite values")
        scales = table(self.scales)
        assert scales is not None
        return PackedMatrix(
            packing.kind,
            num_columns,
            packing.group,
            torch.cat(units),
            scales,
            table(self.zeros),
            order,
            table(self.least),
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
    """Read the numbers, zero points and scales of a matrix.

    Args:
        box: the range to read of each of its dimensions; empty: everything. Only the words, groups
            and blocks that it needs are read.

    Raises:
        ValueError: the values of pieces contradict each other.
    """
    return _LAYOUTS[stored.format.layout](stored, read, box or [(0, size) for size in stored.shape])


def _length(own: Range) -> int:
    return own[1] - own[0]


def _units(own: Range, size: int | None) -> Range:
    """The words, groups or blocks that contain `own`. size: of one; None: there is only one."""
    return (0, 1) if size is None else (own[0] // size, -(-own[1] // size))


def _within(own: Range, size: int) -> slice:
    """The range `own`, counted from the beginning of the first unit that contains it."""
    first = own[0] % size
    return slice(first, first + _length(own))


def _plain(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range]) -> Quantized:
    (rows, columns), (num_rows, size) = box, stored.format.block or (1, stored.format.group_size)
    numbers = read("weight", box)

    def table(end: str) -> Tensor:
        shape = stored.pieces[end].shape
        if stored.pieces[end].num_values == 1:
            return _table(read(end))
        own = _table(read(end, (_units(rows, num_rows), _units(columns, size))[: len(shape)]))
        return own if num_rows == 1 else own.repeat_interleave(num_rows, 0)[_within(rows, num_rows)]

    zeros = table("weight_zero_point") if "weight_zero_point" in stored.pieces else None
    return _made(stored, box, lambda some: numbers[some], table(stored.scales_end), zeros)


def _packed(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range]) -> Quantized:
    (rows, columns), bits, stated = box, stored.format.bits, read("weight_shape").tolist()
    if stated != [*stored.shape]:
        raise ValueError(f"weight_shape says {stated}, but weight_packed has {[*stored.shape]}")
    in_a_word = WORD_BITS // bits
    words = read("weight_packed", (rows, _units(columns, in_a_word)))
    own = _within(columns, in_a_word)
    named, taken = _named_groups(stored, read, "weight_g_idx", columns)
    is_one = stored.pieces["weight_scale"].num_values == 1
    scales, zeros = _table(read("weight_scale", () if is_one else (rows, taken))), None
    if "weight_zero_point" in stored.pieces:
        packed = read("weight_zero_point", (_units(rows, in_a_word), taken))
        zeros = _unpacked(packed.T, bits)[:, _within(rows, in_a_word)].T.contiguous()

    def numbers(some: slice) -> Tensor:
        return _unpacked(words[some], bits)[:, own].contiguous()

    return _made(stored, box, numbers, scales, zeros, named)


def _awq(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range]) -> Quantized:
    (rows, columns), bits = box, stored.format.bits
    in_a_word = WORD_BITS // bits
    own_words, taken = _units(rows, in_a_word), _units(columns, stored.format.group_size)
    words, scales = read("qweight", (columns, own_words)), _table(read("scales", (taken, rows)).T)
    own = _within(rows, in_a_word)

    def numbers(some: slice) -> Tensor:
        begin, end = own.start + some.start, own.start + some.stop
        first = begin // in_a_word
        unpacked = _unpacked(words[:, first : -(-end // in_a_word)], bits, _AWQ_PLACES)
        return unpacked[:, begin - first * in_a_word : end - first * in_a_word].T.contiguous()

    zeros = _unpacked(read("qzeros", (taken, own_words)), bits, _AWQ_PLACES)[:, own].T.contiguous()
    return _made(stored, box, numbers, scales, zeros)


def _gptq(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range]) -> Quantized:
    (rows, columns), bits = box, stored.format.bits
    in_a_word = WORD_BITS // bits
    words = read("qweight", (_units(columns, in_a_word), rows))
    own = _within(columns, in_a_word)
    named, taken = _named_groups(stored, read, "g_idx", columns)
    scales = _table(read("scales", (taken, rows)).T)
    # The stored word is the word of zero points minus a word with a one in each number. If a number
    # is 0, the subtraction borrowed from the next number, and the addition gives it back.
    ones = stored.format.zero_offset * sum(1 << shift for shift in range(0, WORD_BITS, bits))
    packed = read("qzeros", (taken, _units(rows, in_a_word))).add(ones)
    zeros = _unpacked(packed, bits)[:, _within(rows, in_a_word)].T.contiguous()

    def numbers(some: slice) -> Tensor:
        return _unpacked(words[:, some].T.contiguous(), bits)[:, own].contiguous()

    return _made(stored, box, numbers, scales, zeros, named)


def _mxfp4(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range]) -> Quantized:
    """Blocks [experts, rows, groups, 16], with the first of two numbers in a byte's low half."""
    experts, rows, columns = box
    groups = _units(columns, stored.format.group_size)
    pairs = read("blocks", (experts, rows, groups, (0, 16))).flatten(2).flatten(0, 1)
    scales = read("scales", (experts, rows, groups)).flatten(0, 1).view(torch.float8_e8m0fnu)

    def numbers(some: slice) -> Tensor:
        own = pairs[some]
        return torch.stack((own & 15, own >> 4), 2).flatten(1)

    return _made(stored, ((0, len(pairs)), columns), numbers, scales)


_LAYOUTS: Mapping[Layout, Callable[[QuantizedStored, ReadPiece, Sequence[Range]], Quantized]] = {
    "plain": _plain,
    "packed": _packed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def _made(
    stored: QuantizedStored,
    box: Sequence[Range],
    numbers: Callable[[slice], Tensor],
    scales: Tensor,
    zeros: Tensor | None = None,
    named: Tensor | None = None,
) -> Quantized:
    (rows, columns), size = box, stored.format.num_columns
    return Quantized(
        kind=stored.format.kind,
        shape=(_length(rows), _length(columns)),
        numbers=numbers,
        scales=scales,
        zeros=zeros,
        size=size,
        first=columns[0] % size if size else 0,
        named=named,
    )


def _unpacked(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """The numbers of 32-bit words [rows, words] as int8 [rows, words * numbers in one].

    Numbers are stored without a sign; half of their range is subtracted.

    Args:
        places: the place of each number in a word; by default from the lowest bits on.
    """
    in_order = range(WORD_BITS // bits) if places is None else places
    places_of_bits = [bits * place for place in in_order]
    shifts = torch.tensor(places_of_bits, dtype=torch.int32, device=words.device)
    numbers = words.unsqueeze(2).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
    narrow = numbers.flatten(1).to(torch.int8)
    return narrow.sub_(8) if bits == 4 else narrow.bitwise_xor_(-128)


def _table(values: Tensor) -> Tensor:
    """Scales or zero points as [rows, groups]; one for the whole matrix is [1, 1].

    Scales that are powers of two become float32.
    """
    table = values.float() if values.dtype == torch.float8_e8m0fnu else values
    return table.reshape(table.shape[0], -1) if table.numel() > 1 else table.reshape(1, 1)


def _named_groups(
    stored: QuantizedStored, read: ReadPiece, end: str, columns: Range
) -> tuple[Tensor | None, Range]:
    """The groups of columns that are not in order.

    Returns the group of each column, or None if groups are in order; and the range of groups to
    read. Raises `ValueError`.
    """
    num_in, size = stored.shape[1], stored.format.group_size
    own = _units(columns, size)
    if end not in stored.pieces:
        return None, own
    groups, most = read(end).long(), _units((0, num_in), size)[1] - 1
    if end == "weight_g_idx" and -1 in groups:  # so compressed-tensors says "in order"
        return None, own
    if int(groups.min()) < 0 or int(groups.max()) > most:
        raise ValueError(f"{end} names groups that are not from 0 to {most}")
    # GPTQ always names the groups; looking them up takes half as long as all the rest.
    usual = torch.arange(num_in, device=groups.device) // (size or num_in)
    if torch.equal(groups, usual):
        return None, own
    return groups[slice(*columns)], (0, most + 1)
