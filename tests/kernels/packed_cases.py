"""Packed matrices with random numbers, for tests of what is made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.kernels.packed_matrix import PackedMatrix, pack_units
from disagg.kernels.packed_sizes import MXFP4_GROUP, Kind


def random_numbers(kind: Kind, num_out: int, num_in: int) -> Tensor:
    """All that there are of a kind: float8_e4m3fn, or int8."""
    if kind != "fp8":
        half = 8 if kind == "int4" else 128
        return torch.randint(-half, half, (num_out, num_in)).to(torch.int8)
    codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    return codes.view(torch.float8_e4m3fn)


def random_packed(
    kind: Kind,
    num_out: int,
    num_in: int,
    group: int | None = None,
    *,
    has_zeros: bool = False,
    is_ordered: bool = False,
    has_least: bool = False,
    dtype: torch.dtype = torch.float32,
    input_scale: float | None = None,
) -> PackedMatrix:
    """Its products have sizes of about 1. dtype: of the scales."""
    num_groups = 1 if group is None else -(-num_in // group)
    largest = {"fp8": 100.0, "int8": 70.0, "int4": 6.0}[kind]
    scales = (torch.rand(num_groups, num_out) + 0.5).div_(largest * num_in**0.5)
    least = scales * (torch.rand(num_groups, num_out) * 15 - 15)
    return PackedMatrix(
        kind,
        num_in,
        group,
        pack_units(random_numbers(kind, num_out, num_in), kind, group),
        scales.to(dtype),
        random_numbers(kind, num_groups, num_out) if has_zeros else None,
        torch.randperm(num_in) if is_ordered else None,
        least.to(dtype) if has_least else None,
        input_scale,
    )


def random_mxfp4(num_out: int, num_in: int, low: int = 122, high: int = 126) -> PackedMatrix:
    """low, high: range of the exponents of its scales."""
    units = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
    exponents = torch.randint(low, high, (num_out, num_in // MXFP4_GROUP), dtype=torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu).T
    return PackedMatrix("mxfp4", num_in, MXFP4_GROUP, units, scales)
