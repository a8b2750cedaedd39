"""Holds: blocks that a source keeps for the reader of a ticket; and the tickets themselves.

A hold ends when the reader has pulled the blocks, when the request is aborted, when it expires, or
at once if the source needs the memory. A hold that ends too early costs the reader a recomputation,
never a wrong token, because the stamps change when blocks are reused. Knows no transport and no
pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from disagg.errors import TransferFailed
from disagg.kvtransfer.ticket import KVTicket, Peer


@dataclass(frozen=True, slots=True)
class _Hold:
    block_ids: tuple[int, ...]
    expires_at: float


class Holds:
    """The open holds of a source. Every hold returns its blocks exactly once.

    Args:
        max_holds: one more breaks the oldest hold; the next `collect` returns its blocks.
    """

    def __init__(self, max_holds: int = 4096) -> None:
        self._max_holds = max_holds
        self._holds: dict[str, _Hold] = {}  # oldest first
        self._returned: list[tuple[int, ...]] = []
        self._next_expiry = float("inf")  # no hold expires earlier
        self.num_released = 0
        self.num_expired = 0
        self.num_broken = 0
        self.num_unknown = 0  # releases of tickets that are not held (any more)

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, and those waiting for `collect`."""
        held = sum(len(hold.block_ids) for hold in self._holds.values())
        return held + sum(map(len, self._returned))

    def has(self, ticket_id: str) -> bool:
        return ticket_id in self._holds

    def holders(self) -> list[tuple[int, ...]]:
        """The blocks of each hold, and of those that ended and wait for `collect`."""
        return [*(hold.block_ids for hold in self._holds.values()), *self._returned]

    def hold(self, ticket_id: str, block_ids: Sequence[int], now: float, ttl_s: float) -> None:
        """Keep `block_ids` until `release(ticket_id)` or for `ttl_s` seconds.

        Raises:
            TransferFailed: the ticket is held already; nothing changed.
        """
        if ticket_id in self._holds:
            raise TransferFailed(f"ticket {ticket_id} is held already; ticket ids are used once")
        while len(self._holds) >= self._max_holds:
            broken = self.break_oldest()
            if broken is not None:
                self._returned.append(broken)
        expires_at = now + ttl_s
        self._holds[ticket_id] = _Hold(tuple(block_ids), expires_at)
        self._next_expiry = min(self._next_expiry, expires_at)

    def release(self, ticket_id: str) -> bool:
        """End a hold, because the reader has the blocks or the request was aborted. The next
        `collect` returns the blocks.

        Returns False, and counts it, if the ticket is not held: released twice, expired, or never
        issued.
        """
        hold = self._holds.pop(ticket_id, None)
        if hold is None:
            self.num_unknown += 1
            return False
        self.num_released += 1
        self._returned.append(hold.block_ids)
        return True

    def expire_by(self, which: Callable[[str], bool], expires_at: float) -> None:
        """Shorten the holds of some tickets, chosen by their ids."""
        for ticket_id, hold in self._holds.items():
            if hold.expires_at > expires_at and which(ticket_id):
                self._holds[ticket_id] = replace(hold, expires_at=expires_at)
                self._next_expiry = min(self._next_expiry, expires_at)

    def collect(self, now: float) -> list[tuple[int, ...]]:
        """Blocks to give back to the pool, one entry per hold that ended since the last call."""
        if now >= self._next_expiry:
            self._expire(now)
        returned, self._returned = self._returned, []
        return returned

    def break_oldest(self) -> tuple[int, ...] | None:
        """End the oldest hold because memory is short. Returns its blocks at once."""
        if not self._holds:
            return None
        oldest = next(iter(self._holds))
        self.num_broken += 1
        return self._holds.pop(oldest).block_ids

    def _expire(self, now: float) -> None:
        expired = [key for key, hold in self._holds.items() if hold.expires_at <= now]
        self._returned.extend(self._holds.pop(key).block_ids for key in expired)
        self.num_expired += len(expired)
        self._next_expiry = min(
            (hold.expires_at for hold in self._holds.values()), default=float("inf")
        )


def issue_ticket(
    peer: Peer,
    generations: Sequence[int],
    *,
    ticket_id: str,
    num_tokens: int,
    block_ids: Sequence[int],
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
