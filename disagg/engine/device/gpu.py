"""Whether the kernels run on a GPU, and an engine's stream and share of memory there."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from disagg.config import EngineConfig
from disagg.devices import LARGE_SHARED_NBYTES, what_triton_needs
from disagg.errors import NotEnoughMemory, StartupError
from disagg.models.model_config import ModelConfig
from disagg.models.share import Share

LEAST_CAPABILITY = 8, 0  # the first with bfloat16 and asynchronous copies to shared memory
# Largest vector of a head for which tiles of attention fit into that memory, and into less.
MOST_NBYTES, MOST_NBYTES_OF_SMALL = 512, 256
MOST_LATENT_NBYTES = 1152  # largest latent to which all heads attend: 576 values in 16 bits
# A worker that has just ended frees its GPU memory some seconds after its resources in Ray.
FREE_WAIT_S = 30.0
_POLL_S = 0.5


def check_gpu(device: torch.device, model: ModelConfig, dtype: torch.dtype) -> None:
    """Raise errors that Triton would raise only after minutes of loading.

    Raises:
        StartupError: the GPU is too old, or too small for this model's heads in this dtype, or
            Triton cannot compile kernels here.
    """
    if torch.version.hip is not None:
        return  # AMD GPUs have other limits, which nobody has tested
    found: Any = torch.cuda.get_device_properties(device)  # the type stubs lack some attributes
    capability = found.major, found.minor
    if capability < LEAST_CAPABILITY:
        raise StartupError(
            f"{found.name} has compute capability sm_{found.major}{found.minor}, and the kernels"
            " need sm_80 (A100, RTX 30) or later. Use another GPU, or set device = 'cpu'.",
            param="device",
        )
    is_small = found.shared_memory_per_block_optin < LARGE_SHARED_NBYTES
    most_nbytes = MOST_NBYTES_OF_SMALL if is_small else MOST_NBYTES
    head_dim = model.head_dim
    if model.latent is not None:
        most_nbytes, head_dim = MOST_LATENT_NBYTES, model.latent.key_dim
    vector_nbytes = head_dim * dtype.itemsize
    if vector_nbytes > most_nbytes or (is_small and dtype == torch.float32):
        wide = f"{str(dtype).removeprefix('torch.')} heads of {head_dim} values"
        raise StartupError(
            f"Attention with {wide} needs more shared memory than the"
            f" {found.shared_memory_per_block_optin >> 10} KB that {found.name} has per program."
            + (" Set dtype = 'bfloat16'." if dtype == torch.float32 else " Use another GPU."),
            param="dtype",
        )
    _begin_triton()


def _begin_triton() -> None:
    """Raise `StartupError` if Triton has no C compiler, or Python's headers are missing."""
    from disagg.kernels.gpu.compiler import start_compiler

    try:
        start_compiler()
    except Exception as error:
        needs = what_triton_needs() or "gcc or clang, and Python's headers"
        raise StartupError(
            f"Triton, which compiles the kernels, cannot begin: {error}. It needs {needs}."
        ) from error


def gpu_of(share: Share, ranks_per_node: int) -> torch.device:
    """The GPU of a rank: of the GPUs that the process sees, the one with the rank's number.

    On another node than the first rank's it is the only GPU that the process sees.

    Raises:
        StartupError: the process sees too few GPUs.
    """
    if share.num_ranks == 1:
        return torch.device("cuda")
    num_gpus = torch.cuda.device_count()
    is_near = share.rank < ranks_per_node
    num_needed = ranks_per_node if is_near else 1
    if num_needed > num_gpus:
        raise StartupError(
            f"A worker of tensor_parallel_size = {share.num_ranks} needs {ranks_per_node} GPUs"
            f"{' on each node' if ranks_per_node < share.num_ranks else ''}, and this rank sees"
            f" {num_gpus} of {num_needed}. Lower tensor_parallel_size, or make more GPUs visible"
            " (CUDA_VISIBLE_DEVICES).",
            param="tensor_parallel_size",
        )
    return torch.device("cuda", share.rank if is_near else 0)


def take_stream(device: torch.device) -> Callable[[], None]:
    """Give the calling thread a CUDA stream of its own, for all that it launches from now on.

    On the default stream kernels would wait for every library of the process that uses CUDA, and
    these for them. Does nothing on a CPU.

    Returns:
        Gives the stream to another thread instead, which calls it first.
    """
    stream = new_stream(device)
    if stream is None:
        return lambda: None
    torch.cuda.set_stream(stream)
    return partial(torch.cuda.set_stream, stream)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream that begins behind what was launched on the current one; None on a CPU."""
    if device.type == "cpu":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


class GpuMemory:
    """The GPU memory that one engine may use: the share `gpu_memory_utilization`, as in vLLM.

    Other engines, also of this process, may use the rest. If the number of KV blocks is set, all
    free memory may be used.

    Args:
        sleep: waits for memory that a process frees as it ends.

    Raises:
        NotEnoughMemory: less memory is free than the engine may use.
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
                f" {config.gpu_memory_utilization:g}): another process uses the rest. End that"
                " process (nvidia-smi lists it), or lower gpu_memory_utilization.",
                param="gpu_memory_utilization",
            )
        self.claim_nbytes = free if is_sized else claim

    def left_nbytes(self) -> int:
        """Bytes of the engine's memory that are left after its allocations.

        Torch keeps memory that it freed, such as that of weights before they were packed. This
        call gives it back to the device first.
        """
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_reserved(self._device) - self._reserved_nbytes
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(self.claim_nbytes - taken, free)
