"""Checks GPUs: whether torch and Triton can use them, and how full they are.

Uses no GPU memory itself.
"""

from __future__ import annotations

from disagg.devices import Device, Gpus, gpus_here, what_triton_needs
from disagg.tools.doctor.report import Finding

BUSY_SHARE = 0.1  # share of a GPU's memory that other processes may use without a warning


def check_devices(gpus: Gpus | None = None) -> list[Finding]:
    """Check GPUs. `gpus` None looks for the GPUs of this machine."""
    gpus = gpus_here() if gpus is None else gpus
    if gpus.problem:
        return [Finding("CUDA", gpus.problem, "wrong", "fix it, or use --device cpu")]
    if not gpus.devices:
        return [Finding("CUDA", "no GPU; models run on the CPU")]
    return [*map(_device, gpus.devices), compiler(what_triton_needs())]


def compiler(missing: str) -> Finding:
    """Whether Triton can compile kernels. `missing`: from `what_triton_needs`."""
    if not missing:
        return Finding("GPU kernels", "Triton finds a C compiler and Python's headers")
    return Finding("GPU kernels", f"Triton cannot begin without {missing}", "wrong", "install it")


def num_gpus() -> int:
    return len(gpus_here().devices)


def _device(each: Device) -> Finding:
    check = f"GPU {each.id}"
    if each.total_nbytes is None or each.free_nbytes is None:
        return Finding(check, f"{each.name or 'present'}; nvidia-smi does not report its memory")
    found = f"{each.name}, {each.free_nbytes >> 20} of {each.total_nbytes >> 20} MiB free"
    share = each.free_nbytes / each.total_nbytes
    if share >= 1.0 - BUSY_SHARE:
        return Finding(check, found)
    return Finding(
        check,
        f"{found}; other processes use the rest",
        "warn",
        f"end them (nvidia-smi lists them), or set --gpu-memory-utilization {0.95 * share:.2f}",
    )
