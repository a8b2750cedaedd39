"""The share of a GPU's memory that an engine may use."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from disagg.config import EngineConfig
from disagg.errors import NotEnoughMemory

# A worker that has just ended frees its memory some seconds later than its place in Ray.
FREE_WAIT_S = 30.0
_POLL_S = 0.5


class GpuMemory:
    """The memory of a GPU that one engine may use: `gpu_memory_utilization` of all of it, as in
    vLLM.

    Others may use the rest, including another engine of this process. If the number of KV blocks is
    set, all free memory may be used.

    Args:
        sleep: waits for memory that a process frees as it ends.

    Raises:
        NotEnoughMemory: less is free.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device = device
        self._reserved_nbytes = torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        is_sized = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
        claim = int(config.gpu_memory_utilization * total)
        for _ in range(0 if is_sized else int(FREE_WAIT_S / _POLL_S)):
            if free >= claim:
                break
            sleep(_POLL_S)
            free, total = torch.cuda.mem_get_info(device)
        if not is_sized and free < claim:
            raise NotEnoughMemory(
                f"{torch.cuda.get_device_name(device)} has {free / 1e9:.1f} of {total / 1e9:.1f} GB"
                f" free, and a worker claims {claim / 1e9:.1f} (gpu_memory_utilization ="
                f" {config.gpu_memory_utilization:g}): another process fills it. End that one"
                " (nvidia-smi lists them), or lower gpu_memory_utilization.",
                param="gpu_memory_utilization",
            )
        self.claim_nbytes = free if is_sized else claim

    def left_nbytes(self) -> int:
        """The rest of the claim, after the allocations of this engine."""
        taken = torch.cuda.memory_reserved(self._device) - self._reserved_nbytes
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(self.claim_nbytes - taken, free)
