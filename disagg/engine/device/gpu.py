"""Whether the kernels run on a GPU, and the share of its memory that an engine may use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from disagg.config import EngineConfig
from disagg.errors import NotEnoughMemory, StartupError
from disagg.kernels.devices import LARGE_SHARED_NBYTES
from disagg.models.model_config import ModelConfig
from disagg.models.share import Share

LEAST_CAPABILITY = 8, 0  # bfloat16, and copies past the registers
# Largest vector of a head for which tiles of attention fit into it, and into less.
MOST_NBYTES, MOST_NBYTES_OF_SMALL = 512, 256
MOST_LATENT_NBYTES = 1152  # of what all heads attend to: 576 values in 16 bits
# A worker that has just ended frees its memory some seconds later than its place in Ray.
FREE_WAIT_S = 30.0
_POLL_S = 0.5


def check_gpu(device: torch.device, model: ModelConfig, dtype: torch.dtype) -> None:
    """Refuse what Triton would refuse after minutes of loading.

    Raises:
        StartupError: the GPU is too old, or too small for this model's heads in this dtype.
    """
    if torch.version.hip is not None:
        return  # AMD: Triton's limits are others, and nobody has tried
    found: Any = torch.cuda.get_device_properties(device)  # its type knows not all of them
    capability = found.major, found.minor
    if capability < LEAST_CAPABILITY:
        raise StartupError(
            f"{found.name} is an sm_{found.major}{found.minor}, and the kernels need an sm_80"
            " (A100, RTX 30) or later. Take another GPU; device = 'cpu' works without one.",
            param="device",
        )
    is_small = found.shared_memory_per_block_optin < LARGE_SHARED_NBYTES
    most_nbytes = MOST_NBYTES_OF_SMALL if is_small else MOST_NBYTES
    if model.latent is not None:
        most_nbytes = MOST_LATENT_NBYTES
    vector_nbytes = model.head_dim * dtype.itemsize
    if vector_nbytes > most_nbytes or (is_small and dtype == torch.float32):
        wide = f"{str(dtype).removeprefix('torch.')} heads of {model.head_dim} values"
        raise StartupError(
            f"Attention with {wide} needs more shared memory than the"
            f" {found.shared_memory_per_block_optin >> 10} KB of a program on {found.name}."
            + (" Set dtype = 'bfloat16'." if dtype == torch.float32 else " Take another GPU."),
            param="dtype",
        )


def gpu_of(share: Share, ranks_per_node: int) -> torch.device:
    """A rank's GPU: that of its number, of those that the process sees; on another node than the
    first rank's, the only one that it sees. Raises `StartupError`."""
    if share.num_ranks == 1:
        return torch.device("cuda")
    num_gpus = torch.cuda.device_count()
    is_near = share.rank < ranks_per_node
    num_needed = ranks_per_node if is_near else 1
    if num_needed > num_gpus:
        raise StartupError(
            f"A worker of tensor_parallel_size = {share.num_ranks} needs {ranks_per_node} GPUs"
            f"{' on each node' if ranks_per_node < share.num_ranks else ''}, and this rank sees"
            f" {num_gpus} of {num_needed}.",
            param="tensor_parallel_size",
        )
    return torch.device("cuda", share.rank if is_near else 0)


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
        """The rest of the claim, after the allocations of this engine.

        Torch keeps what it freed, such as the memory that weights took while they were packed;
        here it gives that back.
        """
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_reserved(self._device) - self._reserved_nbytes
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(self.claim_nbytes - taken, free)
