"""The compiled kernels for CPUs (`csrc/`): which of them this process can use, and why not others.

They are built when the package is installed, if there is a C++ compiler. Without them, or on a CPU
that lacks their instructions, torch computes everything.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LANES = 16  # compiled attention takes heads whose size is a multiple of this
CPU_KERNELS = "DISAGG_CPU_KERNELS"  # "auto", the default, or "torch": use no compiled kernels


@dataclass(frozen=True, slots=True)
class Library:
    """A library of compiled kernels.

    Attributes:
        name: its functions are called disagg_NAME_...
        file: its path in an installation.
        version: version of the structures and functions in its source.
        needed: the instruction sets for which it is compiled, as /proc/cpuinfo names them.
        sentence: describes it to people.
    """

    name: str
    file: Path
    version: int
    needed: tuple[str, ...]
    sentence: str


STEP = Library(
    "step",
    Path(__file__).parent / "_step_avx512_bf16.so",
    version=14,
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
AVX2_STEP = Library(
    "step",
    Path(__file__).parent / "_step_avx2.so",
    version=STEP.version,
    needed=("avx2", "fma"),
    sentence="compiled for AVX2 (models in bfloat16)",
)
AMX_STEP = Library(
    "step",
    Path(__file__).parent / "_step_amx_bf16.so",
    version=STEP.version,
    needed=(*STEP.needed, "amx_tile", "amx_bf16"),
    sentence="compiled for AMX with bf16 (models in bfloat16)",
)
STEPS = AMX_STEP, STEP, PLAIN_STEP, AVX2_STEP  # the best first
SAMPLING = Library(
    "sampling", Path(__file__).parent / "_sampling.so", version=2, needed=(), sentence="compiled"
)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of looking for a library.

    Attributes:
        loaded: the library; None if none can be used.
        sentence: tells people which library is used, or why torch computes.
        may_be_built: whether installing disagg again may build the library.
    """

    loaded: ctypes.CDLL | None
    sentence: str
    may_be_built: bool = False


@cache
def find_library(library: Library) -> Found:
    """Load a library as the installation built it, if this CPU can run it.

    Raises:
        ValueError: the environment variable `DISAGG_CPU_KERNELS` has an unknown value.
    """
    asked = os.environ.get(CPU_KERNELS, "auto")
    if asked not in ("auto", "torch"):
        raise ValueError(f"{CPU_KERNELS}={asked} is unknown; set it to auto or torch, or unset it")
    if asked == "torch":
        return Found(None, f"torch, because {CPU_KERNELS}=torch is set")
    return load(library, library.file, cpu_flags())


def find_step() -> Found:
    """Load the compiled step for the best instructions that this CPU has.

    Where there is none, the sentence is about the best one that could have been built.
    """
    not_loaded = []
    for library in STEPS:
        found = find_library(library)
        if found.loaded is not None:
            return found
        not_loaded.append(found)
    return next((each for each in not_loaded if each.may_be_built), not_loaded[-1])


def load(library: Library, file: Path, flags: frozenset[str]) -> Found:
    """Open a library, if this CPU has the instruction sets for which it is compiled."""
    missing = [flag for flag in library.needed if flag not in flags]
    if missing:
        return Found(None, f"torch, because this CPU has no {', '.join(missing)}")
    if not file.exists():
        sentence = "torch, because there was no C++ compiler when disagg was installed"
        return Found(None, sentence, may_be_built=True)
    try:
        loaded = ctypes.CDLL(str(file))
        version = getattr(loaded, f"disagg_{library.name}_version")()
    except (OSError, AttributeError) as error:
        return Found(None, f"torch, because the compiled kernels cannot be loaded: {error}")
    if version != library.version:
        sentence = "torch, because another version of disagg built the compiled kernels"
        return Found(None, sentence, may_be_built=True)
    if library is AMX_STEP and not loaded.disagg_step_may_run():
        return Found(None, "torch, because Linux does not let this process use AMX")
    return Found(loaded, library.sentence)


def cpu_flags() -> frozenset[str]:
    """The CPU's instruction sets, as Linux names them; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").split())
