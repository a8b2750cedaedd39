"""When a report is due, what it leaves out, and that the ingress gets all of it back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.links.reports import LinkReports, Report, restore
from disagg.messages import HoldCounts, HostCounts, KVEvent, TransferFigure, WorkerStatus
from disagg.tools.sim.virtual_time import VirtualLoop

IDLE, BUSY = WorkerStatus(), WorkerStatus(num_running=1)
DRAINING = WorkerStatus(accepting=False)
FIGURES = tuple(TransferFigure(f"w{n}", 1e-3, 1e9) for n in range(3))
EVENT = KVEvent("removed", (b"a" * 16,))


class Link:
    """The reports of a link after a snapshot, in virtual time."""

    def __init__(self, loop: VirtualLoop, interval_s: float) -> None:
        self.loop = loop
        self.sent: list[Report] = []  # beside those of steps
        self.reports = LinkReports(self.loop, self.sent.append)
        self.reports.interval_s = interval_s
        self.reports.restart(IDLE)

    def step(self, status: WorkerStatus, *events: KVEvent) -> Report | None:
        return self.reports.after_step(events, status)

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as loop:
        yield loop


def test_a_report_waits_for_its_turn(loop: VirtualLoop) -> None:
    link = Link(loop, 0.5)
    assert link.step(IDLE) is None
    assert link.step(WorkerStatus(num_running=9)) is None
    assert link.step(BUSY) is None
    link.wait(0.25)
    assert link.sent == []
    link.wait(0.5)
    assert link.sent == [Report((), BUSY)]
    assert link.step(IDLE) is None
    link.wait(1.0)
    assert link.sent[1:] == [Report((), IDLE)]
    assert link.step(BUSY) == Report((), BUSY)


def test_without_an_interval_each_step_reports(loop: VirtualLoop) -> None:
    link = Link(loop, 0.0)
    assert [link.step(each) for each in (BUSY, IDLE)] == [Report((), BUSY), Report((), IDLE)]


def test_a_worker_that_stops_taking_requests_says_so_at_once(loop: VirtualLoop) -> None:
    assert Link(loop, 0.5).step(DRAINING) == Report((), DRAINING)


def test_two_reports_after_a_request_go_at_once(loop: VirtualLoop) -> None:
    """Until then the router counts the request itself, and would count it twice."""
    link = Link(loop, 0.5)
    link.reports.request_arrived()
    for number in (1, 2):
        status = WorkerStatus(num_running=number)
        assert link.step(status) == Report((), status)
    assert link.step(WorkerStatus(num_running=3)) is None


def test_a_report_that_waits_is_none_of_the_two_after_a_request(loop: VirtualLoop) -> None:
    """Else the router would take the first step's report for the one that includes the request."""
    link = Link(loop, 0.5)
    assert link.step(BUSY, EVENT) is None
    link.reports.request_arrived()
    link.wait(1.0)
    assert link.sent == []
    assert link.step(BUSY) == Report((EVENT,), BUSY)
    assert link.step(IDLE) == Report((), IDLE)


def test_what_waits_is_due_although_no_step_follows_a_request(loop: VirtualLoop) -> None:
    """As when the request is cancelled before its first step."""
    link = Link(loop, 0.5)
    assert link.step(BUSY, EVENT) is None
    link.reports.request_arrived()
    assert link.reports.due() == Report((EVENT,), BUSY)
    assert link.reports.due() is None


def test_the_two_reports_after_a_request_have_a_status_even_if_it_is_the_same(
    loop: VirtualLoop,
) -> None:
    """The router counts those with a status."""
    link = Link(loop, 0.0)
    link.reports.request_arrived()
    reports = [link.step(IDLE, EVENT) for _ in range(3)]
    assert reports == [Report((EVENT,), IDLE), Report((EVENT,), IDLE), Report((EVENT,), None)]


def test_requests_of_others_are_reported_at_once_but_only_once_an_interval(
    loop: VirtualLoop,
) -> None:
    link = Link(loop, 0.5)
    waiting = [WorkerStatus(num_waiting=number) for number in range(4)]
    assert link.reports.others_arrived(waiting[1]) == Report((), waiting[1])
    assert link.reports.others_arrived(waiting[2]) is None
    link.wait(0.75)
    assert link.sent == [Report((), waiting[2])]
    assert link.reports.others_arrived(waiting[3]) == Report((), waiting[3])


def test_who_has_sent_a_request_hears_first_of_the_step_in_which_it_arrived(
    loop: VirtualLoop,
) -> None:
    """Else it would take the arrival of another for the report of that step."""
    link = Link(loop, 0.5)
    link.reports.request_arrived()
    assert link.reports.others_arrived(WorkerStatus(num_waiting=1)) is None
    assert link.step(IDLE, EVENT) == Report((EVENT,), IDLE)
    assert link.reports.others_arrived(BUSY) == Report((), BUSY), "a prompt of one step is over"
    assert link.reports.others_arrived(BUSY) is None, "nothing has changed"
    assert link.step(IDLE) is None, "two reports have been sent"


def test_events_wait_for_the_rest_of_a_snapshot(loop: VirtualLoop) -> None:
    link = Link(loop, 0.0)
    link.reports.is_holding = True
    assert link.step(IDLE, EVENT) is None
    assert link.step(BUSY) == Report((), BUSY)
    assert link.reports.release() == Report((EVENT,), None)
    assert link.reports.release() is None


def test_what_waited_for_a_snapshot_is_no_report_of_a_request(loop: VirtualLoop) -> None:
    """The next two steps after a request report, however much came before them."""
    link = Link(loop, 0.5)
    link.reports.is_holding = True
    assert link.step(IDLE, EVENT) is None
    link.reports.request_arrived()
    assert link.reports.release() == Report((EVENT,), None)
    assert link.step(BUSY) == Report((), BUSY)
    assert link.step(IDLE) == Report((), IDLE)


def test_nothing_is_reported_before_a_snapshot(loop: VirtualLoop) -> None:
    link = Link(loop, 0.5)
    assert link.step(BUSY, EVENT) is None
    link.reports.stop()
    assert link.step(DRAINING, EVENT) is None
    link.wait(1.0)
    assert link.sent == []
    link.reports.restart(BUSY)
    link.wait(1.0)
    assert link.step(IDLE) == Report((), IDLE)


def test_what_has_not_changed_is_left_out(loop: VirtualLoop) -> None:
    link = Link(loop, 0.0)
    first = WorkerStatus(num_running=1, transfers=FIGURES, holds=HoldCounts(1))
    assert link.step(first) == Report((), first)
    second = msgspec.structs.replace(first, num_running=2)
    report = link.step(second)
    assert report is not None and report.status is not None and report.status.transfers == ()
    assert restore(report.status, report.kept, first) == second


statuses = st.builds(
    WorkerStatus,
    num_running=st.integers(0, 2),
    accepting=st.booleans(),
    transfers=st.sampled_from([(), FIGURES[:1], FIGURES]),
    holds=st.sampled_from([None, HoldCounts(), HoldCounts(3)]),
    host=st.sampled_from([None, HostCounts(), HostCounts(nbytes=5)]),
)


@given(st.lists(statuses, max_size=20))
def test_an_ingress_knows_every_reported_status(told: list[WorkerStatus]) -> None:
    with closing(VirtualLoop()) as loop:
        link, known = Link(loop, 0.0), IDLE
        for status in told:
            report = link.step(status)
            if report is not None and report.status is not None:
                known = restore(report.status, report.kept, known)
            assert known == status == link.reports.status
