"""An index that is too small for the fleet is named before it forgets what is cached."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from disagg.ingress.core import IndexRoom
from disagg.router.prefix_index import PrefixIndex


def test_it_warns_once_when_the_fleet_outgrows_the_index(caplog: pytest.LogCaptureFixture) -> None:
    index = PrefixIndex(max_nbytes=1 << 20)
    room = IndexRoom(index, CollectorRegistry())
    room.check(index.max_num_blocks)
    assert not caplog.messages
    for _ in range(3):
        room.check(3 * index.max_num_blocks)
    (message,) = caplog.messages
    assert "Multiply prefix_index_nbytes by 3.0" in message
    room.check(index.max_num_blocks)
    room.check(index.max_num_blocks + 1)
    assert len(caplog.messages) == 2
    assert "by 1.1" in caplog.messages[1]  # not 1.0, which would change nothing
