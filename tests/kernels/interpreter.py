"""Runs test files under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_interpreted(*paths: str) -> None:
    """The interpreter is chosen when Triton is imported, hence a process of its own."""
    plugin = ["-p", "tests.kernels.quick_interpreter"]
    command = [sys.executable, "-m", "pytest", *paths, "-x", *plugin]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
