"""When a report is due, what it leaves out, and that the ingress gets all of it back."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from disagg.links.reports import LinkReports, restored
from disagg.messages import HoldCounts, HostCounts, KVEvent, TransferFigure, WorkerStatus

IDLE, BUSY = WorkerStatus(), WorkerStatus(num_running=1)
DRAINING = WorkerStatus(accepting=False)
FIGURES = tuple(TransferFigure(f"w{n}", 1e-3, 1e9) for n in range(3))


def synced(interval_s: float) -> LinkReports:
    reports = LinkReports()
    reports.restart(IDLE, now=10.0)
    reports.interval_s = interval_s
    return reports


def test_a_report_waits_for_its_turn() -> None:
    reports = synced(0.5)
    assert reports.wait_s(IDLE, 10.1) is None
    assert reports.wait_s(BUSY, 10.25) == 0.25
    assert reports.wait_s(BUSY, 10.75) == 0.0
    reports.take(BUSY, 10.75)
    assert reports.wait_s(IDLE, 11.0) == 0.25
    assert synced(0.0).wait_s(BUSY, 10.0) == 0.0


def test_a_worker_that_stops_taking_requests_says_so_at_once() -> None:
    assert synced(0.5).wait_s(DRAINING, 10.1) == 0.0


def test_two_reports_after_a_request_go_at_once() -> None:
    """Until then the router counts the request itself, and would count it twice."""
    reports = synced(0.5)
    reports.request_arrived()
    for number in (1, 2):
        status = WorkerStatus(num_running=number)
        assert reports.wait_s(status, 10.1) == 0.0
        reports.take(status, 10.1)
    assert reports.wait_s(WorkerStatus(num_running=3), 10.1) == 0.5


def test_the_two_reports_after_a_request_have_a_status_even_if_it_is_the_same() -> None:
    """The router counts those with a status."""
    reports = synced(0.5)
    reports.request_arrived()
    assert [reports.take(IDLE, 10.1).status for _ in range(3)] == [IDLE, IDLE, None]


def test_events_wait_for_the_rest_of_a_snapshot() -> None:
    reports = synced(0.0)
    event = KVEvent("removed", (b"a" * 16,))
    reports.is_holding = True
    reports.hold([event])
    assert reports.wait_s(IDLE, 11.0) is None
    assert reports.take(BUSY, 11.0).kv_events == ()
    reports.is_holding = False
    assert reports.wait_s(BUSY, 11.0) == 0.0
    assert reports.take(BUSY, 11.0) == ((event,), None, 0)


def test_what_has_not_changed_is_left_out() -> None:
    reports = synced(0.0)
    first = WorkerStatus(num_running=1, transfers=FIGURES, holds=HoldCounts(1))
    assert reports.take(first, 10.0).status == first
    second = msgspec.structs.replace(first, num_running=2)
    report = reports.take(second, 10.0)
    assert report.status is not None and report.status.transfers == ()
    assert restored(report.status, report.kept, first) == second
    assert reports.take(second, 11.0, is_whole=True).status == second


statuses = st.builds(
    WorkerStatus,
    num_running=st.integers(0, 2),
    accepting=st.booleans(),
    transfers=st.sampled_from([(), FIGURES[:1], FIGURES]),
    holds=st.sampled_from([None, HoldCounts(), HoldCounts(3)]),
    host=st.sampled_from([None, HostCounts(), HostCounts(nbytes=5)]),
)


@given(st.lists(st.tuples(statuses, st.booleans()), max_size=20))
def test_an_ingress_knows_every_reported_status(told: list[tuple[WorkerStatus, bool]]) -> None:
    reports, known = synced(0.0), IDLE
    for status, is_whole in told:
        report = reports.take(status, 10.0, is_whole)
        if report.status is not None:
            known = restored(report.status, report.kept, known)
        assert known == status
