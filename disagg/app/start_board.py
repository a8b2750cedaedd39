"""Progress of starting workers, for the command line.

Serve reports nothing about a replica until its constructor has returned. So the command creates a
board, a named actor that ends with the command. A starting worker on any node looks for it once and
writes its progress there without waiting. Workers also start without a board.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from disagg.messages import StartPhase, StartsByPool, StartStep

_NAME, _NAMESPACE = "start-board", "disagg"
_READ_TIMEOUT_S = 1.0


class _Steps:
    """The actor that stores the steps."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[str, dict[StartPhase, StartStep]]] = {}

    def put(self, pool: str, worker: str, step: StartStep) -> None:
        self._pools.setdefault(pool, {}).setdefault(worker, {})[step.phase] = step

    def read(self) -> StartsByPool:
        return self._pools


class Board:
    """Creates the board actor. If another start has created it already, both share it."""

    def __init__(self) -> None:
        actor = ray.remote(num_cpus=0)(_Steps)
        self._steps = actor.options(name=_NAME, namespace=_NAMESPACE, get_if_exists=True).remote()
        self._last: StartsByPool = {}

    def read(self) -> StartsByPool:
        """The progress of the workers; the last known one while the board does not answer."""
        with contextlib.suppress(RayError):
            self._last = ray.get(self._steps.read.remote(), timeout=_READ_TIMEOUT_S)
        return self._last

    def close(self) -> None:
        """Remove the board."""
        ray.kill(self._steps)


def reporter(pool: str, worker: str) -> Callable[[StartStep], None]:
    """A function with which a starting worker reports, from any thread, without waiting."""
    try:
        steps = ray.get_actor(_NAME, _NAMESPACE)
    except (ValueError, RayError):  # no command reads the board
        return lambda step: None

    def tell(step: StartStep) -> None:
        with contextlib.suppress(RayError):
            steps.put.remote(pool, worker, step)

    return tell
