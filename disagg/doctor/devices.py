"""Checks of GPUs: whether torch can use them, and how full they are. No GPU's memory is taken."""

from __future__ import annotations

from disagg.doctor.findings import Finding
from disagg.kernels.devices import Device, Gpus, gpus_here

BUSY_SHARE = 0.1  # of a GPU's memory that others may hold before it is worth a warning


def check_devices(gpus: Gpus | None = None) -> list[Finding]:
    """Args: gpus: what there is; None: look."""
    gpus = gpus_here() if gpus is None else gpus
    if gpus.problem:
        return [Finding("CUDA", gpus.problem, "wrong", "--device cpu until then")]
    if not gpus.devices:
        return [Finding("CUDA", "no GPU: models run on the CPU")]
    return [_device(each) for each in gpus.devices]


def num_gpus() -> int:
    return len(gpus_here().devices)


def _device(each: Device) -> Finding:
    check = f"GPU {each.id}"
    if each.total_nbytes is None or each.free_nbytes is None:
        return Finding(check, f"{each.name or 'there'}; nvidia-smi does not say how full it is")
    found = f"{each.name}, {each.free_nbytes >> 20} of {each.total_nbytes >> 20} MiB free"
    share = each.free_nbytes / each.total_nbytes
    if share >= 1.0 - BUSY_SHARE:
        return Finding(check, found)
    return Finding(
        check,
        f"{found}: other processes hold the rest",
        "warn",
        f"end them (nvidia-smi lists them), or --gpu-memory-utilization {0.95 * share:.2f}",
    )
