"""What holds for host memory and the store alike."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.errors import ContextLengthExceeded
from tests.decode_worker import test_host_source, test_store_source


@pytest.mark.parametrize("tests", [test_host_source, test_store_source], ids=["host", "store"])
def test_a_refusal_is_raised_at_once_or_reported_later(tests: Any) -> None:
    door = tests.Door(token_s=1e-9)
    door.engine.scheduler.max_model_len = 10
    with pytest.raises(ContextLengthExceeded):
        door.admit()
    door = tests.Door()
    tests.warm(door)
    door.engine.scheduler.max_model_len = 10
    door.admit()
    assert door.kv_import.num_arriving == 1
    while door.kv_import.num_arriving:
        door.kv_import.advance(door.now)
    (event,) = door.engine.step()
    assert isinstance(event.error, ContextLengthExceeded)
    assert door.engine.pool.num_free == door.engine.pool.num_blocks
