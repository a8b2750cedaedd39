"""The memory of the KV cache, and its size.

Blocks are stored one after the other, each with all layers, keys and values, and the scales of a
quantised format (`kernels.kv_pages`). A block is one run of bytes, so transfers and the cold tier
need to know nothing of models and formats. Must not know which sequence holds a block.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from disagg.config import EngineConfig
from disagg.errors import NotEnoughMemory, StartupError
from disagg.kernels.kv_pages import FORMATS, SCALE_NBYTES, KVFormat, format_of, pages_of
from disagg.kvtransfer.slab import allocate_host
from disagg.models.model_config import ModelConfig

LAYOUT_VERSION = 1
CPU_CACHE_NBYTES = 512 << 20  # unless set: enough to try a model, little enough for a laptop
CPU_MEMORY_SHARE = 8  # one part in so many may be used for one full-length sequence


@dataclass(frozen=True, slots=True)
class KVShape:
    """The format of a block: everything that must match for its bytes to be interchangeable."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    format: KVFormat
    fingerprint: str  # of the model

    @classmethod
    def of(cls, model: ModelConfig, fingerprint: str, block_size: int, format: KVFormat) -> KVShape:
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            block_size=block_size,
            head_dim=model.head_dim,
            format=format,
            fingerprint=fingerprint,
        )

    @property
    def block_nbytes(self) -> int:
        num_pages = 2 * self.num_layers * self.num_kv_heads
        return num_pages * self.format.page_nbytes(self.block_size, self.head_dim)

    @property
    def layout(self) -> str:
        shape = f"{self.num_layers}x2x{self.num_kv_heads}x{self.block_size}x{self.head_dim}"
        format = self.format.name
        if self.format.has_scales:
            format += f"+scale{8 * SCALE_NBYTES}"  # behind the values of each page
        return f"disagg-kv-{LAYOUT_VERSION}:{self.fingerprint}:{format}:{shape}"


