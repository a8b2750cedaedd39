"""The prior of a worker's time model: the roofline of its model on its device.

The right order of magnitude is enough, since the fit corrects it within some steps. One default for
all would be off by a factor of a hundred between a small model on a CPU core and a large one on a
GPU.
"""

from __future__ import annotations

from disagg.planner.gpus import CPU_CORE, GPUS, gpu_called
from disagg.planner.roofline import PLANNED, Efficiency, Placement
from disagg.planner.shapes import ModelShape
from disagg.time_model import StepTimeModel

UNKNOWN_GPU = "a100-80gb"  # in the middle of the table

# Of `CPU_CORE`, whose figures are reached already: what torch's calls take in a step, and what a
# sequence adds; attention reaches half of the products' speed.
ON_CPU = Efficiency(
    memory=1.0, matmul=1.0, attention=0.5, link=1.0, step_s=1e-3, sequence_s=2e-4, all_reduce_s=0.0
)


def step_times(
    shape: ModelShape, device_name: str, num_ranks: int = 1
) -> tuple[StepTimeModel, str]:
    """A prior for the time model of a worker, and whose roofline it is.

    Args:
        device_name: as the GPU's driver says it; empty on a CPU.
        num_ranks: devices of the worker.
    """
    if not device_name:
        placement = Placement(shape, CPU_CORE, num_ranks, efficiency=ON_CPU)
        return placement.time_model(), "one CPU core" if num_ranks == 1 else "CPU cores"
    gpu = gpu_called(device_name)
    placement = Placement(shape, gpu or GPUS[UNKNOWN_GPU], num_ranks, efficiency=PLANNED)
    known = gpu.name if gpu else f"{UNKNOWN_GPU}, for {device_name!r} is not known"
    return placement.time_model(), known
