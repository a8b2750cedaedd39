"""Lists the GPUs of this machine without opening one, so that none of their memory is used.

torch says how many it can use, the driver's `nvidia-smi` their names and free memory. Without that
program name and memory are unknown here; the worker that opens the GPU finds out. Where nothing of
a driver is there, torch is not asked: loading it takes seconds of a start.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"  # by default the fastest is 0, while `nvidia-smi` counts along the bus
DRIVER = Path("/proc/driver/nvidia/version")  # there while the kernel has the driver's module
AMD = Path("/dev/kfd")
DRIVER_FILE = "libcuda.so.1"  # what torch opens first, too
# Shared memory of a program: A100, H100 and B200 have 163 KB and more, all others 99.
LARGE_SHARED_NBYTES = 160 << 10
_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version"
_TIMEOUT_S = 30.0  # many GPUs without the persistence daemon take seconds


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `id` is what `CUDA_VISIBLE_DEVICES` calls it; empty or None: not known."""

    id: str
    name: str = ""
    total_nbytes: int | None = None
    free_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Gpus:
    """What there is to plan with.

    Attributes:
        devices: that can be used.
        where: they are, in words.
        num_held: more of them, which others hold.
        problem: a sentence, where there are GPUs and torch can use none of them.
    """

    devices: tuple[Device, ...] = ()
    where: str = "this machine"
    num_held: int = 0
    problem: str = ""


def gpus_here() -> Gpus:
    """What a process that is started from here can use."""
    visible = _visible_ids(os.environ)
    if visible == [] or not has_driver():
        return Gpus()
    os.environ.setdefault(ORDER, "PCI_BUS_ID")  # also for workers, which are started from here
    import torch  # here, and not above: what plans with devices must not need it

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if not is_available:
        return Gpus(problem=_problem(" ".join(str(each.message) for each in said)))
    known, _ = _listed()
    num_devices = torch.cuda.device_count()
    ids = visible or [str(index) for index in range(num_devices)]
    if not ids[0].startswith("MIG-"):  # of these a process counts one, and each may have its own
        ids = ids[:num_devices]
    return Gpus(tuple(known.get(each, Device(each)) for each in ids))


def see_only(ids: Iterable[int | str]) -> None:
    """Hide all GPUs but these from what this process opens later; no ids: leave it as it is.

    Ray has done so already, unless its RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    if found := ",".join(map(str, ids)):
        os.environ[VISIBLE] = found


def why_no_gpu() -> str:
    """The sentence for who needs a GPU where torch finds none."""
    return gpus_here().problem or "torch finds no GPU here."


def _visible_ids(environment: Mapping[str, str]) -> list[str] | None:
    """What the variable allows, as CUDA reads it: up to the first that is no device. None: all."""
    if VISIBLE not in environment:
        return None
    ids = []
    for each in environment[VISIBLE].split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", each.strip()):
            break
        ids.append(each.strip())
    return ids


def has_driver() -> bool:
    """Whether anything of a driver is here. torch finds no GPU without the driver's library."""
    if DRIVER.exists() or AMD.exists() or shutil.which("nvidia-smi") is not None:
        return True
    try:
        ctypes.CDLL(DRIVER_FILE)
    except OSError:
        return False
    return True


def _problem(said: str) -> str:
    """Why torch finds no GPU, by what is there of a driver; empty where there is no GPU."""
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
            f"A GPU and {driver} are here, but torch {torch.__version__} was built without CUDA;"
            " install a torch wheel for CUDA."
        )
    reason = f" ({said.split('. ')[0].rstrip('.')})" if said else ""
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use a GPU with {driver},"
        f" which is here{reason}; update the driver, or install a torch wheel for an earlier CUDA."
    )


def _listed() -> tuple[dict[str, Device], str]:
    """GPUs by index and by UUID, and the driver's version; nothing where no program tells."""
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
    """A GPU that shares the host's memory answers `[N/A]`."""
    return int(mebibytes) << 20 if mebibytes.isdigit() else None
