"""Reads quantised matrices without widening them, and repacks them for matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.kernels.packed_matrix import PackedMatrix, pack_units
from disagg.kernels.packed_sizes import Packing
from disagg.models.parts import Range
from disagg.models.quantized_tensors import QuantizedStored
from disagg.models.quantized_values import ReadPiece, affine_of, ranges_of, sizes_of

_ROWS_AT_ONCE = 1024  # so many rows are floats at a time, which takes additional memory
_NAN = 127  # NaN in e4m3, without its sign
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}  # scales of other types become float32


def packed_values(
    stored: QuantizedStored, read: ReadPiece, packing: Packing, box: Sequence[Range] = ()
) -> PackedMatrix | None:
    """Read the matrix, on the device of its pieces.

    Args:
        packing: from `packing.packing_of`.
        box: the range of rows and of columns to read; empty: all.

    Returns:
        The matrix; None if its values show that it must be widened. That is so if groups have
        different sizes, or if some columns are in an order that config.json does not announce.

    Raises:
        ValueError: the values of pieces contradict each other or hold NaN.
    """
    num_in, size = stored.shape[1], stored.group_size or stored.shape[1]
    affine, (num_rows, num_columns) = affine_of(stored, read, box), sizes_of(stored, box)
    if affine.zeros is not None and affine.zeros.shape[1] != affine.scales.shape[1]:
        return None
    order = None
    if affine.has_order:
        if affine.groups is None or num_columns != num_in:
            return None
        order = torch.argsort(affine.groups, stable=True)
        in_order = torch.arange(num_in, device=order.device)
        if not torch.equal(affine.groups[order], in_order // size):
            return None
    half = 1 << (stored.format.bits - 1)
    less = half if stored.format.layout in ("awq", "gptq") else 0  # other layouts are signed
    parts = []
    for begin in range(0, num_rows, _ROWS_AT_ONCE):
        numbers = affine.numbers(slice(begin, min(begin + _ROWS_AT_ONCE, num_rows)))
        parts.append(_units(numbers if order is None else numbers[:, order], less, packing))
    # For each group that is kept, the index of the stored group that contains it, among those read.
    first, end = ranges_of(stored, box)[1]
    owners = torch.arange(first, end, packing.group or num_in, device=affine.scales.device)
    owners = owners // size - first // size

    def table(of_groups: Tensor) -> Tensor:
        return of_groups.expand(num_rows, -1).index_select(1, owners).T.contiguous()

    scales = table(affine.scales)
    if not scales.isfinite().all():
        raise ValueError("its scales hold NaN or infinite values")
    return PackedMatrix(
        packing.kind,
        num_columns,
        packing.group,
        torch.cat(parts),
        scales.to(_SCALES.get(stored.pieces[stored.scales_end].dtype, torch.float32)),
        None if affine.zeros is None else table(affine.zeros.sub(less)).to(torch.int8),
        order,
    )


def _units(numbers: Tensor, less: int, packing: Packing) -> Tensor:
    """Pack numbers, which are floats, after subtracting `less`."""
    if packing.kind != "fp8":
        return pack_units(numbers.sub_(less).to(torch.int8), packing.kind, packing.group)
    stored = numbers.to(torch.float8_e4m3fn)  # exact, since it was e4m3 before
    if stored.view(torch.uint8).bitwise_and(_NAN).eq(_NAN).any():
        raise ValueError("it holds NaN")
    return pack_units(stored, packing.kind, packing.group)
