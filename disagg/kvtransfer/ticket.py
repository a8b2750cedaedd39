"""`Peer`: how to reach a worker's slab. `KVTicket`: the blocks that hold a request's KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import TransferFailed
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
    """The KV of the first `num_tokens` tokens of a request is in `block_ids` of the source, but for
    that of `num_evicted` tokens among them, a number of whole blocks.

    A copy is valid only if the blocks' generations, read after the copy, still equal the ticket's.
    """

    ticket_id: str  # unique within an epoch of the source
    source_id: str  # Peer.worker_id
    epoch: int
    layout: str
    num_tokens: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # one per block
    num_evicted: int = 0
    foreign: bytes = b""  # of another engine's transfer, which has no blocks of ours


def issue_ticket(
    peer: Peer,
    generations: Sequence[int],
    *,
    ticket_id: str,
    num_tokens: int,
    block_ids: Sequence[int],
    num_evicted: int = 0,
) -> KVTicket:
    """A ticket for blocks of this worker with their current content.

    Args:
        peer: this worker's own.
        generations: this worker's stamp table, one entry per block of the slab.

    Raises:
        TransferFailed: no blocks, a block id that is not in the slab, or one named twice.
    """
    check_block_ids(block_ids, peer.num_blocks, f"the slab of {peer.worker_id}")
    return KVTicket(
        ticket_id=ticket_id,
        source_id=peer.worker_id,
        epoch=peer.epoch,
        layout=peer.layout,
        num_tokens=num_tokens,
        block_ids=tuple(block_ids),
        generations=tuple(generations[block_id] for block_id in block_ids),
        num_evicted=num_evicted,
    )


def check_block_ids(block_ids: Sequence[int], num_blocks: int, where: str) -> None:
    """Raises `TransferFailed` unless the ids are distinct blocks of a slab of `num_blocks`."""
    if not block_ids:
        raise TransferFailed(f"no block of {where} is named: there is nothing to copy")
    lowest, highest = min(block_ids), max(block_ids)
    if lowest < 0 or highest >= num_blocks:
        wrong = lowest if lowest < 0 else highest
        raise TransferFailed(f"block {wrong} is not in {where}, which has {num_blocks} blocks")
    if len(set(block_ids)) != len(block_ids):
        raise TransferFailed(f"a block of {where} is named twice")
