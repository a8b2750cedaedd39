"""What one engine answers, with the model that most servers of these tests have; a collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.config import EngineConfig
from tests.e2e.single_engine import SingleEngine
from tests.otlp_collector import OtlpCollector


@pytest.fixture(scope="module")
def reference(model: Path) -> SingleEngine:
    return SingleEngine(model, EngineConfig(dtype="float32", num_threads=1))


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector
