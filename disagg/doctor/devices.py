"""Checks of GPUs: driver, torch's build, memory. Each as a function of what was read."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import torch

from disagg.doctor.findings import Finding

LEAST_CAPABILITY = (8, 0)  # bf16, and what our kernels are compiled for
BUSY_SHARE = 0.1  # of a GPU's memory that others may hold before it is worth a warning


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    free_nbytes: int
    total_nbytes: int


def check_devices() -> list[Finding]:
    driver = driver_version()
    if not torch.cuda.is_available():
        return [no_gpu(driver, torch.__version__, torch.version.cuda)]
    build = f"driver {driver or 'unknown'}, torch {torch.__version__} for CUDA {torch.version.cuda}"
    gpus = [_gpu(number) for number in range(torch.cuda.device_count())]
    return [Finding("CUDA", build), *(gpu(number, each) for number, each in enumerate(gpus))]


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def driver_version() -> str:
    """What nvidia-smi says; empty where there is no NVIDIA driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(found.stdout.split()), "")


def no_gpu(driver: str, torch_version: str, cuda: str | None) -> Finding:
    """torch finds no GPU: right on a machine without one, wrong beside a driver."""
    if not driver:
        return Finding("CUDA", f"no GPU: models run on the CPU (torch {torch_version})")
    found = f"driver {driver}, but torch {torch_version} finds no GPU"
    if cuda is None:
        return Finding("CUDA", f"{found}: it was built without CUDA", "wrong", "pip install torch")
    return Finding(
        "CUDA",
        f"{found}: it was built for CUDA {cuda}",
        "wrong",
        f"a driver for CUDA {cuda} or later, or a torch for the CUDA of this driver",
    )


def gpu(number: int, each: Gpu) -> Finding:
    check = f"GPU {number}"
    capability = ".".join(map(str, each.capability))
    found = (
        f"{each.name}, sm_{''.join(map(str, each.capability))},"
        f" {each.free_nbytes >> 20} of {each.total_nbytes >> 20} MiB free"
    )
    if each.capability < LEAST_CAPABILITY:
        return Finding(
            check, f"{found}: compute capability {capability} < 8.0", "wrong", "--device cpu"
        )
    if each.free_nbytes < (1.0 - BUSY_SHARE) * each.total_nbytes:
        share = each.free_nbytes / each.total_nbytes
        return Finding(
            check,
            f"{found}: another process holds the rest",
            "warn",
            f"end it (nvidia-smi shows it), or --gpu-memory-utilization {0.95 * share:.2f}",
        )
    return Finding(check, found)


def _gpu(number: int) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    free_nbytes, total_nbytes = torch.cuda.mem_get_info(number)
    return Gpu(
        properties.name, (properties.major, properties.minor), int(free_nbytes), int(total_nbytes)
    )
