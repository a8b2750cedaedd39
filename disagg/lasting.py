"""Imports large libraries with garbage collection off, because the objects that they create
stay."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Around an import whose objects stay until the process ends.

    torch makes 300,000. To look at all of them for garbage, again and again while there are more,
    takes a fifth of the processor time of a worker's start, and longer in every later collection.
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
