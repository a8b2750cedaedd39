"""Lists the GPUs of this machine without opening one, so that none of their memory is used.

torch tells how many GPUs it can use, and the driver's `nvidia-smi` tells their names and free
memory. Without that program, names and memory are unknown until a worker opens the GPU. If there is
no trace of a driver, torch is not asked, because loading it takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"  # by default the fastest is 0, but `nvidia-smi` counts by PCI bus
DRIVER = Path("/proc/driver/nvidia/version")  # exists while the driver's kernel module is loaded
AMD = Path("/dev/kfd")
DRIVER_FILE = "libcuda.so.1"  # torch opens it first, too
# Shared memory of a program: A100, H100 and B200 have 163 KB or more, all others 99 KB.
LARGE_SHARED_NBYTES = 160 << 10
_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version"
_TIMEOUT_S = 30.0  # many GPUs without the persistence daemon take seconds


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `id` is its name in `CUDA_VISIBLE_DEVICES`. Empty or None: not known."""

    id: str
    name: str = ""
    total_nbytes: int | None = None
    free_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a deployment can use.

    Attributes:
        devices: the GPUs that can be used.
        where: a phrase that says where they are.
        num_held: number of further GPUs that other processes hold.
        problem: a sentence that says why torch can use none of the GPUs; empty if it can, or if
            there are none.
    """

    devices: tuple[Device, ...] = ()
    where: str = "this machine"
    num_held: int = 0
    problem: str = ""


def gpus_here() -> Gpus:
    """The GPUs that a process started by this one can use."""
    visible = _visible_ids(os.environ)
    if visible == [] or not has_driver():
        return Gpus()
    os.environ.setdefault(ORDER, "PCI_BUS_ID")  # also for workers, which are started from here
    import torch  # imported here, because code that only plans with devices must not load it

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if not is_available:
        return Gpus(problem=_problem(" ".join(str(each.message) for each in caught)))
    known, _ = _listed()
    num_devices = torch.cuda.device_count()
    ids = visible or [str(index) for index in range(num_devices)]
    if not ids[0].startswith("MIG-"):  # a process sees one MIG device, and others may see others
        ids = ids[:num_devices]
    return Gpus(tuple(known.get(each, Device(each)) for each in ids))


def see_only(ids: Iterable[int | str]) -> None:
    """Hide all other GPUs from libraries that this process loads later. Without ids, do nothing.

    Ray has hidden them already, unless its RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    if found := ",".join(map(str, ids)):
        os.environ[VISIBLE] = found


def what_triton_needs() -> str:
    """What is missing here for Triton, which compiles its interface to the driver at its first use.

    It is a phrase such as "a C compiler (gcc)"; empty if nothing is missing.
    """
    missing = []
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        missing.append(f"a C compiler ({' or '.join(compilers)})")
    if not (Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        missing.append(f"Python's headers (on Debian and Ubuntu the package python{version}-dev)")
    return " and ".join(missing)


def why_no_gpu() -> str:
    """A sentence that says why torch finds no GPU."""
    return gpus_here().problem or "torch finds no GPU on this machine."


def _visible_ids(environment: Mapping[str, str]) -> list[str] | None:
    """The ids in `CUDA_VISIBLE_DEVICES` up to the first invalid one, as in CUDA. None: all."""
    if VISIBLE not in environment:
        return None
    ids = []
    for each in environment[VISIBLE].split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", each.strip()):
            break
        ids.append(each.strip())
    return ids


def has_driver() -> bool:
    """Whether there is a trace of a GPU driver. torch finds no GPU without the driver's library."""
    if DRIVER.exists() or AMD.exists() or shutil.which("nvidia-smi") is not None:
        return True
    try:
        ctypes.CDLL(DRIVER_FILE)
    except OSError:
        return False
    return True


def _problem(warning: str) -> str:
    """Why torch finds no GPU although there is one; empty if there is none.

    Args:
        warning: the text of torch's warnings.
    """
    import torch

    known, version = _listed()
    if not known and not DRIVER.exists():
        return ""
    if not version and DRIVER.exists():
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text(errors="replace"))
        version = match[0] if match else ""
    driver = f"the NVIDIA driver {version}".rstrip()
    if torch.version.cuda is None:
        return (
            f"This machine has a GPU and {driver}, but torch {torch.__version__} was built without"
            " CUDA; install a torch wheel for CUDA."
        )
    reason = f" ({warning.split('. ')[0].rstrip('.')})" if warning else ""
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use this machine's GPU"
        f" with {driver}{reason}; update the driver, or install a torch wheel for an earlier CUDA."
    )


def _listed() -> tuple[dict[str, Device], str]:
    """GPUs by index and by UUID, and the driver's version; empty if `nvidia-smi` does not run."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return {}, ""
    known: dict[str, Device] = {}
    version = ""
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        fields = [each.strip() for each in line.split(",")]
        if len(fields) == len(_FIELDS.split(",")):
            index, uuid, name, total, free, version = fields
            device = Device(index, name, _nbytes(total), _nbytes(free))
            known |= {index: device, uuid: replace(device, id=uuid)}
    return known, version


def _nbytes(mebibytes: str) -> int | None:
    """Bytes of a number of MiB; None for `[N/A]`, which a GPU that shares host memory reports."""
    return int(mebibytes) << 20 if mebibytes.isdigit() else None
