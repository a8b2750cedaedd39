"""The C structure in which a weight is passed to compiled code."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_void_p

PANEL = 64  # rows of a weight in one panel of our layout


class CpuMatrix(Structure):
    """`Matrix` of csrc/product.h, which explains the fields. Unset fields are null or 0."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("numbers", c_void_p),
        ("nibbles", c_void_p),
        ("scales", c_void_p),
        ("num_out", c_int32),
        ("num_in", c_int32),
        ("group_size", c_int32),
        ("panel_width", c_int32),
    )
