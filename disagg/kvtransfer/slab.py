"""Where a worker's KV blocks lie: one run of bytes per block, one block after the other.

Knows addresses and sizes. Must not know what the bytes mean, nor who allocated them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.errors import StartupError

HOST = -1


@dataclass(frozen=True, slots=True)
class Slab:
    """Memory of `num_blocks` blocks; block i begins at `base_address + i * block_nbytes`.

    Args:
        layout: fingerprint of everything that must match for the bytes to be interchangeable.
        device_id: -1 for host memory, otherwise the GPU's index.
        owner: whatever frees the memory; kept alive as long as the slab is.

    Raises:
        StartupError: an address or a size that cannot be.
    """

    base_address: int
    num_blocks: int
    block_nbytes: int
    layout: str
    device_id: int = HOST
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.base_address <= 0 or self.num_blocks <= 0 or self.block_nbytes <= 0:
            raise StartupError(
                f"a slab needs a positive address, number of blocks and block size, got {self}"
            )
        if self.device_id < HOST:
            raise StartupError(f"device_id is -1 (host memory) or a GPU's index, got {self}")

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_nbytes

    def address(self, block_id: int) -> int:
        return self.base_address + block_id * self.block_nbytes
