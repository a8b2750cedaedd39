"""Compiled kernels are tested where they can be built and run.

What a machine without them does instead is tested everywhere: `test_cpu_library.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compiled import can_compile, can_run_step
from tests.kernels.compiling import Assembler, assembled

collect_ignore = [
    name
    for name, can_run in (
        ("test_cpu_step.py", can_run_step()),
        ("test_cpu_step_packed.py", can_run_step()),
        ("test_cpu_prompts.py", can_run_step()),
        ("test_int4_compiled.py", can_run_step()),
        ("test_cpu_sampling.py", can_compile()),
    )
    if not can_run
]


@pytest.fixture
def assembler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Assembler:
    """Kernels are compiled anew, and what the assembler says of them is printed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    return lambda: assembled(capsys.readouterr().out)
