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


@dataclass(frozen=True, slots=True)
class Library:
    """
    Attributes:
        name: its functions are called disagg_NAME_...
        file: where an installation has it.
        version: of the structures and functions in its source.
        needed: the instructions that it is compiled for, as /proc/cpuinfo names them.
        sentence: for people: what it is.
    """

    name: str
    file: Path
    version: int
    needed: tuple[str, ...]
    sentence: str


STEP = Library(
    "step",
    Path(__file__).parent / "_step_avx512_bf16.so",
    version=8,
    needed=("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "avx2"),
    sentence="compiled for AVX-512 with bf16 (models in bfloat16)",
)
PLAIN_STEP = Library(
    "step",
    Path(__file__).parent / "_step_avx512.so",
    version=STEP.version,
    needed=tuple(flag for flag in STEP.needed if flag != "avx512_bf16"),
    sentence="compiled for AVX-512 (models in bfloat16)",
)
AMX_STEP = Library(
    "step",
    Path(__file__).parent / "_step_amx_bf16.so",
    version=STEP.version,
    needed=(*STEP.needed, "amx_tile", "amx_bf16"),
    sentence="compiled for AMX with bf16 (models in bfloat16)",
)
SAMPLING = Library(
    "sampling", Path(__file__).parent / "_sampling.so", version=1, needed=(), sentence="compiled"
)
BLOCK_NAMES = Library(
    "block_names",
    Path(__file__).parent / "_block_names.so",
    version=2,
    needed=(),
    sentence="compiled",
)


@dataclass(frozen=True, slots=True)
class Found:
    """Attributes:
    loaded: None where there is none to use.
    sentence: for people: what is used, or why torch computes.
    may_be_built: there could be one here, if disagg were installed once more.
    """

    loaded: ctypes.CDLL | None
    sentence: str
    may_be_built: bool = False


@cache
def find_library(library: Library) -> Found:
    """A library as the installation built it, for this CPU.

    Raises:
        ValueError: the environment asks for kernels that do not exist.
    """
    asked = os.environ.get(CPU_KERNELS, "auto")
    if asked not in ("auto", "torch"):
        raise ValueError(f"{CPU_KERNELS}={asked}: possible are auto and torch")
    if asked == "torch":
        return Found(None, f"torch, as {CPU_KERNELS}=torch asks for")
    return load(library, library.file, cpu_flags())


def find_step() -> Found:
    """The compiled step: for AMX where this CPU has it, else for AVX-512 with bf16, or without."""
    for library in (AMX_STEP, STEP):
        found = find_library(library)
        if found.loaded is not None:
            return found
    return find_library(PLAIN_STEP)


def load(library: Library, file: Path, flags: frozenset[str]) -> Found:
    """Open a library, if this CPU has the instructions that it is compiled for."""
    missing = [flag for flag in library.needed if flag not in flags]
    if missing:
        return Found(None, f"torch, as this CPU has no {', '.join(missing)}")
    if not file.exists():
        sentence = "torch, as no C++ compiler was there when disagg was installed"
        return Found(None, sentence, may_be_built=True)
    try:
        loaded = ctypes.CDLL(str(file))
        version = getattr(loaded, f"disagg_{library.name}_version")()
    except (OSError, AttributeError) as error:
        return Found(None, f"torch, as the compiled kernels cannot be loaded: {error}")
    if version != library.version:
        sentence = "torch, as the compiled kernels are of another version of disagg"
        return Found(None, sentence, may_be_built=True)
    if library is AMX_STEP and not loaded.disagg_step_may_run():
        return Found(None, "torch, as Linux lets this process not use AMX")
    return Found(loaded, library.sentence)


def cpu_flags() -> frozenset[str]:
    """Instruction sets as Linux names them; none where this is not Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())
