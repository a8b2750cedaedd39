"""What kernels need of Triton besides its language: a driver, and to know when it compiles."""

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


def start_compiler() -> None:
    """Load Triton's interface to the driver, as the first launch would, and log what it compiles.

    Any error is Triton's own. While requests run, all of them wait for a kernel that is compiled.
    """
    triton.runtime.driver.active.get_current_device()
    began_s = 0.0

    def begin(**about: Any) -> None:
        nonlocal began_s
        began_s = time.perf_counter()

    def end(*, fn: Any, **about: Any) -> None:
        took_s = time.perf_counter() - began_s
        if took_s > SLOW_S:
            log.info("Kernel %s was compiled in %.1f s.", fn.name, took_s)

    triton.knobs.runtime.jit_cache_hook = begin
    triton.knobs.runtime.jit_post_compile_hook = end
