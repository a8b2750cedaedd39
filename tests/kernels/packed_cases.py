"""Packed matrices with random numbers, for tests of what is made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.kernels.packed_matrix import PackedMatrix, pack_scales, pack_units
from disagg.kernels.packed_sizes import FP4_KINDS, Kind


def random_numbers(kind: Kind, num_out: int, num_in: int) -> Tensor:
    """All that there are of a kind: float8_e4m3fn, int8, or the bits of e2m1 as int8."""
    if kind in FP4_KINDS:
        return torch.randint(0, 16, (num_out, num_in)).to(torch.int8)
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
    """Its products have sizes of about 1. dtype: of the scales, which have 8 bits in FP4."""
    num_groups = 1 if group is None else -(-num_in // group)
    largest = {"fp8": 100.0, "int8": 70.0, "int4": 6.0, "mxfp4": 3.0, "nvfp4": 3.0}[kind]
    scales = (torch.rand(num_groups, num_out) + 0.5).div_(largest * num_in**0.5)
    least = scales * (torch.rand(num_groups, num_out) * 15 - 15)
    kept, row_scales = scales.to(dtype), None
    if kind == "mxfp4":
        kept = pack_scales(scales.to(torch.float8_e8m0fnu))
    elif kind == "nvfp4":
        row_scales = scales.amax(0) * (torch.rand(num_out) + 0.5) / 100
        kept = pack_scales((scales / row_scales).to(torch.float8_e4m3fn))
    return PackedMatrix(
        kind,
        num_in,
        group,
        pack_units(random_numbers(kind, num_out, num_in), kind, group),
        kept,
        random_numbers(kind, num_groups, num_out) if has_zeros else None,
        torch.randperm(num_in) if is_ordered else None,
        least.to(dtype) if has_least else None,
        input_scale,
        row_scales,
    )
