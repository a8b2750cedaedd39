"""The model that most servers of these tests have, and what one engine answers with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import EngineConfig
from tests.e2e.single_engine import SingleEngine


@pytest.fixture(scope="module")
def reference(model: Path) -> SingleEngine:
    return SingleEngine(model, EngineConfig(dtype="float32", num_threads=1))
