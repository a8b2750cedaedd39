"""A NIXL wire that breaks when it is told to: the n-th post, look or notification, or all of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

from disagg.errors import TransferFailed
from disagg.kvtransfer import nixl_transport

KINDS = ("post", "progress", "notify")


class WireFaults:
    """What goes wrong next on a wire, and what has. Written by one thread, read by another.

    to_fail: for each kind, how many calls from now on fail.
    hangs: no transfer ends.
    """

    def __init__(self) -> None:
        self.to_fail = dict.fromkeys(KINDS, 0)
        self.hangs = False
        self.happened: Counter[str] = Counter()

    def meet(self, kind: str) -> None:
        """Raises `TransferFailed` if this call is to fail."""
        if self.to_fail[kind] > 0:
            self.to_fail[kind] -= 1
            self.happened[kind] += 1
            raise TransferFailed(f"a fault was put on this {kind}")


class FakeBrokenWire(nixl_transport._NixlWire):
    """The real wire with faults in front of it."""

    faults = WireFaults()  # of the process, which has one worker

    def post(self, transfer: Any) -> None:
        self.faults.meet("post")
        super().post(transfer)

    def is_done(self, transfer: Any) -> bool:
        self.faults.meet("progress")
        if self.faults.hangs:
            self.faults.happened["hang"] += 1
            return False
        return super().is_done(transfer)

    def notify(self, name: str, message: bytes) -> None:
        self.faults.meet("notify")
        super().notify(name, message)


@contextlib.contextmanager
def broken_wires() -> Iterator[None]:
    """Transports that are made meanwhile get a `FakeBrokenWire`."""
    with mock.patch.object(nixl_transport, "_NixlWire", FakeBrokenWire):
        yield
