"""The plan of one rank of an engine: its settings and the sizes of steps, before it loads.

All ranks of a worker make the same plan.
"""

from __future__ import annotations

import torch

from disagg.config import EngineConfig
from disagg.engine.device.check import choose
from disagg.engine.device.gpu import GpuMemory, check_gpu, gpu_of
from disagg.kernels.kv_pages import FORMATS
from disagg.models.description import ModelDescription
from disagg.models.share import Share


class EnginePlan:
    """The settings of a rank, its device, and the sizes of steps.

    On a GPU, making it waits for memory that an ending process frees.

    Args:
        largest_step: see `plan_memory`.

    Attributes:
        gpu: the GPU memory that the rank may use; None on a CPU.

    Raises:
        ModelError, NotEnoughMemory, StartupError: as `build_engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        share: Share,
        largest_step: tuple[int, int],
    ) -> None:
        self.chosen = chosen = choose(config, description, share)
        self.device, self.gpu = torch.device(chosen.device), None
        if chosen.device == "cuda":
            self.device = gpu_of(share, config.ranks_per_node)
            for each in filter(None, (chosen, chosen.drafts)):
                check_gpu(self.device, each.model.config, FORMATS[each.dtype].dtype)
            self.gpu = GpuMemory(config, self.device)
        claim_nbytes = None if self.gpu is None else self.gpu.claim_nbytes
        self.memory = chosen.plan_memory(claim_nbytes, largest_step)

    def room_nbytes(self) -> int | None:
        """Bytes for KV on a GPU, once the weights are loaded; None on a CPU."""
        return None if self.gpu is None else self.gpu.left_nbytes() - self.memory.workspace_nbytes
