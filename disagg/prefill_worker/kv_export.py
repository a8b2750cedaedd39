"""KV export: tickets for the KV of finished prefills and for cached prefixes.

Holds the blocks of a ticket until the reader has pulled them, or the hold ends. Blocks to which a
running step still writes are freed after that step (`Engine.release`). Knows nothing of links or
readers. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.errors import Unavailable
from disagg.kvtransfer.holds import Holds, issue_ticket
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.messages import GenerateRequest, HoldCounts

# A decode worker pulls when it has room. After this time the blocks are freed here. A later pull
# fails its stamp check, and the decode worker computes the prompt.
HOLD_TTL_S = 60.0
# The ingress that had the ticket may be dead. A reader that got the ticket pulls within this time.
LOST_TTL_S = 1.0


class KVExport:
    """Issues tickets and holds their blocks.

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
        self._holds = Holds()
        self._prefix_holds = Holds()
        self.counts = HoldCounts()

    @property
    def num_holds(self) -> int:
        return self._holds.num_holds + self._prefix_holds.num_holds

    def leave(self, sequence: EngineSequence, now: float) -> KVTicket:
        """Take over the blocks of a sequence that is handed over, and issue a ticket for them.

        The ticket covers all tokens with KV: all but the one that was just sampled. If no ticket
        can be issued, the blocks are freed.
        """
        pool = self._engine.pool
        num_blocks = -(-sequence.num_computed // pool.block_size)
        owned, sequence.block_ids = sequence.block_ids, []
        kept, spare = owned[:num_blocks], owned[num_blocks:]
        self._engine.release(spare)
        until_s, num_tokens = sequence.deadline_unix_s, sequence.num_computed
        return self._hold(self._holds, sequence.request_id, kept, num_tokens, now, until_s)

    def early_ticket(self, sequence: EngineSequence) -> KVTicket | None:
        """A ticket for the full blocks so far of a sequence that will be handed over; None: none.

        Nothing is held for it. If the sequence ends first and its blocks are reused, the reader
        finds other stamps.
        """
        num_full = sequence.num_computed // self._engine.pool.block_size
        if not num_full:
            return None
        return issue_ticket(
            self._peer,
            self._generations,
            ticket_id=f"{sequence.request_id}+{num_full}",
            num_tokens=num_full * self._engine.pool.block_size,
            block_ids=sequence.block_ids[:num_full],
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
        found = pool.match(request.block_hashes)
        if not found:
            raise Unavailable("The prefix is not cached any more.")
        pool.acquire(found)
        num_tokens = len(found) * pool.block_size
        return self._hold(self._prefix_holds, name, found, num_tokens, now, request.deadline_unix_s)

    def _hold(
        self,
        holds: Holds,
        name: str,
        block_ids: list[int],
        num_tokens: int,
        now: float,
        until_s: float,
    ) -> KVTicket:
        """Issue a ticket and hold the blocks for it; on failure free them."""
        ttl_s = min(HOLD_TTL_S, max(0.0, until_s - now))  # no reader comes after the deadline
        try:
            ticket = issue_ticket(
                self._peer,
                self._generations,
                ticket_id=name,
                num_tokens=num_tokens,
                block_ids=block_ids,
            )
            holds.hold(name, block_ids, now, ttl_s)
        except BaseException:
            self._engine.release(block_ids)
            raise
        return ticket

    def release(self, ticket_id: str) -> None:
        """End the hold of a ticket: the reader has the blocks, or does not need them."""
        (self._prefix_holds if self._prefix_holds.has(ticket_id) else self._holds).release(
            ticket_id
        )
        self._count()

    def hurry(self, is_lost: Callable[[str], bool], now: float) -> None:
        """Shorten the holds of these tickets, by id: the ingress that had them may be dead."""
        for holds in (self._holds, self._prefix_holds):
            holds.expire_by(is_lost, now + LOST_TTL_S)

    def advance(self, now: float) -> bool:
        """Free the blocks of holds that have ended. False: there were none."""
        ended, passed_on = self._holds.collect(now), self._prefix_holds.collect(now)
        for block_ids in ended:
            self._engine.release(block_ids)
        for block_ids in passed_on:
            self._engine.release(block_ids, is_spent=True)
        if not (ended or passed_on):
            return False
        self._count()
        return True

    def break_oldest(self) -> None:
        """Free the blocks of the oldest hold, because no sequence here can continue otherwise."""
        broken = self._prefix_holds.break_oldest() or self._holds.break_oldest()
        if broken is not None:
            self._engine.release(broken)
            self._count()

    def holders(self) -> Iterable[Sequence[int]]:
        """Blocks held for readers, for `Engine.check`."""
        return [*self._holds.holders(), *self._prefix_holds.holders()]

    def _count(self) -> None:
        holds, prefix_holds = self._holds, self._prefix_holds
        self.counts = HoldCounts(
            holds.num_released + prefix_holds.num_released,
            holds.num_expired + prefix_holds.num_expired,
            holds.num_broken + prefix_holds.num_broken,
            holds.num_unknown + prefix_holds.num_unknown,
        )
