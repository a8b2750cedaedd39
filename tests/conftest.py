"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No time limit for an example: machines are shared and tests must not measure them. In CI the
# examples are the same each time, so that a red run is always the change's; elsewhere they explore.
settings.register_profile("disagg", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("disagg")


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Imports leave 200,000 objects, which stay. Looking at all of them for garbage again and again
    took a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _new_blocks_are_nan() -> Iterator[None]:
    """KV that is read and was never written shows as NaN in every test with a real model."""
    if "disagg.engine.device.runner" not in sys.modules:  # collected: nobody here runs a model
        yield
        return
    from tests.poison import poison_new_blocks

    with pytest.MonkeyPatch.context() as monkeypatch:
        poison_new_blocks(monkeypatch)
        yield
