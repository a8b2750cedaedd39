"""How `setup.py` builds the libraries, with a fake compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from disagg.kernels.cpu.library import STEPS

ROOT = Path(__file__).parents[2]
# A fake object file has the instruction sets that it would be compiled for, and a library has what
# its object file has. Compilers end together before the first of them links.
FAKE_COMPILER = f"""#!{sys.executable}
import os, sys, time
given = sys.argv[1:]
out = given[given.index("-o") + 1]
os.makedirs(os.path.dirname(out), exist_ok=True)
if "-c" in given:
    time.sleep(0.5)
    text = " ".join(each for each in given if each.startswith("-m"))
else:
    text = open(next(each for each in given if each.endswith(".o"))).read()
open(out, "w").write(text)
"""


FAKE_MACHINE = """
import platform, runpy, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""


def _built(directory: Path, machine: str, which: str = "") -> dict[str, str]:
    """The instruction sets of each library that is built on a machine of this kind.

    Args:
        which: DISAGG_BUILD.
    """
    compiler = directory / "fake_compiler"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)
    fake = {name: str(compiler) for name in ("CC", "CXX", "LDSHARED", "LDCXXSHARED")}
    fake["DISAGG_BUILD"] = which
    command = [sys.executable, "-c", FAKE_MACHINE, machine, "-q", "build_ext", "--parallel", "8"]
    command += ["--build-lib", str(directory / "out"), "--build-temp", str(directory / "objects")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **fake}, check=True)
    return {file.stem: file.read_text() for file in directory.glob("out/disagg/kernels/cpu/*.so")}


def test_libraries_of_one_source_are_built_beside_each_other(tmp_path: Path) -> None:
    built = _built(tmp_path, "x86_64")
    assert built["_step_avx2"] == "-mavx2 -mfma"
    assert "-mavx512f" in built["_step_avx512"] and "bf16" not in built["_step_avx512"]
    assert built["_step_avx512_bf16"] == built["_step_avx512"] + " -mavx512bf16"
    assert built["_step_amx_bf16"] == built["_step_avx512_bf16"] + " -mamx-tile -mamx-bf16"


def test_a_build_for_this_cpu_has_the_library_that_it_takes(tmp_path: Path) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    taken = [each.file.stem for each in STEPS if flags.issuperset(each.needed)][:1]
    built = _built(tmp_path, "x86_64", which="this-cpu")
    assert set(built) == {"_sampling", *taken}


def test_only_libraries_without_special_instructions_are_built_on_arm(tmp_path: Path) -> None:
    assert _built(tmp_path, "aarch64") == {"_sampling": ""}
