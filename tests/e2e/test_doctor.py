"""`disagg doctor --ray-address` on a cluster of three nodes of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from ray.cluster_utils import Cluster

from disagg.cli.main import main
from disagg.doctor.findings import DoctorReport

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    directory = Path("/tmp") / f"disagg-doctor-{os.getpid()}"
    (directory / "ray").mkdir(parents=True)
    monkeypatch.setenv("RAY_TMPDIR", str(directory))
    cluster = Cluster()
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, include_log_monitor=False)
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def test_every_node_and_every_pair(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--ray-address", address, "--json"])
    report = msgspec.json.decode(capsys.readouterr().out, type=DoctorReport)
    assert status == 0, [each for each in report.findings() if each.status == "wrong"]
    assert len({node.name for node in report.nodes}) == 3
    for node in report.nodes:
        assert {"open files", "clock", "software"} <= {each.check for each in node.findings}
    between = [each for each in report.transfers if each.is_between_nodes]
    assert len({(each.source, each.reader) for each in between}) == 6
    assert len(report.transfers) == 6 + 2 * 3
    assert all(each.lane and each.bytes_per_s for each in report.transfers)


def test_no_cluster_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ray-address", "127.0.0.1:1"]) == 2
    assert "No Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err
