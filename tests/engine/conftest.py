"""What tests of engines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny model, whose steps take little time: the size of its MLP says nothing here."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "narrow", inner=96)
