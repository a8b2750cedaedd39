"""Stamps: per block a generation counter, by which a reader knows that its copy is intact.

The owner of a slab increments a block's generation before the block may be written for another use.
A reader copies blocks first and reads their generations afterwards. If they equal the ticket's, the
copy has the content that the ticket was issued for. This is a sequence lock whose writer never
waits.

The order matters on both sides: the owner's bump must be visible before the first new byte (the
engine bumps on the host before it launches the step that writes), and the reader's second read
must start after the copy has ended.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from disagg.errors import StartupError

GENERATION_NBYTES = 8


class Stamps:
    """A table of one 64-bit generation per block, at a fixed address in host memory.

    The first generation is drawn from (worker, epoch), so that a table of another process that
    happens to lie at the same address, or memory full of zeros, never looks like this one.

    Attributes:
        generations: the table; the engine's block pool increments its entries in place.
        address: of the first entry.
    """

    def __init__(self, num_blocks: int, worker_id: str, epoch: int) -> None:
        if num_blocks <= 0:
            raise StartupError(f"a stamp table needs at least one block, got {num_blocks}")
        first = first_generation(worker_id, epoch)
        self.generations: array[int] = array("Q", [first]) * num_blocks
        # An array with an exported buffer refuses to be resized, so the address stays true.
        self._pinned = memoryview(self.generations)
        self.nbytes = self._pinned.nbytes
        self.address = self.generations.buffer_info()[0]

    def of(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """The current generations of blocks."""
        generations = self.generations
        return tuple(generations[block_id] for block_id in block_ids)


def first_generation(worker_id: str, epoch: int) -> int:
    """The first generation of a worker's process: 63 bits, so increments never overflow."""
    digest = hashlib.blake2b(f"{epoch}/{worker_id}".encode(), digest_size=8, person=b"disagg-stamp")
    return int.from_bytes(digest.digest(), "little") >> 1
