"""Launches Triton kernels without repeating Triton's lookup of the compiled code.

`kernel[grid](...)` binds arguments, specialises each, and looks the compiled code up by a string
made from all of them. This takes 12 to 20 us of Python, six times per layer. The result is a
compiled kernel that can be launched directly, as in Triton's own tutorials (`compiled[grid](...)`,
Triton 3.6 and 3.7). A `KernelLauncher` caches it by a key that distinguishes everything that Triton
distinguishes:

- tensors by their dtype, if those that Triton specialises are aligned to 16 bytes;
- integers by their value; those that Triton does not specialise only if they fit into 32 bits;
- constants and options by name and value, and the current device.

Launches that do not fulfil these conditions go through Triton each time, as does everything under
Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import logging
import time
from typing import Any

import triton
from torch import Tensor

_ALIGNMENT = 16  # Triton specialises tensors whose address is a multiple of so many bytes
_INT32 = range(-(1 << 31), 1 << 31)
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
        kernel: a function decorated with `triton.jit`. Its `tl.constexpr` parameters come last.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
        # Under the interpreter there is no compiled code to cache, and no device.
        self._is_jit = isinstance(kernel, triton.JITFunction)
        parameters = kernel.params if self._is_jit else ()
        self._constant_names = tuple(p.name for p in parameters if p.is_constexpr)
        # For each other parameter: does its value select the code, and does a tensor's alignment?
        self._asked = tuple(
            (not p.do_not_specialize, not (p.do_not_specialize or p.do_not_specialize_on_alignment))
            for p in parameters
            if not p.is_constexpr
        )

    def __call__(self, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        """Launch on the current device and stream.

        Args:
            grid: one, two or three numbers of programs.
            arguments: all parameters that are not `tl.constexpr`, in order: tensors, numbers, None.
            constants: all `tl.constexpr` parameters, and launch options (`num_warps`, ...).
        """
        if not self._is_jit:
            self._kernel[grid](*arguments, **constants)
            return
        device = triton.runtime.driver.active.get_current_device()
        key: list[object] = [device, *constants, *constants.values()]
        values: list[object] = []
        addresses = 0
        is_usual = True
        for argument, (by_value, by_address) in zip(arguments, self._asked, strict=True):
            value = argument
            if isinstance(argument, Tensor):
                value = address = argument.data_ptr()
                if by_address:
                    addresses |= address
                key.append(argument.dtype)
            elif type(argument) is int:
                if by_value:
                    key.append(argument)
                else:
                    key.append(int)
                    is_usual &= argument in _INT32
            elif type(argument) is float:
                key.append(float)
            elif argument is None:
                key.append(None)
            else:
                is_usual = False
            values.append(value)
        if not is_usual or addresses % _ALIGNMENT:
            self._kernel[grid](*arguments, **constants)
            return
        found = self._compiled.get(tuple(key))
        if found is None:
            began_s = time.perf_counter()
            compiled = self._kernel[grid](*arguments, **constants)
            took_s = time.perf_counter() - began_s
            if took_s > SLOW_S:  # while requests run, all of them waited for it
                log.info("Kernel %s was compiled in %.1f s.", self._kernel.fn.__name__, took_s)
            given = tuple(constants[name] for name in self._constant_names)
            self._compiled[tuple(key)] = compiled, given
            return
        compiled, given = found
        compiled[(*grid, 1, 1)](*values, *given)
