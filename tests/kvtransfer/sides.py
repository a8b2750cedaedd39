"""Opens transports of both kinds for tests, and waits for what they report."""

from __future__ import annotations

import time
from typing import TypeAlias

from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.nixl_transport import NixlTransport
from disagg.kvtransfer.transport import PullDone, TicketReleased, Transport
from tests.kvtransfer.memory import Memory
from tests.waiting import wait_until

Event: TypeAlias = PullDone | TicketReleased


class Sides:
    """Opens sides that can reach each other; closes them all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._fleet = LocalFleet()
        self._open: list[Transport] = []

    def open(self, memory: Memory) -> Transport:
        opened: Transport
        slab, stamps, clock = memory.slab, memory.stamps, time.monotonic
        if self.kind == "local":
            opened = LocalTransport(self._fleet, slab, stamps, clock=clock)
        else:
            opened = NixlTransport(slab, stamps, clock=clock, settle_s=0.05, interface="lo")
        self._open.append(opened)
        return opened

    def close(self, side: Transport) -> None:
        self._open.remove(side)
        side.close()

    def close_all(self) -> None:
        while self._open:
            self._open.pop().close()


def next_events(side: Transport, num: int = 1) -> list[Event]:
    """The next `num` events of a side, or a few more if they come together."""
    events: list[Event] = []

    def polled() -> bool:
        events.extend(side.poll())
        return len(events) >= num

    wait_until(polled)
    return events


def finish(side: Transport) -> PullDone:
    """The one pull under way, ended."""
    (done,) = next_events(side)
    assert isinstance(done, PullDone)
    return done
