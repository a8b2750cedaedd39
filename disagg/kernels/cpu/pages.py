"""Describes a slab of keys and values to compiled code (`csrc/kv_format.h`)."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

from disagg.kernels.kv_pages import KVPages

FORMATS = {"bfloat16": 0, "int8": 1, "int4": 2, "fp8": 3}  # `Format` of csrc/kv_format.h
LANES = 16  # head sizes must be multiples of this


class CpuPages(Structure):
    _fields_ = (
        ("base", c_void_p),
        ("page_nbytes", c_int64),
        ("scales_offset", c_int64),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("format", c_int32),
    )


def cpu_pages(kv_cache: KVPages) -> CpuPages:
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.values.shape
    format, head_dim = kv_cache.format, kv_cache.head_dim
    return CpuPages(
        base=kv_cache.blocks.data_ptr(),
        page_nbytes=format.page_nbytes(block_size, head_dim),
        scales_offset=format.scales_offset(block_size, head_dim) if format.has_scales else 0,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        format=FORMATS[format.name],
    )
