"""Progress of starting workers, for the command line.

Serve reports nothing about a replica until its constructor has returned. So the command opens a
board in Ray's GCS. A starting worker on any node looks for it once, and writes its progress there.
Workers also start without a board.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
from ray.exceptions import RayError

from disagg.app import private_ray
from disagg.messages import StartPhase, StartsByPool, StartStep

_OPEN, _WORKERS = "start/open", "start/workers/"  # keys
_steps = msgspec.json.Decoder(list[StartStep])


class Board:
    """Opens the board, and empties it. Two starts on one cluster share it."""

    def __init__(self) -> None:
        private_ray.remove_shared(_WORKERS)
        private_ray.put_shared(_OPEN, b"")
        self._last: StartsByPool = {}

    def read(self) -> StartsByPool:
        """The progress of the workers; the last known one while the GCS does not answer."""
        pools: dict[str, dict[str, dict[StartPhase, StartStep]]] = {}
        with contextlib.suppress(RayError):
            for key, value in private_ray.get_all_shared(_WORKERS).items():
                pool, _, worker = key.removeprefix(_WORKERS).rpartition("/")
                reached = {step.phase: step for step in _steps.decode(value)}
                pools.setdefault(pool, {})[worker] = reached
            self._last = pools
        return self._last

    def close(self) -> None:
        """Remove the board."""
        with contextlib.suppress(RayError):
            private_ray.remove_shared(_OPEN)
            private_ray.remove_shared(_WORKERS)


def reporter(pool: str, worker: str) -> Callable[[StartStep], None]:
    """A function with which a starting worker reports, from any thread."""
    reached: dict[StartPhase, StartStep] = {}
    is_open = False  # whether a command reads the board
    with contextlib.suppress(RayError):
        is_open = private_ray.get_shared(_OPEN) is not None

    def tell(step: StartStep) -> None:
        reached[step.phase] = step
        if is_open:
            with contextlib.suppress(RayError):
                value = msgspec.json.encode(list(reached.values()))
                private_ray.put_shared(f"{_WORKERS}{pool}/{worker}", value)

    return tell
