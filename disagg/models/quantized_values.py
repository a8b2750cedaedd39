"""The values of quantised matrices, widened to floats: (number - zero point) * scale.

Sources of the layouts: `compressors/pack_quantized` of compressed-tensors, `WQLinear_GEMM` of
AutoAWQ (its numbers lie in the order 0, 2, 4, 6, 1, 3, 5, 7), `BaseQuantLinear` of GPTQModel (whose
first version stores words of zero points less one in each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from disagg.models.parts import Range
from disagg.models.quantized_tensors import WORD_BITS, QuantizedStored

_ROWS_AT_ONCE = 256  # few enough for the processor's cache
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of the first number, of the second, ...


class ReadPiece(Protocol):
    """Returns one piece by the end of its name."""

    def __call__(self, end: str, box: Sequence[Range] = (), /) -> Tensor:
        """box: what of each of its dimensions, first and end; empty: everything."""
        ...


@dataclass(frozen=True)
class Affine:
    """Some rows and columns of a matrix as numbers, zero points and scales: (number - zero point) *
    scale.

    Attributes:
        numbers: those of some of the rows: float32 [rows, in], contiguous.
        zeros: float32 [out, groups] or [1, 1]; None: 0.
        scales: float32, of the same shapes.
        groups: int64 [in], the group of each column; None: so many columns each.
        has_order: columns of a group are not neighbours. The groups are then those of all columns;
            else only those that the columns are of.
    """

    numbers: Callable[[slice], Tensor]
    zeros: Tensor | None
    scales: Tensor
    groups: Tensor | None
    has_order: bool = False


def widened(
    stored: QuantizedStored, read: ReadPiece, dtype: torch.dtype, box: Sequence[Range] = ()
) -> Tensor:
    """The matrix, [out, in] of `dtype`. Its pieces are read, and widened some rows at a time.

    Args:
        box: the rows and the columns that are wanted, first and end; empty: all.

    Raises:
        ValueError: pieces contradict each other, for which only their values show it.
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
    """`values` [rows, in] with what its groups have."""
    own = of_groups[rows] if of_groups.shape[0] > 1 else of_groups
    if groups is not None:
        return combine(values, own.index_select(1, groups))
    combine(values.view(values.shape[0], own.shape[1], -1), own.unsqueeze(2))
    return values


def ranges_of(stored: QuantizedStored, box: Sequence[Range]) -> tuple[Range, Range]:
    """The rows and the columns of a box."""
    rows, columns = box or [(0, size) for size in stored.shape]
    return rows, columns


def sizes_of(stored: QuantizedStored, box: Sequence[Range]) -> tuple[int, int]:
    """How many rows and columns a box has."""
    rows, columns = ranges_of(stored, box)
    return rows[1] - rows[0], columns[1] - columns[0]


def affine_of(stored: QuantizedStored, read: ReadPiece, box: Sequence[Range] = ()) -> Affine:
    """Of the pieces, only what the box needs is read: whole words, groups and blocks."""
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
    """Which words, groups or blocks have some of `own`. size: of one; None: there is one."""
    return (0, 1) if size is None else (own[0] // size, -(-own[1] // size))


def _within(own: Range, size: int) -> slice:
    """Where `own` lies in its units, counted from the first of them."""
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
    bits, said = stored.format.bits, read("weight_shape").tolist()
    if said != [*stored.shape]:
        raise ValueError(f"weight_shape says {said}, and weight_packed holds {[*stored.shape]}")
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
    # One word less one in each number: where a number is 0, it borrows from the next, as the sum
    # gives back.
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
        places: in a word, of its numbers in their order; by default from the lowest bits on.
    """
    in_order = range(WORD_BITS // bits) if places is None else places
    places_of_bits = [bits * place for place in in_order]
    shifts = torch.tensor(places_of_bits, dtype=torch.int32, device=words.device)
    numbers = words.unsqueeze(2).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
    return numbers.flatten(1).float()


def _table(scales: Tensor) -> Tensor:
    """float32 [rows, groups]; one for all rows is [1, 1]."""
    table = scales.float()
    return table.reshape(table.shape[0], -1) if table.numel() > 1 else table.reshape(1, 1)


def _groups(scales: Tensor, columns: Range, size: int | None) -> Tensor | None:
    """The group of each column, of those that were read; None where all have the same number of
    columns."""
    is_even = columns[0] % (size or 1) == 0 and scales.shape[1] * (size or 0) == (
        columns[1] - columns[0]
    )
    if size is None or scales.shape[1] == 1 or is_even:
        return None
    return torch.arange(*columns, device=scales.device) // size - columns[0] // size


def _named_groups(
    stored: QuantizedStored, read: ReadPiece, end: str, columns: Range
) -> tuple[Tensor | None, Range]:
    """The group of each column if the checkpoint names them in another order than theirs, else
    None; and which groups are read. Raises `ValueError`."""
    num_in, size = stored.shape[1], stored.format.group_size
    own = _units(columns, size)
    if end not in stored.pieces:
        return None, own
    groups, most = read(end).long(), _units((0, num_in), size)[1] - 1
    if end == "weight_g_idx" and -1 in groups:  # as compressed-tensors says that there is no order
        return None, own
    if int(groups.min()) < 0 or int(groups.max()) > most:
        raise ValueError(f"{end} names groups beyond 0 to {most}")
    # GPTQ names them in any case; to look them up takes half as long as all the rest.
    usual = torch.arange(num_in, device=groups.device) // (size or num_in)
    if torch.equal(groups, usual):
        return None, own
    return groups[slice(*columns)], (0, most + 1)
