"""Attention of prompts by compiled code (`csrc/prompt.h`), for models in bfloat16.

It reads all keys and values, also those of the prompt itself, from the paged cache, so nothing is
gathered and no mask is built. The result for a token does not depend on how its prompt was cut into
chunks.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Array, Structure, byref, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.cpu.pages import FORMATS, LANES, cpu_pages
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch


class _ChunkFields(Structure):
    _fields_ = (
        ("start", c_int32),
        ("end", c_int32),
        ("context_len", c_int32),
        ("blocks", c_void_p),
    )


class _PromptFields(Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("out", c_void_p),
        ("chunks", POINTER(_ChunkFields)),
        ("num_chunks", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("sinks", c_void_p),
        ("is_out_tiled", c_int32),
    )


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """The chunks of a step. Each is the next tokens of one sequence after its cached ones."""

    chunks: Array[_ChunkFields]
    block_tables: Tensor  # kept alive, because the chunks point into it


def chunks_of(batch: PagedBatch, *, with_decodes: bool = False) -> PromptChunks:
    """The chunks of all sequences of a batch, or of all but its decodes."""
    tables = batch.block_tables
    assert tables.dtype == torch.int32 and tables.stride(1) == 1
    num_left_out = 0 if with_decodes else batch.num_decodes
    rows = range(num_left_out, len(batch.query_lens))
    chunks = (_ChunkFields * len(rows))()
    start = num_left_out
    for chunk, row in zip(chunks, rows, strict=True):
        end = start + batch.query_lens[row]
        chunk.start, chunk.end, chunk.context_len = start, end, batch.context_lens_host[row]
        chunk.blocks = tables.data_ptr() + row * tables.stride(0) * tables.itemsize
        start = end
    return PromptChunks(chunks, tables)


class PromptAttention:
    """Compiled attention of prompts. Only one thread at a time may use it.

    Args:
        library: the one that `library.find_step` loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.disagg_step_prompts_new.restype = c_void_p
        library.disagg_step_prompts_free.argtypes = [c_void_p]
        library.disagg_step_prompts_free.restype = None
        library.disagg_step_prompts_run.argtypes = [c_void_p, c_void_p, c_void_p, c_int32]
        self._library = library
        self._attention = library.disagg_step_prompts_new()
        if not self._attention:
            raise MemoryError("there is not enough memory for the attention of prompts")

    def __del__(self) -> None:
        if getattr(self, "_attention", None):
            self._library.disagg_step_prompts_free(self._attention)
            self._attention = None

    def takes(self, kv_cache: KVPages) -> bool:
        """Whether it supports attention over this slab, for a model in bfloat16."""
        is_known = kv_cache.format.name in FORMATS and kv_cache.num_vectors == 2
        return is_known and kv_cache.head_dim % LANES == 0

    def run(
        self,
        qkv: Tensor,
        kv_cache: KVPages,
        layer: int,
        window: int | None,
        prompts: PromptChunks,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """Compute attention. The keys and values of the step must be in the cache already.

        Args:
            qkv: bfloat16, as for `Ops.attention`.
            out: bfloat16 [num_tokens, num_heads * head_dim]; the prompts' rows are written.

        Raises:
            MemoryError: there is not enough memory for the threads' sums.
        """
        num_kv_heads, head_dim = kv_cache.values.shape[3], kv_cache.head_dim
        qkv = qkv.contiguous()
        described = _PromptFields(
            qkv=qkv.data_ptr(),
            out=out.data_ptr(),
            chunks=prompts.chunks,
            num_chunks=len(prompts.chunks),
            num_heads=qkv.shape[1] - 2 * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layer=layer,
            window=window or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        status = self._library.disagg_step_prompts_run(
            self._attention,
            byref(described),
            byref(cpu_pages(kv_cache)),
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError(
                f"there is not enough memory for the attention of {qkv.shape[0]} tokens"
            )
