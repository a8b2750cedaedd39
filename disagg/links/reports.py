"""What the frames of a link report of a worker's cache and load: only changes, at a limited rate.

An ingress with many workers asks them to report less often than every step (`Frequency`). Tokens
never wait for a report. These reports go at once: the first two after a request has arrived, since
the router counts the request itself until then; a change of whether the worker takes requests; and,
once per interval, that requests of other ingresses have arrived. That one is made before the step
that computes them: until an ingress knows of them, it sends its own requests to the same worker.

Knows no frames and no sockets.
"""

from __future__ import annotations

import math
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from disagg.blocks import BlockHash
from disagg.messages import KVEvent, WorkerStatus

PART_NUM_BLOCKS = 4096  # of a snapshot, in one frame (costs: docs/notebook/routing.md)
NUM_AT_ONCE = 2  # reports after a request has arrived, as `router.fleet` counts them
# Parts of a status that are long and rarely change, and what they are with nothing to say. The
# bits of `StepFrame.kept` are in this order.
RARE = (
    ("transfers", ()),
    ("pulls", ()),
    ("store", None),
    ("host", None),
    ("holds", None),
    ("home_ingress", ""),
    ("adapters", None),
)


class Report(NamedTuple):
    """The last fields of a `StepFrame`."""

    kv_events: tuple[KVEvent, ...] = ()
    status: WorkerStatus | None = None
    kept: int = 0


class LinkReports:
    """The reports of one link, from a snapshot on.

    Args:
        send: sends a report that has waited, if no step's frame came in time to bring it.

    Attributes:
        interval_s: between two reports, at least; 0: each step may report.
        is_holding: KV events wait, although a report may be due: parts of a snapshot come first.
        status: as the ingress knows it; None: it does not, and waits for a snapshot.
    """

    def __init__(self, loop: AbstractEventLoop, send: Callable[[Report], None]) -> None:
        self.interval_s = 0.0
        self.is_holding = False
        self.status: WorkerStatus | None = None
        self._loop = loop
        self._send = send
        self._held: list[KVEvent] = []
        self._latest = WorkerStatus()  # of the last step
        self._sent_s = 0.0
        self._told_arrivals_s = -math.inf
        self._num_at_once = 0
        self._timer: TimerHandle | None = None

    def restart(self, status: WorkerStatus) -> None:
        """A snapshot says the load, and all that was cached until now."""
        self.stop()
        self.status = self._latest = status
        self._sent_s = self._loop.time()

    def stop(self) -> None:
        """Report nothing until the next snapshot."""
        self.status = None
        self._held.clear()
        self._stop_timer()

    def request_arrived(self) -> None:
        """The next steps report at once, and bring what waits. If that were sent by itself, the
        router would take it for the report of the step in which the request arrived."""
        self._num_at_once = NUM_AT_ONCE
        self._stop_timer()

    def after_step(self, kv_events: Iterable[KVEvent], status: WorkerStatus) -> Report | None:
        """What the frame of a step has to report; None: nothing, or nothing yet."""
        if self.status is None:
            return None
        self._held += kv_events
        self._latest = status
        return self.due()

    def others_arrived(self, status: WorkerStatus) -> Report | None:
        """What there is to report now that requests have arrived, before a step computes them.

        There is nothing until the step ends in which a request of this ingress arrived: the router
        counts that request itself, and would take this report for the report of that step.
        Afterwards this report counts as the second one, which includes the request, because an idle
        worker has no further step to report.
        """
        last, now = self.status, self._loop.time()
        if last is None or self._num_at_once == NUM_AT_ONCE:
            return None
        self._latest = status
        if status == last or self._num_at_once or now < self._told_arrivals_s + self.interval_s:
            return self.due()
        self._told_arrivals_s = self._sent_s = now
        self.status = status
        return self._report(last, is_same=False)

    def due(self) -> Report | None:
        """What has to be reported now; None: nothing, or nothing yet."""
        last, now = self.status, self._loop.time()
        has_events = self._held and not self.is_holding
        if last is None:
            return None
        is_same = self._latest == last
        if is_same and not has_events:
            return None
        if not self._num_at_once and self._latest.accepting == last.accepting:
            wait_s = self._sent_s + self.interval_s - now
            if wait_s > 0.0:
                self._timer = self._timer or self._loop.call_later(wait_s, self._send_due)
                return None
        self.status, self._sent_s = self._latest, now
        return self._report(last, is_same)

    def release(self) -> Report | None:
        """The events that waited for the parts of a snapshot. The load is left out, because no step
        produced these events: the router would take it for the report of the step in which a
        request arrived."""
        self.is_holding = False
        events = tuple(self._held)
        self._held.clear()
        return Report(events) if events else None

    def _send_due(self) -> None:
        self._timer = None
        report = self.due()
        if report is not None:
            self._send(report)

    def _report(self, last: WorkerStatus, is_same: bool) -> Report:
        """The latest status and the events, without what is as in the `last` report.

        Args:
            is_same: the latest status is the last one.
        """
        events: tuple[KVEvent, ...] = ()
        if not self.is_holding:
            events = tuple(self._held)
            self._held.clear()
        status = self._latest
        if self._num_at_once:
            self._num_at_once -= 1  # the router counts reports that have a status
        elif is_same:
            return Report(events)
        kept = _kept(status, last)
        if kept:
            left_out = {name: empty for i, (name, empty) in enumerate(RARE) if kept >> i & 1}
            status = msgspec.structs.replace(status, **left_out)
        return Report(events, status, kept)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _kept(status: WorkerStatus, last: WorkerStatus) -> int:
    """A bit for each rare part that is as in the last report, and has something to say."""
    kept = 0
    for place, (name, empty) in enumerate(RARE):
        part = getattr(status, name)
        if part != empty and part == getattr(last, name):
            kept |= 1 << place
    return kept


def restore(status: WorkerStatus, kept: int, last: WorkerStatus) -> WorkerStatus:
    """A status as it was before `LinkReports` left out what is as in `last`."""
    if not kept:
        return status
    parts = {name: getattr(last, name) for i, (name, _) in enumerate(RARE) if kept >> i & 1}
    return msgspec.structs.replace(status, **parts)


def split_snapshot(
    block_hashes: Sequence[BlockHash], host_block_hashes: Sequence[BlockHash]
) -> Iterator[KVEvent]:
    """A snapshot after its first `PART_NUM_BLOCKS` names, as events of so many each."""
    for begin in range(PART_NUM_BLOCKS, len(block_hashes), PART_NUM_BLOCKS):
        yield KVEvent("stored", tuple(block_hashes[begin : begin + PART_NUM_BLOCKS]))
    for begin in range(0, len(host_block_hashes), PART_NUM_BLOCKS):
        yield KVEvent("stored", tuple(host_block_hashes[begin : begin + PART_NUM_BLOCKS]), "host")
