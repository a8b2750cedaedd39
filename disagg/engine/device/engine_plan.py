"""The plan of one rank of an engine: its settings and the sizes of steps, before it loads.

All ranks of a worker make the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disagg.config import EngineConfig
from disagg.engine.device.check import Choices, choose
from disagg.engine.device.gpu import GpuMemory, check_gpu, gpu_of
from disagg.engine.device.memory_plan import LARGEST_STEP, MemoryPlan
from disagg.kernels.kv_pages import FORMATS
from disagg.models.description import ModelDescription
from disagg.models.share import Share


@dataclass(frozen=True)
class EnginePlan:
    """The settings of a rank, its device, and the sizes of steps.

    Attributes:
        gpu: the GPU memory that the rank may use; None on a CPU.
    """

    chosen: Choices
    device: torch.device
    memory: MemoryPlan
    gpu: GpuMemory | None

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        description: ModelDescription,
        share: Share,
        largest_step: tuple[int, int] = LARGEST_STEP,
    ) -> EnginePlan:
        """Make the plan. On a GPU it waits for memory that an ending process frees.

        Args:
            largest_step: see `plan_memory`.

        Raises:
            ModelError, NotEnoughMemory, StartupError: as `build_engine`.
        """
        chosen = choose(config, description, share)
        device, gpu = torch.device(chosen.device), None
        if chosen.device == "cuda":
            device = gpu_of(share, config.ranks_per_node)
            for each in filter(None, (chosen, chosen.drafts)):
                check_gpu(device, each.model.config, FORMATS[each.dtype].dtype)
            gpu = GpuMemory(config, device)
        claim_nbytes = None if gpu is None else gpu.claim_nbytes
        return cls(chosen, device, chosen.plan_memory(claim_nbytes, largest_step), gpu)

    def room_nbytes(self) -> int | None:
        """Bytes for KV on a GPU, once the weights are loaded; None on a CPU."""
        return None if self.gpu is None else self.gpu.left_nbytes() - self.memory.workspace_nbytes
