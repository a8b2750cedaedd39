"""The compiled kernels for CPUs (`csrc/`): which of them this process can use, and why not others.

They are built when the package is installed where a C++ compiler is. Without them, or on a CPU that
lacks their instructions, torch computes everything.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CPU_KERNELS = "DISAGG_CPU_KERNELS"  # "auto", the default, or "torch": do without
VERSION = 1  # of the structures in csrc/step.cpp
FILE = Path(__file__).parent / "_step_avx512_bf16.so"
# What csrc/ is compiled for, as /proc/cpuinfo names it.
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "avx2")


@dataclass(frozen=True, slots=True)
class Found:
    """Attributes:
    library: None where there is none to use.
    sentence: for people: what is used, or why torch computes.
    may_be_built: there could be one here, if disagg were installed once more.
    """

    library: ctypes.CDLL | None
    sentence: str
    may_be_built: bool = False


@cache
def find_library() -> Found:
    """The library for this CPU.

    Raises:
        ValueError: the environment asks for kernels that do not exist.
    """
    asked = os.environ.get(CPU_KERNELS, "auto")
    if asked not in ("auto", "torch"):
        raise ValueError(f"{CPU_KERNELS}={asked}: possible are auto and torch")
    if asked == "torch":
        return Found(None, f"torch, as {CPU_KERNELS}=torch asks for")
    return load(FILE, cpu_flags())


def load(file: Path, flags: frozenset[str]) -> Found:
    """Open a library, if this CPU has the instructions that it is compiled for."""
    missing = [flag for flag in NEEDED if flag not in flags]
    if missing:
        return Found(None, f"torch, as this CPU has no {', '.join(missing)}")
    if not file.exists():
        sentence = "torch, as no C++ compiler was there when disagg was installed"
        return Found(None, sentence, may_be_built=True)
    try:
        library = ctypes.CDLL(str(file))
        version = library.disagg_step_version()
    except (OSError, AttributeError) as error:
        return Found(None, f"torch, as the compiled kernels cannot be loaded: {error}")
    if version != VERSION:
        sentence = "torch, as the compiled kernels are of another version of disagg"
        return Found(None, sentence, may_be_built=True)
    library.disagg_step_new.restype = ctypes.c_void_p
    library.disagg_step_free.argtypes = [ctypes.c_void_p]
    library.disagg_step_free.restype = None
    library.disagg_step_run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int32,
    ]
    return Found(library, "compiled for AVX-512 with bf16 (models in bfloat16)")


def cpu_flags() -> frozenset[str]:
    """Instruction sets as Linux names them; none where this is not Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())
