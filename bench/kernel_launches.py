"""Measures what the host pays to launch the kernels of one prompt layer, without a GPU.

    python -m bench.kernel_launches

A fake CUDA driver takes each launch and does nothing, so the figures are Python's share. A real
launch adds 2 to 3 us a kernel. Triton's launcher and disagg's take turns in one process.
"""

from __future__ import annotations

import statistics
import time
from unittest.mock import patch

import torch

from bench.gpu_paged import Heads, Paged
from bench.report import print_table
from disagg.kernels.gpu.gated_mul import gated_mul
from disagg.kernels.gpu.launcher import KernelLauncher
from disagg.kernels.gpu.norm_rope import norm_rope_
from disagg.kernels.gpu.rms_norm import add_rms_norm
from disagg.kernels.kv_pages import FORMATS
from tests.kernels.recording_driver import recording

NUM_TOKENS, NUM_ROUNDS, NUM_LAYERS = 64, 15, 100
CPU = torch.device("cpu")


def _triton_s_way(
    self: KernelLauncher, grid: tuple[int, ...], *arguments: object, **rest: object
) -> None:
    self._kernel[grid](*arguments, **rest)


class Layer:
    """The launches of a layer of Llama-3-8B, on tensors that nobody computes with."""

    def __init__(self, format: str) -> None:
        heads = Heads(num_layers=2)
        lens = [(NUM_TOKENS, NUM_TOKENS)]
        self._paged = Paged(heads, lens, CPU, torch.bfloat16, format=FORMATS[format])
        self._x = torch.zeros(NUM_TOKENS, 4096, dtype=torch.bfloat16)
        self._gate_up = torch.zeros(NUM_TOKENS, 28672, dtype=torch.bfloat16)
        self._rope = torch.zeros(NUM_TOKENS, 2, 64)
        self._turned = self._paged.qkv[:, :40]

    def __call__(self) -> None:
        norm_rope_(self._turned, None, 1e-6, self._rope)
        self._paged.attend(1)  # two kernels: it writes before
        add_rms_norm(self._x, self._x, self._x[0], 1e-6)
        gated_mul(self._gate_up)
        add_rms_norm(self._x, self._x, self._x[0], 1e-6)

    def time_us(self) -> float:
        begin_s = time.perf_counter()
        for _ in range(NUM_LAYERS):
            self()
        return (time.perf_counter() - begin_s) / NUM_LAYERS * 1e6


def measure(format: str) -> dict[str, object]:
    layer = Layer(format)
    ours, tritons = [], []
    for _ in range(NUM_ROUNDS):
        ours.append(layer.time_us())
        with patch.object(KernelLauncher, "__call__", _triton_s_way):
            tritons.append(layer.time_us())
    return {
        "KV": format,
        "kernels": 6,
        "us, Triton's way": statistics.median(tritons),
        "us, remembered": statistics.median(ours),
        "of Triton's": statistics.median(a / b for a, b in zip(ours, tritons, strict=True)),
    }


def main() -> None:
    with recording() as recorder:
        recorder.is_silent = True
        print_table([measure(format) for format in ("bfloat16", "int8")])


if __name__ == "__main__":
    main()
