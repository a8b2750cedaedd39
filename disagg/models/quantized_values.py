"""The values of quantised matrices, widened to floats: (number - zero point) * scale.

Sources of the layouts: `compressors/pack_quantized` of compressed-tensors, `WQLinear_GEMM` of
AutoAWQ (its numbers lie in the order 0, 2, 4, 6, 1, 3, 5, 7), `BaseQuantLinear` of GPTQModel (whose
first version stores words of zero points less one in each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.models.quantized_tensors import WORD_BITS, QuantizedStored

_ROWS_AT_ONCE = 256  # few enough for the processor's cache
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of the first number, of the second, ...

ReadPiece = Callable[[str], Tensor]


@dataclass(frozen=True)
class Affine:
    """A matrix as numbers, zero points and scales: (number - zero point) * scale.

    Attributes:
        numbers: those of some rows: float32 [rows, in].
        zeros: float32 [out, groups] or [1, 1]; None: 0.
        scales: float32, of the same shapes.
        groups: int64 [in], the group of each column; None: so many columns each.
    """

    numbers: Callable[[slice], Tensor]
    zeros: Tensor | None
    scales: Tensor
    groups: Tensor | None


def widened(
    stored: QuantizedStored,
    read: ReadPiece,
    dtype: torch.dtype,
    box: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """The matrix, [out, in] of `dtype`. Its pieces are read, and widened some rows at a time.

    Args:
        read: returns one piece by the end of its name.
        box: the rows and the columns that are wanted, first and end; empty: all.

    Raises:
        ValueError: pieces contradict each other, for which only their values show it.
    """
    (first, end), columns = box or ((0, stored.shape[0]), (0, stored.shape[1]))
    affine = affine_of(stored, read)
    out = torch.empty(end - first, columns[1] - columns[0], dtype=dtype)
    for begin in range(first, end, _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, end))
        values = affine.numbers(rows)
        if affine.zeros is not None:
            values = _combined(values, affine.zeros, rows, affine.groups, Tensor.sub_)
        values = _combined(values, affine.scales, rows, affine.groups, Tensor.mul_)
        out[rows.start - first : rows.stop - first] = values[:, slice(*columns)]
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


def affine_of(stored: QuantizedStored, read: ReadPiece) -> Affine:
    match stored.format.layout:
        case "plain":
            return _plain(stored, read)
        case "packed":
            return _packed(stored, read)
        case "awq":
            return _awq(stored, read)
        case _:
            return _gptq(stored, read)


def _plain(stored: QuantizedStored, read: ReadPiece) -> Affine:
    numbers, block = read("weight"), stored.format.block
    scales = _table(read(stored.scales_end))
    zeros = _table(read("weight_zero_point")) if "weight_zero_point" in stored.pieces else None
    if block is not None and scales.shape[0] > 1:
        scales = scales.repeat_interleave(block[0], 0)[: stored.shape[0]]
        zeros = None if zeros is None else zeros.repeat_interleave(block[0], 0)[: stored.shape[0]]
    size = stored.format.group_size if block is None else block[1]
    groups = _groups(scales, stored.shape[1], size)
    return Affine(lambda rows: numbers[rows].float(), zeros, scales, groups)


def _packed(stored: QuantizedStored, read: ReadPiece) -> Affine:
    num_out, num_in = stored.shape
    words, bits = read("weight_packed"), stored.format.bits
    said = read("weight_shape").tolist()
    if said != [num_out, num_in]:
        raise ValueError(f"weight_shape says {said}, and weight_packed holds {[num_out, num_in]}")
    offset = 1 << (bits - 1)  # numbers and zero points are stored without a sign
    scales, zeros = _table(read("weight_scale")), None
    if "weight_zero_point" in stored.pieces:
        packed = read("weight_zero_point")
        zeros = _unpacked(packed.T, bits)[:, :num_out].T.contiguous().sub_(offset)
    groups = _named_groups(stored, read, "weight_g_idx", scales)
    return Affine(lambda rows: _unpacked(words[rows], bits).sub_(offset), zeros, scales, groups)


def _awq(stored: QuantizedStored, read: ReadPiece) -> Affine:
    words, scales = read("qweight"), _table(read("scales").T)
    in_a_word = WORD_BITS // stored.format.bits

    def numbers(rows: slice) -> Tensor:
        first = rows.start // in_a_word
        some = words[:, first : -(-rows.stop // in_a_word)]
        unpacked = _unpacked(some, stored.format.bits, _AWQ_PLACES)
        own = slice(rows.start - first * in_a_word, rows.stop - first * in_a_word)
        return unpacked[:, own].T.contiguous()

    zeros = _unpacked(read("qzeros"), stored.format.bits, _AWQ_PLACES)
    zeros = zeros[:, : stored.shape[0]].T.contiguous()
    return Affine(
        numbers, zeros, scales, _groups(scales, stored.shape[1], stored.format.group_size)
    )


def _gptq(stored: QuantizedStored, read: ReadPiece) -> Affine:
    words, bits, scales = read("qweight"), stored.format.bits, _table(read("scales").T)
    # One word less one in each number: where a number is 0, it borrows from the next, as the sum
    # gives back.
    ones = stored.format.zero_offset * sum(1 << shift for shift in range(0, WORD_BITS, bits))
    zeros = _unpacked(read("qzeros").add(ones), bits)[:, : stored.shape[0]].T.contiguous()
    groups = _named_groups(stored, read, "g_idx", scales)
    return Affine(
        lambda rows: _unpacked(words[:, rows].T.contiguous(), bits), zeros, scales, groups
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


def _groups(scales: Tensor, num_in: int, size: int | None) -> Tensor | None:
    """The group of each column; None where all have the same number of them."""
    if size is None or scales.shape[1] * size == num_in or scales.shape[1] == 1:
        return None
    return torch.arange(num_in, device=scales.device) // size


def _named_groups(
    stored: QuantizedStored, read: ReadPiece, end: str, scales: Tensor
) -> Tensor | None:
    """As `_groups`, or as the checkpoint names them. Raises `ValueError`."""
    num_in, size = stored.shape[1], stored.format.group_size
    if end not in stored.pieces:
        return _groups(scales, num_in, size)
    groups, most = read(end).long(), scales.shape[1] - 1
    if end == "weight_g_idx" and -1 in groups:  # as compressed-tensors says that there is no order
        return _groups(scales, num_in, size)
    if int(groups.min()) < 0 or int(groups.max()) > most:
        raise ValueError(f"{end} names groups beyond 0 to {most}")
    # GPTQ names them in any case; to look them up takes half as long as all the rest.
    usual = torch.arange(num_in, device=groups.device) // (size or num_in)
    in_order = torch.equal(groups, usual)
    return _groups(scales, num_in, size) if in_order else groups
