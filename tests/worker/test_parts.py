"""What a worker is made of, and what it does without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
