"""Any workload gives the tokens of an engine without limits, and every block is accounted for."""

from __future__ import annotations

from hypothesis import given, settings

from tests.engine.workload import Driver, Workload, workloads


@settings(max_examples=200, deadline=None)
@given(workloads())
def test_random_workloads(workload: Workload) -> None:
    Driver(workload).play()
