"""Runs test files under Triton's interpreter.

The interpreter is not the compiler: docs/extending.md has a table of the differences. What a new or
changed kernel is asked before its interpreted tests count:

1. NaN and infinity: does each `max`, `min`, `argmax`, comparison and clamp do with them what the
   plain twin does, and is there a test with NaN in one row, which must stay there?
2. Can any loaded or computed index leave its tensor, whatever the numbers are? Do all loops end?
3. Does each masked load have `other`, unless it is never used where the mask is false?
4. Does a program read what it has written itself without `tl.debug_barrier()`, or what another
   program of the same launch writes? Do two lanes store different values to one address?
5. Is each product of a row, a slot or a block with a stride in int64?
6. Do comparisons with the twin allow another order of sums, and is every division that decides
   something `tl.div_rn`?
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_interpreted(*paths: str) -> None:
    """The interpreter is chosen when Triton is imported, hence a process of its own."""
    plugins = ["-p", "tests.kernels.quick_interpreter", "-p", "tests.kernels.compiled_order"]
    command = [sys.executable, "-m", "pytest", *paths, "-x", *plugins]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
