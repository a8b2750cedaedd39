"""Verdicts on transfers, and two real probes."""

from __future__ import annotations

import pytest

from disagg.errors import TransferFailed
from disagg.tools.doctor.machine import Machine, here
from disagg.tools.doctor.report import Status, TransferReport, slowest
from disagg.tools.doctor.transfer_probe import Figures
from disagg.tools.doctor.transfers import ProbeProcess, judge, measure_here


def node(
    name: str, host: str, num_gpus: int = 0, gigabits: float = 0, rdma: bool = False
) -> Machine:
    return Machine(name, host, num_gpus, gigabits * 1e9 / 8, "eth0" if gigabits else "", rdma)


def figures(lane: str, gbytes_per_s: float, copy: float | None = None) -> Figures:
    return Figures(1e-4, gbytes_per_s * 1e9, copy and copy * 1e9, lane)


@pytest.mark.parametrize(
    ("source", "reader", "measured", "status", "change"),
    [
        (node("a", "x"), node("b", "x"), figures("cma", 9, copy=12), "ok", ""),
        (node("a", "x"), node("b", "x"), figures("cma", 2, copy=12), "warn", "other load"),
        (node("a", "x"), node("b", "x"), figures("tcp", 2, copy=12), "warn", "SYS_PTRACE"),
        (node("a", "x", 8), node("b", "x", 8), figures("cuda_ipc", 300), "ok", ""),
        (node("a", "x", 8), node("b", "x", 8), figures("tcp", 0.5), "warn", "cuda_ipc"),
        (node("a", "x", 0, 25), node("b", "y", 0, 25), figures("tcp", 2.5), "ok", ""),
        (node("a", "x", 0, 25), node("b", "y", 0, 25), figures("tcp", 0.5), "warn", "load"),
        (
            node("a", "x", 8, 400, rdma=True),
            node("b", "y", 8, 400, rdma=True),
            figures("tcp", 5),
            "warn",
            "/dev/infiniband",
        ),
        (node("a", "x"), node("b", "y"), figures("tcp", 0.5), "ok", ""),
        (node("a", "x"), node("b", "y"), Figures(error="no route"), "wrong", "ports"),
    ],
)
def test_verdicts(
    source: Machine, reader: Machine, measured: Figures, status: Status, change: str
) -> None:
    report = judge(source, reader, measured)
    assert (report.finding.status, report.source, report.reader) == (status, "a", "b")
    assert change in report.finding.change
    assert measured.error in report.finding.found


def test_two_real_probes_move_kv_in_both_directions_by_a_lane_that_has_a_name() -> None:
    reports = measure_here(here("here"))
    assert [(each.source, each.reader) for each in reports] == [
        ("here (a)", "here (b)"),
        ("here (b)", "here (a)"),
    ]
    for each in reports:
        assert each.finding.status != "wrong" and each.lane == "cma", each
        assert each.latency_s and each.bytes_per_s and each.limit_bytes_per_s
        assert each.ucx.endswith("cma, ib")


def test_a_probe_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    probe = ProbeProcess("probe", -1)
    with pytest.raises(TransferFailed, match="NIXL could not be started"):
        probe.peer()
    probe.close()


def test_a_probe_that_died_is_an_answer_too() -> None:
    one, other = ProbeProcess("one", -1), ProbeProcess("other", -1)
    peer = one.peer()
    other.peer()
    other._process.kill()
    assert (
        "ended with status -9" in other.measure(peer).error or "pipe" in other.measure(peer).error
    )
    for probe in (one, other):
        probe.close()


def test_the_slowest_transfer_between_nodes_is_what_to_believe() -> None:
    def report(speed: float, between: bool) -> TransferReport:
        return judge(node("a", "x"), node("b", "y"), figures("tcp", speed), between)

    within, fast, slow = report(0.1, False), report(3.0, True), report(2.0, True)
    prior = slowest((within, fast, slow))
    assert prior is not None and prior.bytes_per_s == 2e9
    only = slowest((within,))
    assert only is not None and only.bytes_per_s == 1e8
    broken = judge(node("a", "x"), node("b", "y"), Figures(error="no"), True)
    assert slowest((broken,)) is None
