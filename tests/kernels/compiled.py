"""The compiled kernels of this source tree, for tests that are collected where they can run."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from disagg.kernels.cpu.library import (
    AVX2_STEP,
    PLAIN_STEP,
    STEPS,
    Found,
    Library,
    cpu_flags,
    load,
)

ROOT = Path(__file__).parent.parent.parent


@cache
def _built(file: Path) -> Path:
    """What the installation built, if that is of these sources; else it is built beside the
    environment, once for each content of the sources."""
    sources = sorted([ROOT / "setup.py", *(ROOT / "csrc").iterdir()])
    if file.exists() and file.stat().st_mtime > max(each.stat().st_mtime for each in sources):
        return file
    content = b"".join(each.name.encode() + each.read_bytes() for each in sources)
    place = ROOT / ".venv" / "compiled" / hashlib.sha256(content).hexdigest()[:16]
    found = place / "disagg" / "kernels" / "cpu" / file.name
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:  # other runs of the tests wait for the first
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "is_built").exists():
            command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(place)]
            command += ["--build-temp", str(place / "objects")]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert found.exists(), done.stdout + done.stderr
            (place / "is_built").touch()
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


def compiled(library: Library) -> Found:
    found = load(library, _built(library.file), cpu_flags())
    assert found.loaded is not None, found.sentence
    return found


def loaded(library: Library) -> ctypes.CDLL:
    found = compiled(library).loaded
    assert found is not None
    return found
