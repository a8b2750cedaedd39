"""A worker's memory for tests: a slab whose bytes say which block and generation they are of."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from disagg.kvtransfer.holds import issue_ticket
from disagg.kvtransfer.pulls import describe
from disagg.kvtransfer.slab import Slab
from disagg.kvtransfer.stamps import Stamps
from disagg.kvtransfer.ticket import KVTicket, Peer

LAYOUT = "llama/bf16/16"


class Memory:
    def __init__(
        self,
        worker_id: str,
        epoch: int = 1,
        *,
        num_blocks: int = 32,
        block_nbytes: int = 256,
        layout: str = LAYOUT,
    ) -> None:
        self.worker_id, self.epoch, self.block_nbytes = worker_id, epoch, block_nbytes
        self.raw = bytearray(num_blocks * block_nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))
        self.slab = Slab(address, num_blocks, block_nbytes, layout, owner=self.raw)
        self.stamps = Stamps(num_blocks, worker_id, epoch)
        for block_id in range(num_blocks):
            self.fill(block_id)

    def content(self, block_id: int, generation: int) -> bytes:
        word = (generation * 1_000_003 + block_id * 7919 + self.epoch) % (1 << 64)
        return word.to_bytes(8, "little") * (self.block_nbytes // 8)

    def fill(self, block_id: int) -> None:
        start = block_id * self.block_nbytes
        content = self.content(block_id, self.stamps.generations[block_id])
        self.raw[start : start + self.block_nbytes] = content

    def reuse(self, block_id: int) -> None:
        """What a block pool and the next step do: bump, then write."""
        self.stamps.generations[block_id] += 1
        self.fill(block_id)

    def clear(self) -> None:
        self.raw[:] = bytes(len(self.raw))

    def read(self, block_id: int) -> bytes:
        start = block_id * self.block_nbytes
        return bytes(self.raw[start : start + self.block_nbytes])

    def peer(self, transport: str = "local", agent: bytes = b"") -> Peer:
        """How this memory describes itself, without a transport."""
        return describe(self.worker_id, self.epoch, transport, self.slab, self.stamps, agent)

    def ticket(self, ticket_id: str, block_ids: Iterable[int]) -> KVTicket:
        return issue_ticket(
            self.peer(),
            self.stamps.generations,
            ticket_id=ticket_id,
            num_tokens=1,
            block_ids=tuple(block_ids),
        )

    def holds_copy(self, source: Memory, ticket: KVTicket, into: list[int], first: int = 0) -> bool:
        """Whether `into` holds exactly what the ticket was issued for."""
        named = zip(ticket.block_ids[first:], ticket.generations[first:], strict=True)
        return [self.read(block) for block in into] == [source.content(b, g) for b, g in named]
