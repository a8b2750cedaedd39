"""`Peer`: how to reach a worker's slab. `KVTicket`: the blocks that hold a request's KV."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.kvtransfer.slab import BlockPart


@dataclass(frozen=True, slots=True)
class Peer:
    """How to reach a slab of a worker. A restarted worker is a new peer: same id, new epoch."""

    worker_id: str
    epoch: int  # unique per process start
    transport: str  # "nixl" or "local"
    layout: str  # fingerprint of everything that must match for whole blocks to be interchangeable
    num_blocks: int
    block_nbytes: int
    base_address: int  # of block 0; block i begins at base_address + i * block_nbytes
    stamps_address: int  # of num_blocks 64-bit generations in host memory; of a first rank's only
    device_id: int  # -1: host memory, otherwise the GPU's index
    agent: bytes  # the transport's own connection record (NIXL agent metadata)
    node: str = ""  # equal for workers on one machine; "" if it is not known
    part: BlockPart | None = None  # that the slab has of whole blocks; None: all of them
    ranks: tuple[Peer, ...] = ()  # the other ranks of the worker; this is the first one's slab


@dataclass(frozen=True, slots=True)
class KVTicket:
    """The KV of the first `num_tokens` tokens of a request is in `block_ids` of the source.

    A copy is valid only if the blocks' generations, read after the copy, still equal the ticket's.
    """

    ticket_id: str  # unique within an epoch of the source
    source_id: str  # Peer.worker_id
    epoch: int
    layout: str
    num_tokens: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # one per block
