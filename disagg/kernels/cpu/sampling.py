"""Sampling on a CPU in compiled loops (`csrc/sampling.cpp`): two calls per step, not hundreds.

`kernels/torch/sampling.py` is the plain-torch reference. It is used if no compiler was found when
disagg was installed.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from disagg.kernels.sampling_rows import SampledRows, SamplingTables

_LEAST_LOGITS = 1 << 18  # with fewer logits, waking another thread costs more than it saves


class _Tables(Structure):
    _fields_ = (
        ("numbers", c_void_p),
        ("stop_ids", c_void_p),
        ("seen_ids", c_void_p),
        ("num_seen", c_void_p),
        ("counts", c_void_p),
        ("num_stop_ids", c_int64),
        ("seen_width", c_int64),
        ("vocab", c_int64),
    )


class CpuSampling:
    """`SamplingOps` for tensors in a CPU's memory. Only one thread at a time may use it.

    Args:
        library: `kernels.cpu.library.SAMPLING`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        tables, pointer, number = ctypes.POINTER(_Tables), c_void_p, c_int64
        adjust, choose = library.disagg_sampling_adjust, library.disagg_sampling_choose
        remember = library.disagg_sampling_remember
        adjust.argtypes = [pointer, tables, pointer, pointer, number, pointer]
        choose.argtypes = [pointer, tables, pointer, pointer, number, number, pointer, pointer]
        remember.argtypes = [tables, pointer, pointer, pointer, number]
        adjust.restype, choose.restype, remember.restype = None, c_int32, None
        self._library = library
        # Threads besides the caller's. They are started when there is work for them.
        self._threads = ThreadPoolExecutor(thread_name_prefix="sampling")

    def adjust_(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> None:
        self._library.disagg_sampling_adjust(
            logits.data_ptr(),
            byref(_described(tables, logits.shape[1])),
            rows.slots.data_ptr(),
            rows.adjusted.data_ptr(),
            rows.adjusted.shape[0],
            positions.data_ptr(),
        )

    def choose(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> Tensor:
        num_rows, vocab_size = logits.shape
        chosen = torch.empty(2, num_rows, dtype=torch.int64)
        token_ids, has_none = (part.data_ptr() for part in chosen)
        described = _described(tables, vocab_size)
        given = logits.data_ptr(), described, rows.slots.data_ptr(), positions.data_ptr()

        def choose(first: int, end: int) -> int:
            found: int = self._library.disagg_sampling_choose(
                *given, first, end, token_ids, has_none
            )
            return found

        num_parts = min(torch.get_num_threads(), num_rows, max(1, logits.numel() // _LEAST_LOGITS))
        ends = [num_rows * part // num_parts for part in range(num_parts + 1)]
        others = [
            self._threads.submit(choose, ends[part], ends[part + 1]) for part in range(1, num_parts)
        ]
        failed = choose(0, ends[1]) + sum(other.result() for other in others)
        if failed:
            raise MemoryError(f"there is not enough memory to choose tokens for {num_rows} rows")
        return chosen

    def remember(
        self, tables: SamplingTables, slots: Tensor, token_ids: Tensor, rows: Tensor
    ) -> None:
        self._library.disagg_sampling_remember(
            byref(_described(tables, tables.counts.shape[1])),
            slots.data_ptr(),
            token_ids.data_ptr(),
            rows.data_ptr(),
            rows.shape[0],
        )


def _described(tables: SamplingTables, vocab_size: int) -> _Tables:
    return _Tables(
        tables.numbers.data_ptr(),
        tables.stop_ids.data_ptr(),
        tables.seen_ids.data_ptr(),
        tables.num_seen.data_ptr(),
        tables.counts.data_ptr(),
        tables.stop_ids.shape[1],
        tables.seen_ids.shape[1],
        vocab_size,
    )
