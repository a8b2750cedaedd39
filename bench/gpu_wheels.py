"""Fetches the wheels that a bare GPU machine lacks: `python -m bench.gpu_wheels [--peers]`

The wheels go into wheels/, and `bench/gpu_suite.sh` unpacks them there. They are for the Python and
the platform of the GPU machine, not for this one. Of NIXL's wheel only the part that moves memory
over UCX is kept: three extensions for expert parallelism are two thirds of the wheel.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

NEEDED = ("msgspec", "nixl", "nixl-cu13")  # `nixl` finds what fits the CUDA of torch
PEERS = ("flashinfer-python==0.6.6", "apache-tvm-ffi==0.1.15.post2")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
# Of nixl-cu13: expert parallelism, example programs, and ways to move memory other than UCX.
LEFT_OUT = ("nixl_ep_cu13/", "nixl_cu13.scripts/")
PLUGINS = ("nixl/libplugin_", "plugins/libplugin_")
KEPT_PLUGIN = "libplugin_UCX"


def constrained(package: str) -> str:
    """The version that this project is tested with."""
    constraints = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
    pinned = (line for line in constraints if line.startswith(f"{package}=="))
    return next(pinned, package)


def is_kept(name: str) -> bool:
    if name.startswith(LEFT_OUT):
        return False
    return KEPT_PLUGIN in name or not any(plugin in name for plugin in PLUGINS)


def shrink(wheel: Path) -> None:
    """Rewrite a wheel without what is left out of it, also in its list of files."""
    smaller = wheel.with_suffix(".part")
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target,
    ):
        for entry in source.infolist():
            if not is_kept(entry.filename):
                continue
            content = source.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                kept = (line for line in lines if is_kept(line.split(",")[0].strip('"')))
                content = "".join(kept).encode()
            target.writestr(entry, content)
    smaller.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python-version", default="3.12", help="of the machine over there")
    parser.add_argument("--to", type=Path, default=Path("wheels"))
    parser.add_argument("--peers", action="store_true", help="FlashInfer, too")
    arguments = parser.parse_args()
    packages = [*map(constrained, NEEDED), *(PEERS if arguments.peers else ())]
    platforms = [flag for each in PLATFORMS for flag in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", arguments.python_version, *platforms]
    subprocess.run([*command, "--dest", str(arguments.to), *packages], check=True)
    for wheel in sorted(arguments.to.glob("nixl_cu13-*.whl")):
        shrink(wheel)
    for wheel in sorted(arguments.to.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel}")


if __name__ == "__main__":
    main()
