"""Whether a process of this machine is alive."""

from __future__ import annotations

import contextlib

import psutil


def runs(process: psutil.Process) -> bool:
    """A zombie does not run."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