def choose_format(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> KVFormat:
    """The KV format: the requested one; by default that in which the model computes.

    Args:
        dtype: of the model.

    Raises:
        StartupError: not supported with this dtype or on this device; lists the possible formats.
    """
    own = format_of(dtype)
    if config.kv_cache_dtype in ("auto", own.name):
        return own
    reason = f"values of a model in {own.name} are stored as they are, or with scales"
    asked = FORMATS[config.kv_cache_dtype]
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    scaled = [each for each in FORMATS.values() if each.has_scales]
    possible = [each.name for each in scaled if capability is None or capability >= each.capability]
    possible.insert(0, own.name)
    if capability is not None and capability < asked.capability:
        (major, minor), least = capability, "{}{}".format(*asked.capability)
        reason = f"this GPU is an sm_{major}{minor}, and {asked.name} needs an sm_{least} or later"
    if asked.name not in possible:
        raise StartupError(
            f"kv_cache_dtype = {config.kv_cache_dtype!r} does not go with dtype = {own.name!r} on"
            f" {device.type}: {reason}. Possible here: auto, {', '.join(possible)}.",
            param="kv_cache_dtype",
        )
    return asked


class KVCache:
    """The KV memory of one engine, zero-initialised, because unwritten slots must not be NaN.

    The memory is a slab.

    Attributes:
        pages: what kernels index.
        slab: one row for each block; the same memory.
        layout: fingerprint; equal strings mean interchangeable bytes.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self.block_nbytes = shape.block_nbytes
        # With the kind of device: a GPU leaves the unwritten end of a block as it was, and
        # attention on a CPU relies on zeros there.
        self.layout = f"{shape.layout}:{device.type}"
        nbytes = num_blocks * self.block_nbytes
        if device.type == "cpu":
            # Other workers read it from outside, twice as fast from huge pages.
            memory = torch.frombuffer(allocate_host(nbytes), dtype=torch.uint8)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.pages = pages_of(
            memory,
            shape.format,
            shape.num_layers,
            shape.num_kv_heads,
            shape.block_size,
            shape.head_dim,
        )
        self.slab = self.pages.blocks

    @property
    def base_address(self) -> int:
        """Of block 0, on the slab's device; block i begins i * block_nbytes further on."""
        return self.slab.data_ptr()

    @property
    def device_id(self) -> int:
        """-1 for host memory, otherwise the GPU's index (as `kvtransfer` counts)."""
        return self.slab.get_device()

    def begin_thread(self) -> None:
        """Make the slab's device that of the calling thread.

        A new thread has no CUDA context, and torch makes none for one that asks for device 0: an
        allocation does.
        """
        if self.slab.is_cuda:
            torch.cuda.set_device(self.slab.device)
            torch.zeros(1, device=self.slab.device)

    def read_block(self, block_id: int) -> bytes:
        """A copy of a block's bytes, after all work that was launched before."""
        block = self.slab[block_id].cpu()
        return ctypes.string_at(block.data_ptr(), self.block_nbytes)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """As `read_block`, one after another. On a GPU use `stream_copier.BlockReader`."""
        return [self.read_block(block_id) for block_id in block_ids]

    def copy_blocks(self, first: int, source: object, source_first: int, num_blocks: int) -> None:
        """Copy neighbouring blocks of another cache of the same layout. Returns when they are here.

        For workers of one process: `kvtransfer.local_transport`.
        """
        if not isinstance(source, KVCache) or source.layout != self.layout:
            raise TypeError(f"{source!r} is not a cache of layout {self.layout}")
        rows = source.slab[source_first : source_first + num_blocks]
        self.slab[first : first + num_blocks].copy_(rows)
        if self.slab.is_cuda:
            torch.cuda.synchronize(self.slab.device)

    def write_block(self, block_id: int, raw: bytes) -> None:
        """Replace a block's bytes.

        Raises:
            ValueError: `raw` is not one block long.
        """
        if len(raw) != self.block_nbytes:
            raise ValueError(f"{len(raw)} bytes for a block of {self.block_nbytes}")
        block = self.slab[block_id]
        block.copy_(torch.frombuffer(bytearray(raw), dtype=block.dtype).view(block.shape))


def choose_num_blocks(
    config: EngineConfig,
    shape: KVShape,
    max_model_len: int,
    room_nbytes: int | None,
    max_num_seqs: int,
) -> int:
    """How many blocks the cache has.

    Args:
        room_nbytes: of a GPU's memory, for KV; None on a CPU.
        max_num_seqs: that run at once.

    Raises:
        NotEnoughMemory: one sequence of `max_model_len` tokens does not fit.
    """
    num_needed = -(-max_model_len // shape.block_size)
    full_nbytes = num_needed * shape.block_nbytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        source = f"num_gpu_blocks_override = {num_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // shape.block_nbytes
        source = f"kv_cache_memory_bytes = {config.kv_cache_memory_bytes}"
    elif room_nbytes is not None:
        num_blocks = max(0, room_nbytes) // shape.block_nbytes
        source = (
            f"the {max(0, room_nbytes)} bytes that gpu_memory_utilization ="
            f" {config.gpu_memory_utilization:g} leaves beside the weights and the largest step"
        )
    else:
        allowed = _host_memory_nbytes() // CPU_MEMORY_SHARE
        nbytes = max(CPU_CACHE_NBYTES, full_nbytes if full_nbytes <= allowed else 0)
        num_blocks = min(nbytes // shape.block_nbytes, max_num_seqs * num_needed)
        source = f"the {CPU_CACHE_NBYTES} bytes that a CPU's cache has unless it is set"
    if num_blocks < num_needed:
        flag = _flag(config, on_gpu=room_nbytes is not None)
        raise NotEnoughMemory(
            f"One sequence of max_model_len = {max_model_len} tokens needs {num_needed} KV blocks"
            f" of {shape.block_size} tokens and {shape.block_nbytes} bytes ({shape.format.name}),"
            f" {full_nbytes} bytes in all; {source} give {num_blocks} blocks. Lower max_model_len"
            f" to {num_blocks * shape.block_size} or less, or raise {flag}"
            f"{_smaller_format(shape)}.",
            param=flag,
        )
    return num_blocks


def _flag(config: EngineConfig, on_gpu: bool) -> str:
    if config.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    if config.kv_cache_memory_bytes is None and on_gpu:
        return "gpu_memory_utilization"
    return "kv_cache_memory_bytes"


def _smaller_format(shape: KVShape) -> str:
    smaller = replace(shape, format=FORMATS["int8"])
    if shape.format.has_scales:
        return ""
    return f", or set kv_cache_dtype = int8 ({smaller.block_nbytes} bytes a block)"


def _host_memory_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
