from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cli.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One server for tests that leave it running; each uses a layout of its own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), max_memory_nbytes=64 << 20) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that a test may freeze, kill and start again at the same address, and whose settings
    and values it may change."""
    with EmbeddedRedis(tmp_path, rules="~* +@all") as server:
        yield server
