"""The memory of the KV cache.

Blocks are stored one after the other. Each has the keys and values of all layers, and the scales of
a quantised format (`kernels.kv_pages`). A block is one run of bytes, so transfers and the cold tier
need not know models and formats. Must not know which sequence holds a block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from disagg.engine.device.kv_shape import KVShape
from disagg.kernels.kv_pages import pages_of
from disagg.kvtransfer.slab import allocate_host


class KVCache:
    """The KV memory of one engine. It is zeroed, because unwritten slots must not be NaN.

    Attributes:
        pages: the view that kernels index.
        slab: the same memory with one row for each block.
        layout: fingerprint; equal strings mean that bytes of whole blocks are interchangeable.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self.block_nbytes = shape.block_nbytes
        # The layout names the device type, because a GPU leaves the unwritten end of a block as it
        # was, and attention on a CPU relies on zeros there.
        self.layout = f"{shape.layout}:{device.type}"
        nbytes = num_blocks * self.block_nbytes
        if device.type == "cpu":
            # Other workers read this memory twice as fast if it lies in huge pages.
            memory = torch.frombuffer(allocate_host(nbytes), dtype=torch.uint8)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.pages = pages_of(
            memory,
            shape.format,
            shape.num_layers,
            shape.num_own_heads,
            shape.block_size,
            shape.head_dim,
            shape.num_vectors,
            None if shape.layers is None else shape.layers.places,
            shape.states,
        )
        self.slab = self.pages.blocks

    @property
    def base_address(self) -> int:
        """The address of block 0 on the slab's device. Block i begins i * block_nbytes later."""
        return self.slab.data_ptr()

    @property
    def device_id(self) -> int:
        """-1 for host memory, otherwise the GPU's index, as `kvtransfer` numbers devices."""
        return self.slab.get_device()

    def begin_thread(self) -> None:
        """Make the slab's device the current device of the calling thread.

        A new thread has no CUDA context. Selecting device 0 does not create one, but an allocation
        does.
        """
        if self.slab.is_cuda:
            torch.cuda.set_device(self.slab.device)
            torch.zeros(1, device=self.slab.device)

    def read_block(self, block_id: int) -> bytes:
        """A copy of a block's bytes, after all work that was launched earlier."""
        block = self.slab[block_id].cpu()
        return ctypes.string_at(block.data_ptr(), self.block_nbytes)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """As `read_block`, one block after another. A GPU has `stream_copier.BlockReader`."""
        return [self.read_block(block_id) for block_id in block_ids]

    def copy_blocks(self, first: int, source: object, source_first: int, num_blocks: int) -> None:
        """Copy neighbouring blocks of another cache with the same layout, and wait for the copy.

        Workers of one process use it (`kvtransfer.local_transport`).
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
            raise ValueError(f"got {len(raw)} bytes for a block of {self.block_nbytes} bytes")
        block = self.slab[block_id]
        block.copy_(torch.frombuffer(bytearray(raw), dtype=block.dtype).view(block.shape))
