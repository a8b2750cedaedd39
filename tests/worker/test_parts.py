"""What a worker is made of, and what it does without."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.worker.parts import _warn_of_allocator
from tests.tiny_model import write_tiny_model

PROGRAM = """
import sys

sys.modules.update(dict.fromkeys(["redis", "nixl", "ray"]))  # importing them fails

from pathlib import Path
from disagg.config import EngineConfig, ServeConfig, TierConfig
from disagg.time_model import StepTimeModel
from disagg.worker.parts import build_parts
from disagg.worker.worker import Worker

engine = EngineConfig(dtype="float32", num_threads=1, num_gpu_blocks_override=40)
tier = TierConfig(model=sys.argv[1], engine=engine)
config = ServeConfig(tiers=(tier,), transport="local", cluster_key="key")
parts = build_parts(config, tier, "worker", 1)
assert parts.cold_tier is None
assert 0 < parts.first_times.prefill_s(100) != StepTimeModel().prefill_s(100)  # a measured one
parts.transport.close()
"""


def test_a_worker_without_store_and_nixl_needs_neither_package(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments: True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
    ],
)
def test_memory_that_other_workers_cannot_read_is_warned_of(
    settings: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _warn_of_allocator(settings)
    assert [record.args for record in caplog.records] == [(*settings,)] * warned
