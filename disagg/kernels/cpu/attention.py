"""Attention by compiled code (`csrc/attention.h`), for models in bfloat16.

It writes and reads keys and values in the paged cache, so nothing is gathered and no mask is built.
The result for a token does not depend on how its prompt was cut into chunks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container
from ctypes import Array, Structure, addressof, byref, c_bool, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.cpu.library import LANES
from disagg.kernels.kv_pages import KVPages, clear_begun_blocks
from disagg.kernels.ops import PagedBatch, Scores

FORMATS = {"bfloat16": 0, "int8": 1, "int4": 2, "fp8": 3}  # `Format` of csrc/kv_format.h


class CpuPages(Structure):
    """`KVPages` of csrc/kv_format.h."""

    _fields_ = (
        ("base", c_void_p),
        ("page_nbytes", c_int64),
        ("scales_offset", c_int64),
        ("num_layers", c_int32),
        ("num_vectors", c_int32),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("format", c_int32),
    )


class _Sequence(Structure):
    """`Sequence` of csrc/model.h."""

    _fields_ = (
        ("start", c_int32),
        ("end", c_int32),
        ("context_len", c_int32),
        ("is_alone", c_int32),
        ("tables", c_void_p),
    )


class LayerPlace(Structure):
    """`LayerPlace` of csrc/model.h."""

    _fields_ = (("table", c_int32), ("layer", c_int32))


class _Attended(Structure):
    """`Attended` of csrc/attended.h."""

    _fields_ = (
        ("qkv", c_void_p),
        ("out", c_void_p),
        ("num_columns", c_int32),
        ("is_tiled", c_bool),
        ("sequences", c_void_p),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("num_vectors", c_int32),
        ("head_dim", c_int32),
        ("place", LayerPlace),
        ("window", c_int32),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("cap", c_float),
    )


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step, as compiled code reads them."""

    fields: Array[_Sequence]
    block_tables: Tensor  # kept alive, because the fields point into it

    @property
    def address(self) -> int:
        return addressof(self.fields)


def plan_sequences(
    batch: PagedBatch,
    kv_cache: KVPages,
    begins_of_drafts: Container[int] = (),
    num_groups: int = 1,
) -> Sequences:
    """Describe the sequences of a step, and clear the blocks that it begins. Once per step.

    Args:
        batch: has the block tables of so many groups of layers, one after the other.
        begins_of_drafts: has the row of a sequence's first token if all its tokens but that are of
            a draft, and few.
    """
    tables = batch.block_tables
    clear_begun_blocks(kv_cache, tables, batch.context_lens_host, batch.query_lens, num_groups)
    assert tables.dtype == torch.int32 and tables.stride(1) == 1
    fields = (_Sequence * len(batch.query_lens))()
    address, stride = tables.data_ptr(), tables.stride(0) * tables.itemsize
    start = 0
    for row, length in enumerate(batch.query_lens):
        is_alone = length == 1 or start in begins_of_drafts
        blocks = address + row * stride
        fields[row] = _Sequence(
            start, start + length, batch.context_lens_host[row], is_alone, blocks
        )
        start += length
    return Sequences(fields, tables)


def takes_cache(kv_cache: KVPages) -> bool:
    """Whether compiled code reads this slab, for a model in bfloat16."""
    return kv_cache.format.name in FORMATS and kv_cache.head_dim % LANES == 0


def cpu_pages(kv_cache: KVPages) -> CpuPages:
    """Describe a slab to compiled code."""
    _, num_layers, num_vectors, num_kv_heads, block_size, _ = kv_cache.values.shape
    format, head_dim = kv_cache.format, kv_cache.head_dim
    return CpuPages(
        base=kv_cache.blocks.data_ptr(),
        page_nbytes=format.page_nbytes(block_size, head_dim),
        scales_offset=format.scales_offset(block_size, head_dim) if format.has_scales else 0,
        num_layers=num_layers,
        num_vectors=num_vectors,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        format=FORMATS[format.name],
    )


class CpuAttention:
    """Compiled attention. Only one thread at a time may use it.

    Args:
        library: the one that `library.find_step` loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.disagg_step_attention_new.restype = c_void_p
        library.disagg_step_attention_free.argtypes = [c_void_p]
        library.disagg_step_attention_free.restype = None
        library.disagg_step_attention_run.argtypes = [c_void_p, c_void_p, c_void_p, c_int32]
        self._library = library
        self._attention = library.disagg_step_attention_new()
        if not self._attention:
            raise MemoryError("there is not enough memory for attention")

    def __del__(self) -> None:
        if getattr(self, "_attention", None):
            self._library.disagg_step_attention_free(self._attention)
            self._attention = None

    def plan(self, batch: PagedBatch, kv_cache: KVPages) -> CpuPaging:
        """Plan a step, in bfloat16, over a slab for which `takes_cache` is true."""
        return CpuPaging(self, plan_sequences(batch, kv_cache))

    def run(self, attended: _Attended, kv_cache: KVPages) -> None:
        """Raises `MemoryError` if there is not enough memory for the threads' sums."""
        status = self._library.disagg_step_attention_run(
            self._attention,
            byref(attended),
            byref(cpu_pages(kv_cache)),
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError(
                f"there is not enough memory for attention of {attended.num_tokens} tokens"
            )


@dataclass(frozen=True, slots=True)
class CpuPaging:
    """A step's attention by compiled code."""

    attention: CpuAttention
    sequences: Sequences

    def attend(
        self,
        qkv: Tensor,
        kv_cache: KVPages,
        layer: int,
        window: int | None,
        sinks: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        """Write this step's keys and values, or latents, then attend. See `Ops.attention`."""
        num_kv_heads, head_dim = kv_cache.values.shape[3], kv_cache.head_dim
        num_heads = qkv.shape[1] - kv_cache.num_vectors * num_kv_heads
        qkv = qkv.contiguous()
        sinks = None if sinks is None else sinks.float()
        out = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
        attended = _Attended(
            qkv=qkv.data_ptr(),
            out=out.data_ptr(),
            num_columns=out.shape[1],
            sequences=self.sequences.address,
            num_tokens=qkv.shape[0],
            num_sequences=len(self.sequences.fields),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_vectors=kv_cache.num_vectors,
            head_dim=head_dim,
            place=LayerPlace(0, kv_cache.places[layer][1]),
            window=window or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=scores.scale or head_dim**-0.5,
            cap=scores.cap or 0.0,
        )
        self.attention.run(attended, kv_cache)
        return out
