"""Builds the compiled kernels (`csrc/`) where a C++ compiler is; everything else: pyproject.toml.

They are plain shared libraries that ctypes opens, not modules of Python, so one wheel serves every
version of Python. Without a compiler the package is installed without them and says so.
"""

from __future__ import annotations

import copy
import os
import platform
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# As `disagg.kernels.cpu.library` says; that is not there yet when a package is built.
AVX2 = ["-mavx2", "-mfma"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
AMX_BF16 = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"]
COMPILED = ["-O3", "-g0", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
# gcc 12 takes its own intrinsics for uninitialised variables.
SILENCED = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]


class BuildLibraries(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        # In a directory of its own: the libraries of one source would write one object file.
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        super(BuildLibraries, own).build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class OfEveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system


def step_libraries() -> dict[str, list[str]]:
    """The libraries of steps to build, name -> instruction sets.

    All of them, as a wheel is installed on other CPUs too. With DISAGG_BUILD=this-cpu it is only
    the one that this CPU will take: each of them keeps a core busy for about 15 seconds.
    """
    libraries = {
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512_bf16": AVX512_BF16,
        "amx_bf16": AMX_BF16,
    }
    if os.environ.get("DISAGG_BUILD") != "this-cpu":
        return libraries
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        there = set(cpuinfo.read().replace("_", "").split())
    taken = [
        name
        for name, instructions in libraries.items()
        if there.issuperset(flag.removeprefix("-m").replace("-", "") for flag in instructions)
    ]
    return {name: libraries[name] for name in taken[-1:]}


def extensions() -> list[Extension]:
    if platform.system() != "Linux":
        return []
    # A token must not depend on whether a processor fuses multiplying and adding.
    exact = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
    sampling = Extension(
        "disagg.kernels.cpu._sampling",
        sources=["csrc/sampling.cpp"],
        extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", *exact],
        language="c++",
        optional=True,
    )
    if platform.machine() not in ("x86_64", "AMD64"):
        return [sampling]
    steps = [
        Extension(
            f"disagg.kernels.cpu._step_{name}",
            sources=["csrc/step.cpp"],
            depends=glob("csrc/*.h"),
            extra_compile_args=[*COMPILED, *SILENCED, *instructions],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for name, instructions in step_libraries().items()
    ]
    return [sampling, *steps]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": OfEveryPython},
)
