"""What holds for host memory and the store alike."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.errors import ContextLengthExceeded
from tests.worker import test_host_source, test_store_source


@pytest.mark.parametrize("tests", [test_host_source, test_store_source], ids=["host", "store"])
def test_a_refusal_is_raised_at_once_or_reported_later(tests: Any) -> None:
    rig = tests.ImportRig(token_s=1e-9)
    rig.engine.scheduler.max_model_len = 10
    with pytest.raises(ContextLengthExceeded):
        rig.admit()
    rig = tests.ImportRig()
    tests.warm(rig)
    rig.engine.scheduler.max_model_len = 10
    rig.admit()
    assert rig.kv_import.num_arriving == 1
    while rig.kv_import.num_arriving:
        rig.kv_import.advance(rig.now)
    (event,) = rig.engine.step()
    assert isinstance(event.error, ContextLengthExceeded)
    assert rig.engine.pool.num_free == rig.engine.pool.num_blocks
