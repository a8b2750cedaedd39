"""What a rank of an engine will be, decided before anything is loaded: device, KV, sizes of steps.

All ranks of a worker decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disagg.config import EngineConfig
from disagg.engine.device.check import (
    check_ranks_of,
    choose_max_model_len,
    choose_shape,
    without_graphs,
)
from disagg.engine.device.choices import check_quantization, choose_device, choose_dtype
from disagg.engine.device.gpu import GpuMemory, check_gpu, gpu_of
from disagg.engine.device.kv_shape import KVShape
from disagg.engine.device.memory_plan import LARGEST_STEP, MemoryPlan, plan_memory
from disagg.kernels.kv_pages import FORMATS
from disagg.models.description import ModelDescription
from disagg.models.share import Share


@dataclass(frozen=True)
class EnginePlan:
    """Attributes:
    config: without graphs where there are several ranks.
    gpu: the memory that it may use; None on a CPU.
    """

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    shape: KVShape
    max_model_len: int
    memory: MemoryPlan
    gpu: GpuMemory | None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        description: ModelDescription,
        share: Share,
        largest_step: tuple[int, int] = LARGEST_STEP,
    ) -> EnginePlan:
        """
        Args:
            largest_step: see `plan_memory`.

        Raises:
            ModelError, NotEnoughMemory, StartupError: as `build_engine`.
        """
        model = description.config
        check_ranks_of(config, model)
        max_model_len = choose_max_model_len(config, model)
        config = without_graphs(config)
        kind = choose_device(config)
        check_quantization(config, model, kind)
        device = gpu_of(share) if kind == "cuda" else torch.device(kind)
        gpu = GpuMemory(config, device) if kind == "cuda" else None
        dtype_name = choose_dtype(config, model, kind)
        shape = choose_shape(config, description, dtype_name, kind, share)
        dtype = FORMATS[dtype_name].dtype
        if gpu is not None:
            check_gpu(device, model, dtype)
        claim_nbytes = None if gpu is None else gpu.claim_nbytes
        memory = plan_memory(
            config, model, shape, max_model_len, dtype.itemsize, claim_nbytes, largest_step
        )
        return cls(config, device, dtype, shape, max_model_len, memory, gpu)

    def room_nbytes(self) -> int | None:
        """Bytes for KV that the weights, once loaded, leave on a GPU."""
        return None if self.gpu is None else self.gpu.left_nbytes() - self.memory.workspace_nbytes
