"""What servers of these tests have: a directory, a model, what one engine answers, a collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.config import EngineConfig
from tests.e2e.single_engine import SingleEngine
from tests.otlp_collector import OtlpCollector


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("directory")


@pytest.fixture(scope="session")
def reference(model: Path) -> SingleEngine:
    return SingleEngine(model, EngineConfig(dtype="float32", num_threads=1))


@pytest.fixture(scope="session")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector
