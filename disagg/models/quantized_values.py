"""Reads quantised matrices, and widens them to floats: (number - zero point) * scale.

Sources of the layouts: `compressors/pack_quantized` of compressed-tensors, `WQLinear_GEMM` of
AutoAWQ (whose numbers are in the order 0, 2, 4, 6, 1, 3, 5, 7), `BaseQuantLinear` of GPTQModel
(whose first version stores zero points minus one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from disagg.models.parts import Range
from disagg.models.quantized_tensors import WORD_BITS, QuantizedStored

_ROWS_AT_ONCE = 256  # few enough for the CPU's cache
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of the first number, of the second, ...


class ReadPiece(Protocol):
    """Returns one piece by the end of its name."""

    def __call__(self, end: str, box: Sequence[Range] = (), /) -> Tensor:
        """Read a piece. box: the range of each of its dimensions; empty: everything."""
        ...


@dataclass(frozen=True)
class Affine:
    """Some rows and columns of a matrix: (number - zero point) * scale.

    Attributes:
        numbers: returns the numbers of some of the rows, contiguous float32 [rows, in].
        zeros: float32 [out, groups] or [1, 1]; None: 0.
        scales: float32, with one of the same shapes.
        groups: int64 [in], the group of each column; None: groups are equally large.
        has_order: whether columns of a group are not neighbours. If so, there are the groups of
            all columns of the matrix, otherwise only those of these columns.
    """

    numbers: Callable[[slice], Tensor]
    zeros: Tensor | None
    scales: Tensor
    groups: Tensor | None
    has_order: bool = False


def widened(
    stored: QuantizedStored, read: ReadPiece, dtype: torch.dtype, box: Sequence[Range] = ()
) -> Tensor:
    """Read a matrix as [out, in] of `dtype`, widening some rows at a time.

    Args:
        box: the range of rows and of columns to read; empty: all.

    Raises:
        ValueError: the values of pieces contradict each other.
    """
    affine, sizes = affine_of(stored, read, box), sizes_of(stored, box)
    out = torch.empty(sizes, dtype=dtype)
    for begin in range(0, sizes[0], _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, sizes[0]))
        values = affine.numbers(rows)
        if affine.zeros is not None:
            values = _combined(values, affine.zeros, rows, affine.groups, Tensor.sub_)
        out[rows] = _combined(values, affine.scales, rows, affine.groups, Tensor.mul_)
    return out


def _combined(
    values: Tensor,
    of_groups: Tensor,
    rows: slice,
    groups: Tensor | None,
    combine: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Combine `values` [rows, in] with the numbers of their groups."""
    own = of_groups[rows] if of_groups.shape[0] > 1 else of_groups
    if groups is not None:
        return combine(values, own.index_select(1, groups))
    combine(values.view(values.shape[0], own.shape[1], -1), own.unsqueeze(2))
    return values


def ranges_of(stored: QuantizedStored, box: Sequence[Range]) -> tuple[Range, Range]:
    """The range of rows and of columns of a box."""
    rows, columns = box or [(0, size) for size in stored.shape]
    return rows, columns


def sizes_of(stored: QuantizedStored, box: Sequence[Range]) -> tuple[int, int]:
    """The numbers of rows and columns of a box."""
    rows, columns = ranges_of(stored, box)
    return rows[1] - rows[0], columns[1] - columns[0]


def affine_of(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range] = ()) -> Affine:
    """Read the numbers, zero points and scales of a box.

    Only the words, groups and blocks that the box needs are read.
    """
    rows, columns = ranges_of(stored, box)
    match stored.format.layout:
        case "plain":
            return _plain(stored, read, rows, columns)
        case "packed":
            return _packed(stored, read, rows, columns)
        case "awq":
            return _awq(stored, read, rows, columns)
        case _:
            return _gptq(stored, read, rows, columns)


