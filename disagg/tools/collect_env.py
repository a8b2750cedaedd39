"""Collect what a bug report needs: versions, machine, GPUs, limits, environment variables.

It measures nothing. Values of variables that may be secrets are left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from disagg.tools.doctor.machine import PROGRAM_S, check_machine
from disagg.tools.terminal import print_json

# Beside what disagg itself requires.
OTHER_PACKAGES = ("vllm", "transformers", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "uvloop")
PREFIXES = (
    *("DISAGG_", "RAY_", "UCX_", "NIXL_", "NCCL_", "CUDA_", "NVIDIA_", "TRITON_", "PYTORCH_"),
    *("HF_", "OTEL_", "OMP_", "VLLM_", "LD_", "PYTHON", "VIRTUAL_ENV", "KUBERNETES_SERVICE"),
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|HEADERS|_URL$")
PROGRAMS = (("nvidia-smi",), ("nvidia-smi", "topo", "-m"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    found = {
        "system": {
            "disagg": _of_package("disagg") + _commit(),
            "Python": f"{platform.python_version()} ({sys.executable})",
            "system": f"{platform.platform()}, {' '.join(platform.libc_ver())}",
            "container": _container(),
        },
        "packages": {name: _of_package(name) for name in package_names()},
        "findings": {each.check: each.found for each in check_machine()},
        "variables": shown_variables(os.environ),
        "programs": {
            " ".join(words): _printed(words) for words in PROGRAMS if shutil.which(words[0])
        },
    }
    if arguments.json:
        print_json(found)
        return 0
    programs = found.pop("programs")
    for section, lines in found.items():
        print(f"== {section}")
        for name, text in lines.items():
            print(f"{name}: {text}")
    for command, text in programs.items():
        print(f"== {command}\n{text}")
    return 0


def package_names() -> list[str]:
    """What disagg requires, and what it may be used with."""
    lines = [line for line in requires("disagg") or () if "extra ==" not in line]
    own = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    return sorted({*own, *OTHER_PACKAGES})


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that change what the processes do; of those that may be secrets only that they are."""
    return {
        name: "(set)" if _SECRET.search(name) else value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES)
    }


def _of_package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Of the files that run, if they are a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    printed = _printed(("git", "-C", str(root), "describe", "--always", "--dirty"))
    return f", commit {printed}"


def _container() -> str:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    return "Docker" if Path("/.dockerenv").exists() else "none that is known"


def _printed(words: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROGRAM_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()
