"""The GPU of an engine, and the share of its memory that the engine may use."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from disagg.config import EngineConfig
from disagg.errors import NotEnoughMemory, StartupError
from disagg.kernels.devices import gpus_here, why_no_gpu

# A worker that has just ended gives its memory back some seconds later than its place.
FREE_WAIT_S = 30.0
_POLL_S = 0.5


def choose_device(config: EngineConfig) -> torch.device:
    """Raises `StartupError` where no GPU can be used and one was asked for, or one is there."""
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if config.device == "cuda":
        raise StartupError(f"{why_no_gpu()} device = 'cpu' works without one.", param="device")
    if problem := gpus_here().problem:
        raise StartupError(f"{problem} device = 'cpu' works without a GPU.", param="device")
    return torch.device("cpu")


class GpuMemory:
    """What one engine may take of a GPU: `gpu_memory_utilization` of all of it, as vLLM means it.

    Others may have the rest, another engine of this process included. Where the number of KV blocks
    is set, all that is free may be taken.

    Args:
        sleep: waits for memory that a process gives back as it ends.

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
        """Of the claim, after what this engine has taken since."""
        taken = torch.cuda.memory_reserved(self._device) - self._reserved_nbytes
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(self.claim_nbytes - taken, free)
