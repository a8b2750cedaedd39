"""A worker's memory for tests: a slab whose bytes say which block and generation they are of, and
which eighth of a whole block."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace

from disagg.kvtransfer.pulls import describe
from disagg.kvtransfer.slab import BlockPart, Slab, Stamps, begin_of, whole_nbytes
from disagg.kvtransfer.ticket import KVTicket, Peer, issue_ticket

LAYOUT = "llama/bf16/16"


class Memory:
    """written: whose generations the content is of; those of another rank's first one."""

    def __init__(
        self,
        worker_id: str,
        epoch: int = 1,
        *,
        num_blocks: int = 32,
        block_nbytes: int = 256,
        layout: str = LAYOUT,
        part: BlockPart | None = None,
    ) -> None:
        self.worker_id, self.epoch, self.block_nbytes = worker_id, epoch, block_nbytes
        self.raw = bytearray(num_blocks * block_nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))
        self.slab = Slab(address, num_blocks, block_nbytes, layout, owner=self.raw, part=part)
        self.stamps = self.written = Stamps(num_blocks, worker_id, epoch)
        for block_id in range(num_blocks):
            self.fill(block_id)

    def content(self, block_id: int, generation: int, like: Memory | None = None) -> bytes:
        """Of a block here, or of what another slab has of it."""
        slab = (like or self).slab
        first = generation * 1_000_003 + block_id * 7919 + self.epoch
        words = [(first + eighth * 104_729) % (1 << 64) for eighth in range(8)]
        times = whole_nbytes(slab) // 64
        whole = b"".join(word.to_bytes(8, "little") * times for word in words)
        return whole[begin_of(slab) : begin_of(slab) + slab.block_nbytes]

    def fill(self, block_id: int) -> None:
        start = block_id * self.block_nbytes
        content = self.content(block_id, self.written.generations[block_id])
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
        return describe(transport, self.slab, self.stamps, agent)

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
        copied = [source.content(block, generation, self) for block, generation in named]
        return [self.read(block) for block in into] == copied


def rank_memories(
    worker_id: str, num_ranks: int, *, num_heads: int = 8, epoch: int = 1
) -> list[Memory]:
    """Of a worker's ranks, of which only the first one's stamps are bumped.

    A whole block has 256 bytes, which the ranks divide as KV heads: into equal parts, of which some
    are the same if heads are too few.
    """
    head_nbytes = 256 // num_heads
    own, num_copies = max(1, num_heads // num_ranks), max(1, num_ranks // num_heads)
    memories = [
        Memory(
            f"{worker_id}.{rank}" if rank else worker_id,
            epoch,
            block_nbytes=own * head_nbytes,
            part=BlockPart(rank // num_copies * own * head_nbytes, 256, rank % num_copies),
        )
        for rank in range(num_ranks)
    ]
    for each in memories[1:]:
        each.written = memories[0].stamps
        for block_id in range(each.slab.num_blocks):
            each.fill(block_id)
    return memories


def peer_of(peers: list[Peer]) -> Peer:
    """A worker's record, from those of its ranks."""
    return replace(peers[0], ranks=tuple(peers[1:]))
