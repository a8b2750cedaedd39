"""The compiled kernels of this source tree."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from disagg.kernels.cpu_library import SAMPLING, STEP, Found, cpu_flags, load

ROOT = Path(__file__).parent.parent.parent


@cache
def _built(directory: Path, file: Path) -> Path:
    """What the installation built, if that is of these sources; else it is built in `directory`."""
    sources = [ROOT / "setup.py", *(ROOT / "csrc").iterdir()]
    if file.exists() and file.stat().st_mtime > max(each.stat().st_mtime for each in sources):
        return file
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(directory)]
    command += ["--build-temp", str(directory / "objects")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = directory / "disagg" / "kernels" / file.name
    assert found.exists(), done.stdout + done.stderr
    return found


def compiled(directory: Path) -> Found:
    """Skips where nothing can be compiled, or not run: there torch is what is used."""
    missing = set(STEP.needed) - cpu_flags()
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    _need_compiler()
    return load(STEP, _built(directory, STEP.file), cpu_flags())


def compiled_sampling(directory: Path) -> ctypes.CDLL:
    """As `compiled`, of the loops that choose tokens, which every CPU can run."""
    _need_compiler()
    found = load(SAMPLING, _built(directory, SAMPLING.file), cpu_flags())
    assert found.loaded is not None, found.sentence
    return found.loaded


def _need_compiler() -> None:
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("no C++ compiler is here")
