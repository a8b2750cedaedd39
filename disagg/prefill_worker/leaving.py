"""The leaving door: what a finished prefill hands over, and how long its blocks are kept.

Decides when blocks of a sequence that left go back to the pool. Knows nothing of links or of who
reads the blocks. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from disagg.engine.engine import Engine
from disagg.engine.sequence import Sequence as EngineSequence
from disagg.kvtransfer.holds import Holds, issue_ticket
from disagg.kvtransfer.ticket import KVTicket, Peer

# A decode worker pulls when it has room. Past this the blocks are wanted here; the ticket then
# fails its stamp check and the prompt is computed where it is.
HOLD_TTL_S = 60.0
# Whoever was to bring the ticket to its reader may be dead. A reader that has it comes by then.
LOST_TTL_S = 1.0


class Leaving:
    """Blocks of sequences that left.

    Args:
        peer: this worker's own, which tickets name as their source.
        generations: the slab's stamp table.
    """

    def __init__(self, engine: Engine, peer: Peer, generations: Sequence[int]) -> None:
        self._engine = engine
        self._peer = peer
        self._generations = generations
        self._holds = Holds()

    @property
    def num_holds(self) -> int:
        return self._holds.num_holds

    def leave(self, sequence: EngineSequence, now: float) -> KVTicket:
        """Take over the blocks of a sequence that ended here and issue the claim check for them.

        The ticket covers the tokens with KV: all but the one that was just sampled. If there is
        none, for whatever error, the blocks are given back.
        """
        pool = self._engine.pool
        num_blocks = -(-sequence.num_computed // pool.block_size)
        owned, sequence.block_ids = sequence.block_ids, []
        kept, spare = owned[:num_blocks], owned[num_blocks:]
        pool.release(spare)
        ttl_s = min(HOLD_TTL_S, max(0.0, sequence.deadline_unix_s - now))  # nobody comes later
        try:
            ticket = issue_ticket(
                self._peer,
                self._generations,
                ticket_id=sequence.request_id,
                num_tokens=sequence.num_computed,
                block_ids=kept,
            )
            self._holds.hold(ticket.ticket_id, kept, now, ttl_s)
        except BaseException:
            pool.release(kept)
            raise
        return ticket

    def release(self, ticket_id: str) -> None:
        """The reader needs the blocks no longer."""
        self._holds.release(ticket_id)

    def hurry(self, is_lost: Callable[[str], bool], now: float) -> None:
        """Of those tickets, by id, nobody may know any more: keep their blocks a moment longer."""
        self._holds.expire_by(is_lost, now + LOST_TTL_S)

    def advance(self, now: float) -> bool:
        """Give back the blocks of holds that ended. False: there were none."""
        ended = self._holds.collect(now)
        for block_ids in ended:
            self._engine.pool.release(block_ids)
        return bool(ended)

    def break_oldest(self) -> None:
        """Give back the blocks of the oldest hold: work here cannot go on without."""
        broken = self._holds.break_oldest()
        if broken is not None:
            self._engine.pool.release(broken)

    def holders(self) -> Iterable[Sequence[int]]:
        """Blocks held for readers, for `Engine.check`."""
        return self._holds.holders()
