"""Bandwidth that concurrent transfers share, like READs through network cards.

A card sends and receives at the same time, each at its own rate, so it is two ports. All transfers
through a port run at the same time and share it evenly, because a card serves its connections in
turn. A transfer that is slowed by its other port leaves bandwidth to the others (max-min fairness
by progressive filling: Bertsekas and Gallager, Data Networks, 6.5.2). So no port exceeds its rate,
and each transfer is limited by a port that is full.

If a transfer begins or ends, only the rates of transfers change that share a port with it, directly
or through others.
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
    """Set the rates of all transfers that share `ports`, directly or through others."""
    for transfer, bytes_per_s in fair_rates(_connected(ports)).items():
        transfer.go_on(bytes_per_s)


def fair_rates(ports: Iterable[Port]) -> dict[Transfer, float]:
    """Max-min fair rates, in bytes a second, of the transfers through `ports`.

    Args:
        ports: all ports of these transfers.
    """
    rates: dict[Transfer, float] = {}
    free = {port: (port.bytes_per_s, len(port.transfers)) for port in ports if port.transfers}
    while free:
        fullest = min(free, key=lambda port: free[port][0] / free[port][1])
        left, number = free[fullest]
        share = left / number
        for transfer in fullest.transfers:
            if transfer in rates:
                continue
            rates[transfer] = share
            for port in transfer.ports:
                left, number = free.pop(port)
                if number > 1:
                    free[port] = max(0.0, left - share), number - 1
    return rates


def _connected(ports: Iterable[Port]) -> list[Port]:
    """`ports` and all ports that are connected with them through transfers."""
    found = dict.fromkeys(ports)
    waiting = list(found)
    for port in waiting:  # the list grows in the loop
        for transfer in port.transfers:
            for each in transfer.ports:
                if each not in found:
                    found[each] = None
                    waiting.append(each)
    return waiting
