"""Starts a server again that broke after it was ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from disagg.cli.lines import Lines
from disagg.errors import StartupError

SERVED_S = 60.0  # a server that broke sooner is started again after a pause
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
NUM_STARTS = 3  # failed starts in a row after which the command gives up
LOOK_PERIOD_S = 0.2

BROKEN = 1  # exit status


class Ended(NamedTuple):
    """How a server has ended."""

    status: int
    served_s: float | None  # how long it was ready; None if it never was


def keep_serving(
    serve_once: Callable[[], Ended],
    lines: Lines,
    is_stopped: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run servers one after another until one is stopped or cannot be started.

    The first start is not repeated: if it fails, the cause is rarely temporary.

    Returns:
        The exit status of the last server.

    Raises:
        StartupError: the first start was refused, or the last of `NUM_STARTS`.
    """
    has_served, num_failed, pause_s = False, 0, 0.0
    while True:
        try:
            status, served_s = serve_once()
        except StartupError as error:
            if not has_served or num_failed + 1 == NUM_STARTS or is_stopped():
                raise
            lines.say("start_failed", f"The server did not start: {error.message}")
            status, served_s = BROKEN, None
        if status != BROKEN or is_stopped():
            return status
        has_served = has_served or served_s is not None
        num_failed = num_failed + 1 if served_s is None else 0
        if not has_served or num_failed == NUM_STARTS:
            return status
        if served_s is not None and served_s >= SERVED_S:
            pause_s = 0.0
        when = f" in {pause_s:.0f} s" if pause_s else ""
        lines.say("restarting", f"Starting the server again{when}.")
        for _ in range(round(pause_s / LOOK_PERIOD_S)):
            sleep(LOOK_PERIOD_S)
            if is_stopped():
                lines.say("stopped", "Stopped.")
                return 0
        pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
