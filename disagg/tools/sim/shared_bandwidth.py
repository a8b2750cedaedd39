"""Bandwidth that concurrent transfers share, like READs through network cards.

A card sends and receives at the same time, each at its own rate, so it is two ports. All transfers
through a port run at the same time, each at no more than an even share of it, because a card serves
its connections in turn. A transfer is as fast as the fuller of its ports lets it be; what it leaves
of the other one stays unused. So no port exceeds its rate.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable


class Port:
    """One direction of a network card: its current transfers, and its bytes per second."""

    __slots__ = ("bytes_per_s", "transfers")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.transfers: dict[Transfer, None] = {}  # in the order in which they began


class Transfer:
    """A transfer of `nbytes` through all of `ports`, which begins now.

    Args:
        ports: one or more ports.
        ended: called when all bytes have arrived.

    Attributes:
        bytes_per_s: its current rate.
    """

    __slots__ = ("_ended", "_left", "_loop", "_since_s", "_timer", "bytes_per_s", "ports")

    def __init__(
        self,
        loop: AbstractEventLoop,
        nbytes: int,
        ports: tuple[Port, ...],
        ended: Callable[[], None],
    ) -> None:
        self.ports = ports
        self.bytes_per_s = 0.0
        self._loop = loop
        self._ended = ended
        self._left = float(nbytes)
        self._since_s = loop.time()  # when `_left` was updated
        self._timer: TimerHandle | None = None
        for port in ports:
            port.transfers[self] = None
        _share(ports)

    def cancel(self) -> None:
        """Stop the transfer without calling `ended`."""
        if self._timer is not None:
            self._timer.cancel()
        for port in self.ports:
            del port.transfers[self]
        _share(self.ports)

    def go_on(self, bytes_per_s: float) -> None:
        """Continue at this rate from now on."""
        if bytes_per_s == self.bytes_per_s:
            return
        now = self._loop.time()
        self._left = max(0.0, self._left - self.bytes_per_s * (now - self._since_s))
        self._since_s, self.bytes_per_s = now, bytes_per_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(now + self._left / bytes_per_s, self._end)

    def _end(self) -> None:
        self._timer = None
        self.cancel()
        self._ended()


def _share(ports: Iterable[Port]) -> None:
    """Set the rates of all transfers through `ports`, of which one has begun or ended."""
    for transfer in dict.fromkeys(each for port in ports for each in port.transfers):
        transfer.go_on(min(port.bytes_per_s / len(port.transfers) for port in transfer.ports))
