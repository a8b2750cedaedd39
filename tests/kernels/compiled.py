"""The compiled kernels of this source tree, for tests that are collected where they can run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from disagg.kernels.cpu_library import (
    AMX_STEP,
    BLOCK_NAMES,
    PLAIN_STEP,
    SAMPLING,
    STEP,
    Found,
    cpu_flags,
    load,
)

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


def can_compile() -> bool:
    return shutil.which("g++") is not None or shutil.which("c++") is not None


def can_run_step() -> bool:
    """Whether this CPU has the instructions of the compiled step, too."""
    return can_compile() and not set(PLAIN_STEP.needed) - cpu_flags()


def compiled(directory: Path) -> Found:
    """The step that this CPU gets."""
    has = cpu_flags()
    library = next(each for each in (AMX_STEP, STEP, PLAIN_STEP) if not set(each.needed) - has)
    return load(library, _built(directory, library.file), cpu_flags())


def compiled_plain_step(directory: Path) -> ctypes.CDLL:
    """The step without bf16 instructions, which every CPU with AVX-512 can run."""
    found = load(PLAIN_STEP, _built(directory, PLAIN_STEP.file), cpu_flags())
    assert found.loaded is not None, found.sentence
    return found.loaded


def compiled_sampling(directory: Path) -> ctypes.CDLL:
    """The loops that choose tokens, which every CPU can run."""
    found = load(SAMPLING, _built(directory, SAMPLING.file), cpu_flags())
    assert found.loaded is not None, found.sentence
    return found.loaded


def compiled_block_names(directory: Path) -> ctypes.CDLL:
    """The hash table of the prefix index, which every CPU can run."""
    found = load(BLOCK_NAMES, _built(directory, BLOCK_NAMES.file), cpu_flags())
    assert found.loaded is not None, found.sentence
    return found.loaded
