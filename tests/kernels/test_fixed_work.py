"""Work of a fixed shape has the pieces of a plain step, and zeros for the rows that are idle."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import run_interpreted


@pytest.mark.timeout(600)
def test_the_device_cuts_as_the_host_does() -> None:
    run_interpreted("tests/kernels/interpreted_fixed_work.py")
