"""The compiled kernels of this source tree, for tests that are collected where they can run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from disagg.kernels.cpu.library import (
    AVX2_STEP,
    BLOCK_NAMES,
    PLAIN_STEP,
    SAMPLING,
    STEPS,
    Found,
    Library,
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
    found = directory / "disagg" / "kernels" / "cpu" / file.name
    assert found.exists(), done.stdout + done.stderr
    return found


def can_compile() -> bool:
    return shutil.which("g++") is not None or shutil.which("c++") is not None


def can_run_step() -> bool:
    """Whether this CPU has the instructions of the compiled step, too."""
    return can_compile() and not set(AVX2_STEP.needed) - cpu_flags()


def steps_here() -> list[Library]:
    """The step that this CPU gets, and the one for AVX2."""
    can_run = [each for each in STEPS if not set(each.needed) - cpu_flags()]
    return [each for each in can_run if each in (can_run[0], AVX2_STEP)]


def plain_steps_here() -> list[Library]:
    """The steps without bf16 instructions that this CPU can run."""
    return [each for each in (PLAIN_STEP, AVX2_STEP) if not set(each.needed) - cpu_flags()]


def compiled(library: Library, directory: Path) -> Found:
    found = load(library, _built(directory, library.file), cpu_flags())
    assert found.loaded is not None, found.sentence
    return found


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
