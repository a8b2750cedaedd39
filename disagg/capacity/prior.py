"""The prior of a worker's time model: the roofline of its model on its device.

The right order of magnitude is enough, since the fit corrects it within some steps. With one
default for all, a small model on a CPU core and a large one on a GPU would differ by a factor of
100.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from disagg.capacity.efficiency import ON_CPU
from disagg.capacity.gpus import CPU_CORE, GPUS, gpu_called
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import ModelShape
from disagg.time_model import StepTimeModel

UNKNOWN_GPU = "a100-80gb"  # in the middle of the table


def step_times(
    shape: ModelShape, device_name: str, num_ranks: int = 1, *, expert_parallel: bool = False
) -> tuple[StepTimeModel, str]:
    """A prior for the time model of a worker, and the name of the device whose roofline it is.

    Args:
        device_name: name of the GPU from its driver; empty on a CPU.
        num_ranks: number of devices of the worker.
        expert_parallel: whether each device has whole experts.
    """
    ranks: dict[str, Any] = {"num_gpus": num_ranks, "expert_parallel": expert_parallel}
    if not device_name:
        placement = Placement(replace(shape, is_widened=True), CPU_CORE, efficiency=ON_CPU, **ranks)
        return placement.time_model(), "one CPU core" if num_ranks == 1 else "CPU cores"
    gpu = gpu_called(device_name)
    placement = Placement(shape, gpu or GPUS[UNKNOWN_GPU], **ranks)
    known = gpu.name if gpu else f"{UNKNOWN_GPU}, because {device_name!r} is not known"
    return placement.time_model(), known
