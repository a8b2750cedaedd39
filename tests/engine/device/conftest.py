from __future__ import annotations

from pathlib import Path

import pytest

from disagg.engine.device.build import build_engine
from disagg.engine.engine import Engine
from disagg.models.description import describe_model
from tests.engine.device.tiny_engine import CONFIG


@pytest.fixture(scope="session")
def engine(directory: Path) -> Engine:
    """For tests that leave it without requests."""
    return build_engine(CONFIG, describe_model(directory))[0]
