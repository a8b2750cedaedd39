"""The kernels that choose tokens, and the one that makes a step's inputs, compile.

For one architecture; `grid/` has all. Their values are tested in `test_interpreted.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compiling_sampling import KERNELS, check_sampling, check_step_arrays

SM = 90  # H100 and H200


@pytest.fixture(autouse=True)
def _compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.parametrize(("name", "absent"), KERNELS)
def test_kernels_compile(name: str, absent: str) -> None:
    check_sampling(name, absent, SM)


def test_step_arrays_compile() -> None:
    check_step_arrays(SM)
