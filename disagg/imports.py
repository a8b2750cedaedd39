"""Imports of large libraries with garbage collection off: the objects that they create stay."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Turn garbage collection off during imports, and exempt the imported objects from it.

    torch creates 300,000 objects. Collections that look at them again and again take a fifth of
    the CPU time of a worker's start, and every later collection takes longer.
    """
    num_before, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_before:  # else nothing was imported
            gc.freeze()
        if was_enabled:
            gc.enable()
