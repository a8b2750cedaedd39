"""Checks whether a process of this machine is alive."""

from __future__ import annotations

import contextlib

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether a process is running. A zombie is not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
