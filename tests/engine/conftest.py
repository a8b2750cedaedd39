"""What tests of engines share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def directory(model: Path) -> Path:
    return model
