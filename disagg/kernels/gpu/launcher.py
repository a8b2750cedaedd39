"""Launches Triton kernels, and says when one had to be compiled."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import logging
import time
from typing import Any

import triton

SLOW_S = 0.1  # loading compiled code from Triton's cache takes less

log = logging.getLogger(__name__)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`. (Triton's version takes 3 us.)"""
    return 1 << (number - 1).bit_length()


def find_driver() -> None:
    """Have Triton compile and load its interface to the driver, as the first launch would.

    Any error is Triton's own.
    """
    triton.runtime.driver.active.get_current_device()


class KernelLauncher:
    """The launches of one kernel.

    Args:
        kernel: a function decorated with `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        """Launch on the current device and stream.

        Args:
            grid: one, two or three numbers of programs.
            arguments: all parameters that are not `tl.constexpr`, in order: tensors, numbers, None.
            constants: all `tl.constexpr` parameters, and launch options (`num_warps`, ...).
        """
        began_s = time.perf_counter()
        self.kernel[grid](*arguments, **constants)
        took_s = time.perf_counter() - began_s
        if took_s > SLOW_S and isinstance(self.kernel, triton.JITFunction):
            # While requests run, all of them waited for it.
            log.info("Kernel %s was compiled in %.1f s.", self.kernel.fn.__name__, took_s)
