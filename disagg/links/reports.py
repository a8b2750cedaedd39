"""What the frames of a link say of a worker's cache and load: not too often, and what changed.

An ingress with many workers asks them to report less often than every step (`Frequency`). Tokens
never wait for a report. These reports go at once: the first two after a request has arrived, since
the router counts the request itself until then, and a change of whether the worker takes requests.

Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from disagg.blocks import BlockHash
from disagg.messages import KVEvent, WorkerStatus

PART_NAMES = 4096  # of a snapshot, in one frame: an ingress takes in as many in 2 ms
NUM_AT_ONCE = 2  # reports after a request has arrived, as `router.fleet` counts them
# Parts of a status that are long and rarely change, and what they are with nothing to say. The
# bits of `StepFrame.kept` are in this order.
RARE = (("transfers", ()), ("pulls", ()), ("store", None), ("host", None), ("holds", None))


class Report(NamedTuple):
    """The last fields of a `StepFrame`."""

    kv_events: tuple[KVEvent, ...] = ()
    status: WorkerStatus | None = None
    kept: int = 0


class LinkReports:
    """The reports of one link.

    Attributes:
        interval_s: between two reports, at least; 0: each step may report.
        is_holding: KV events wait, although a report may be due: parts of a snapshot come first.
    """

    def __init__(self) -> None:
        self.interval_s = 0.0
        self.is_holding = False
        self._held: list[KVEvent] = []
        self._status: WorkerStatus | None = None  # as the ingress knows it
        self._sent_s = 0.0
        self._num_at_once = 0

    def request_arrived(self) -> None:
        self._num_at_once = NUM_AT_ONCE

    def hold(self, kv_events: Iterable[KVEvent]) -> None:
        """Keep events for the next report."""
        self._held += kv_events

    def restart(self, status: WorkerStatus, now: float) -> None:
        """A snapshot says the load, and all that was cached until now."""
        self._held.clear()
        self._status, self._sent_s = status, now

    def wait_s(self, status: WorkerStatus, now: float) -> float | None:
        """How long the next report has to wait; None: there is nothing to report."""
        last = self._status
        if status == last and (self.is_holding or not self._held):
            return None
        if last is None or self._num_at_once or status.accepting != last.accepting:
            return 0.0
        return max(0.0, self._sent_s + self.interval_s - now)

    def take(self, status: WorkerStatus, now: float, is_whole: bool = False) -> Report:
        """The report of `status`, which must be sent now. `is_whole`: also what has not changed."""
        events: tuple[KVEvent, ...] = ()
        if not self.is_holding:
            events = tuple(self._held)
            self._held.clear()
        last, self._status, self._sent_s = self._status, status, now
        is_counted = self._num_at_once > 0  # by the router, which counts statuses
        self._num_at_once -= is_counted
        if is_whole:
            return Report(events, status)
        if status == last and not is_counted:
            return Report(events)
        kept = _kept(status, last)
        if kept:
            left_out = {name: empty for i, (name, empty) in enumerate(RARE) if kept >> i & 1}
            status = msgspec.structs.replace(status, **left_out)
        return Report(events, status, kept)


def _kept(status: WorkerStatus, last: WorkerStatus | None) -> int:
    """A bit for each rare part that is as in the last report, and has something to say."""
    kept = 0
    if last is not None:
        for place, (name, empty) in enumerate(RARE):
            part = getattr(status, name)
            if part != empty and part == getattr(last, name):
                kept |= 1 << place
    return kept


def restored(status: WorkerStatus, kept: int, last: WorkerStatus) -> WorkerStatus:
    """A status as it was before `LinkReports` left out what is as in `last`."""
    if not kept:
        return status
    parts = {name: getattr(last, name) for i, (name, _) in enumerate(RARE) if kept >> i & 1}
    return msgspec.structs.replace(status, **parts)


def parts_of(
    block_hashes: Sequence[BlockHash], host_block_hashes: Sequence[BlockHash]
) -> Iterator[KVEvent]:
    """A snapshot after its first `PART_NAMES` names, as events of so many each."""
    for begin in range(PART_NAMES, len(block_hashes), PART_NAMES):
        yield KVEvent("stored", tuple(block_hashes[begin : begin + PART_NAMES]))
    for begin in range(0, len(host_block_hashes), PART_NAMES):
        yield KVEvent("stored", tuple(host_block_hashes[begin : begin + PART_NAMES]), "host")
