"""KV export: tickets for the KV of finished prefills and for cached prefixes.

The blocks of a ticket are held until the reader has pulled them, the request is aborted, the hold
expires, or the blocks are needed here. A hold that ends too early costs the reader a recomputation,
never a wrong token, because the stamps change when blocks are reused. Blocks to which a running
step still writes are freed after that step (`Engine.release`). Knows nothing of links or readers.
Owned by the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from disagg.engine.engine import Engine
from disagg.engine.sched.block_tables import held_blocks
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.errors import TransferFailed, Unavailable
from disagg.kvtransfer.ticket import KVTicket, Peer, issue_ticket
from disagg.messages import GenerateRequest, HoldCounts

# A decode worker pulls when it has room. After this time the blocks are freed here. A later pull
# fails its stamp check, and the decode worker computes the prompt.
HOLD_TTL_S = 60.0
# The ingress that had the ticket may be dead. A reader that got the ticket pulls within this time.
LOST_TTL_S = 1.0
MAX_HOLDS = 4096  # one more breaks the oldest


@dataclass(frozen=True, slots=True)
class _Hold:
    block_ids: list[int]
    expires_s: float
    is_prefix: bool  # the blocks are cached here, too


class KVExport:
    """Issues tickets and holds their blocks. Every hold frees its blocks exactly once.

    Args:
        peer: this worker's own record, which tickets name as their source.
        generations: the slab's stamp table.

    Attributes:
        counts: how many holds have ended in which way. A new object when one ends, so that the
            status of every step can contain it without a copy.
    """

    def __init__(self, engine: Engine, peer: Peer, generations: Sequence[int]) -> None:
        self._engine = engine
        self._peer = peer
        self._generations = generations
        self._holds: dict[str, _Hold] = {}  # by ticket id, oldest first
        self._next_expiry_s = math.inf  # no hold expires earlier
        self._has_freed = False  # since the last `advance`
        self.counts = HoldCounts()

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def leave(self, sequence: EngineSequence, now: float) -> KVTicket:
        """Take over the blocks of a sequence that is handed over, and issue a ticket for them.

        The ticket covers all tokens with KV, all but the one that was just sampled, without those
        of the prompt that the request gives up. If it has given them up when it moved before, there
        are no more of them. If no ticket can be issued, the blocks are freed.
        """
        num_tokens, groups = sequence.num_computed, self._engine.pool.groups
        num_evicted, asked = sequence.num_evicted, sequence.sampling.kv_eviction
        table, sequence.block_ids = sequence.block_ids, []
        kept = [table[index] for index in groups.needed(num_tokens - num_evicted)]
        if asked is not None and groups.can_evict:
            num_left = sequence.num_prompt_tokens - num_evicted
            evicted = groups.evicted(num_left, asked.sinks, asked.window)
            del kept[evicted.start : evicted.stop]
            num_evicted += len(evicted) * groups.block_size
        self._engine.release([*{*held_blocks(table)}.difference(kept)])
        until_s = sequence.deadline_unix_s
        return self._hold(sequence.request_id, kept, num_tokens, now, until_s, num_evicted)

    def early_ticket(self, sequence: EngineSequence) -> KVTicket | None:
        """A ticket for the full blocks so far of a sequence that will be handed over; None: none.

        Without those of windows, most of which are not needed after the whole prompt, as those of a
        prompt that gives up some. Nothing is held for it. If the sequence ends first and its blocks
        are reused, the reader finds other stamps.
        """
        groups = self._engine.pool.groups
        num_full = sequence.num_computed // groups.block_size
        if not num_full or not groups.num_full or sequence.sampling.kv_eviction is not None:
            return None
        table, num_groups = sequence.block_ids, groups.num_groups
        return issue_ticket(
            self._peer,
            self._generations,
            ticket_id=f"{sequence.request_id}+{num_full}",
            num_tokens=num_full * groups.block_size,
            block_ids=[
                table[row * num_groups + group]
                for row in range(num_full)
                for group in range(groups.num_full)
            ],
        )

    def prefix_ticket(self, name: str, request: GenerateRequest, now: float) -> KVTicket:
        """A ticket for the prefix that is cached under the request's block hashes.

        The blocks stay cached, but are evicted first from now on: otherwise both caches would spend
        space on the same prefix.

        Args:
            name: of the ticket.

        Raises:
            Unavailable: no block of the prefix is cached any more.
        """
        pool = self._engine.pool
        num_rows = pool.groups.num_found(request.block_hashes, pool.__contains__)
        if not num_rows:
            raise Unavailable("The prefix is not cached any more.")
        num_tokens, until_s = num_rows * pool.block_size, request.deadline_unix_s
        found = pool.match(pool.groups.names(request.block_hashes, num_tokens))
        pool.acquire(found)
        return self._hold(name, found, num_tokens, now, until_s, is_prefix=True)

    def _hold(
        self,
        name: str,
        block_ids: list[int],
        num_tokens: int,
        now: float,
        until_s: float,
        num_evicted: int = 0,
        is_prefix: bool = False,
    ) -> KVTicket:
        """Issue a ticket and hold the blocks for it; on failure free them."""
        try:
            ticket = issue_ticket(
                self._peer,
                self._generations,
                ticket_id=name,
                num_tokens=num_tokens,
                block_ids=block_ids,
                num_evicted=num_evicted,
            )
            if name in self._holds:
                raise TransferFailed(f"ticket {name} is held already; ticket ids are used once")
        except BaseException:
            self._engine.release(block_ids)
            raise
        if len(self._holds) >= MAX_HOLDS:
            self.break_oldest()
        expires_s = min(now + HOLD_TTL_S, max(now, until_s))  # no reader comes after the deadline
        self._holds[name] = _Hold(block_ids, expires_s, is_prefix)
        self._next_expiry_s = min(self._next_expiry_s, expires_s)
        return ticket

    def release(self, ticket_id: str) -> None:
        """End the hold of a ticket: the reader has the blocks, or does not need them.

        A ticket that is not held (released twice, expired, or never issued) is only counted.
        """
        if ticket_id in self._holds:
            self._end(ticket_id, "num_released")
            self._has_freed = True
        else:
            self._count("num_unknown")

    def hurry(self, is_lost: Callable[[str], bool], now: float) -> None:
        """Shorten the holds of these tickets, by id: the ingress that had them may be dead."""
        expires_s = now + LOST_TTL_S
        for ticket_id, hold in self._holds.items():
            if hold.expires_s > expires_s and is_lost(ticket_id):
                self._holds[ticket_id] = replace(hold, expires_s=expires_s)
                self._next_expiry_s = min(self._next_expiry_s, expires_s)

    def advance(self, now: float) -> bool:
        """Free the blocks of expired holds. Returns whether a hold was released or has expired
        since the last call."""
        if now >= self._next_expiry_s:
            for ticket_id in [name for name, hold in self._holds.items() if hold.expires_s <= now]:
                self._end(ticket_id, "num_expired")
                self._has_freed = True
            left = (hold.expires_s for hold in self._holds.values())
            self._next_expiry_s = min(left, default=math.inf)
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def break_oldest(self) -> None:
        """End the oldest hold, that of a prefix first, because its blocks are needed here."""
        prefixes = (name for name, hold in self._holds.items() if hold.is_prefix)
        oldest = next(prefixes, None) or next(iter(self._holds), None)
        if oldest is not None:
            self._end(oldest, "num_broken")

    def holders(self) -> Iterable[Sequence[int]]:
        """Blocks held for readers, for `Engine.check`."""
        return [hold.block_ids for hold in self._holds.values()]

    def _end(
        self, ticket_id: str, how: Literal["num_released", "num_expired", "num_broken"]
    ) -> None:
        hold = self._holds.pop(ticket_id)
        self._engine.release(hold.block_ids, is_spent=hold.is_prefix)
        self._count(how)

    def _count(self, how: str) -> None:
        self.counts = msgspec.structs.replace(self.counts, **{how: getattr(self.counts, how) + 1})