def _units(own: Range, size: int | None) -> Range:
    """The words, groups or blocks that contain `own`. size: of one; None: there is only one."""
    return (0, 1) if size is None else (own[0] // size, -(-own[1] // size))


def _within(own: Range, size: int) -> slice:
    """The range `own`, counted from the beginning of the first unit that contains it."""
    first = own[0] % size
    return slice(first, first + own[1] - own[0])


def _plain(stored: QuantizedStored, read: ReadPiece, rows: Range, columns: Range) -> Affine:
    numbers, block = read("weight", (rows, columns)), stored.format.block
    num_rows, size = block or (1, stored.format.group_size)

    def table(end: str) -> Tensor:
        shape = stored.pieces[end].shape
        if stored.pieces[end].num_values == 1:
            return _table(read(end))
        own = _table(read(end, (_units(rows, num_rows), _units(columns, size))[: len(shape)]))
        return own if num_rows == 1 else own.repeat_interleave(num_rows, 0)[_within(rows, num_rows)]

    scales = table(stored.scales_end)
    zeros = table("weight_zero_point") if "weight_zero_point" in stored.pieces else None
    groups = _groups(scales, columns, size)
    return Affine(lambda some: numbers[some].float(), zeros, scales, groups)


def _packed(stored: QuantizedStored, read: ReadPiece, rows: Range, columns: Range) -> Affine:
    bits, stated = stored.format.bits, read("weight_shape").tolist()
    if stated != [*stored.shape]:
        raise ValueError(f"weight_shape says {stated}, but weight_packed has {[*stored.shape]}")
    in_a_word = WORD_BITS // bits
    offset = 1 << (bits - 1)  # numbers and zero points are stored without a sign
    words = read("weight_packed", (rows, _units(columns, in_a_word)))
    own = _within(columns, in_a_word)
    named, taken = _named_groups(stored, read, "weight_g_idx", columns)
    is_one = stored.pieces["weight_scale"].num_values == 1
    scales, zeros = _table(read("weight_scale", () if is_one else (rows, taken))), None
    if "weight_zero_point" in stored.pieces:
        packed = read("weight_zero_point", (_units(rows, in_a_word), taken))
        zeros = _unpacked(packed.T, bits)[:, _within(rows, in_a_word)].T.contiguous().sub_(offset)
    return Affine(
        lambda some: _unpacked(words[some], bits)[:, own].contiguous().sub_(offset),
        zeros,
        scales,
        _groups(scales, columns, stored.format.group_size) if named is None else named,
        named is not None,
    )


def _awq(stored: QuantizedStored, read: ReadPiece, rows: Range, columns: Range) -> Affine:
    bits, size = stored.format.bits, stored.format.group_size
    in_a_word = WORD_BITS // bits
    own_words, taken = _units(rows, in_a_word), _units(columns, size)
    words, scales = read("qweight", (columns, own_words)), _table(read("scales", (taken, rows)).T)
    own = _within(rows, in_a_word)

    def numbers(some: slice) -> Tensor:
        begin, end = own.start + some.start, own.start + some.stop
        first = begin // in_a_word
        unpacked = _unpacked(words[:, first : -(-end // in_a_word)], bits, _AWQ_PLACES)
        return unpacked[:, begin - first * in_a_word : end - first * in_a_word].T.contiguous()

    zeros = _unpacked(read("qzeros", (taken, own_words)), bits, _AWQ_PLACES)[:, own].T.contiguous()
    return Affine(numbers, zeros, scales, _groups(scales, columns, size))


def _gptq(stored: QuantizedStored, read: ReadPiece, rows: Range, columns: Range) -> Affine:
    bits = stored.format.bits
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
    return Affine(
        lambda some: _unpacked(words[:, some].T.contiguous(), bits)[:, own].contiguous(),
        zeros,
        scales,
        _groups(scales, columns, stored.format.group_size) if named is None else named,
        named is not None,
    )


def _unpacked(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """The numbers of 32-bit words [rows, words] as float32 [rows, words * numbers in one].

    Args:
        places: the place of each number in a word; by default from the lowest bits on.
    """
    in_order = range(WORD_BITS // bits) if places is None else places
    places_of_bits = [bits * place for place in in_order]
    shifts = torch.tensor(places_of_bits, dtype=torch.int32, device=words.device)
    numbers = words.unsqueeze(2).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
    return numbers.flatten(1).float()


def _table(scales: Tensor) -> Tensor:
    """Scales as float32 [rows, groups]; one scale for the whole matrix is [1, 1]."""
    table = scales.float()
    return table.reshape(table.shape[0], -1) if table.numel() > 1 else table.reshape(1, 1)


def _groups(scales: Tensor, columns: Range, size: int | None) -> Tensor | None:
    """The group of each column that was read; None if all groups have equally many columns."""
    is_even = columns[0] % (size or 1) == 0 and scales.shape[1] * (size or 0) == (
        columns[1] - columns[0]
    )
    if size is None or scales.shape[1] == 1 or is_even:
        return None
    return torch.arange(*columns, device=scales.device) // size - columns[0] // size


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
