"""The arriving door: a ticket becomes a sequence with its KV in place, or one to compute here.

Decides when to pull, which blocks can be skipped, and that whatever goes wrong ends in the same
move: submit the sequence and let the engine compute it. Knows nothing of links or models. Owned
by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from disagg.decode_worker.entering import enter_or_end
from disagg.engine.engine import Engine
from disagg.engine.sequence import Sequence
from disagg.errors import TransferFailed
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone, Transport

PullReport = Callable[[Sequence, KVTicket, PullDone], None]


@dataclass(slots=True)
class _Arrival:
    sequence: Sequence
    ticket: KVTicket
    held: list[int] = field(default_factory=list)  # leading blocks that were here already
    pulled: list[int] = field(default_factory=list)  # blocks that the transport fills
    cancelled: bool = False


class Arrivals:
    """Sequences on their way in.

    Args:
        report: hears of every pull that ended, for traces and the transfer model.
    """

    def __init__(self, engine: Engine, transport: Transport, report: PullReport) -> None:
        self._engine = engine
        self._transport = transport
        self._report = report
        self._waiting: list[_Arrival] = []  # for blocks; the source is the buffer meanwhile
        self._pulling: dict[int, _Arrival] = {}  # by pull id

    @property
    def num_arriving(self) -> int:
        return len(self._waiting) + len(self._pulling)

    def admit(self, sequence: Sequence, ticket: KVTicket) -> None:
        """Take in a sequence whose first `ticket.num_tokens` tokens have their KV elsewhere."""
        num_blocks = -(-ticket.num_tokens // self._engine.pool.block_size)
        if not 0 < ticket.num_tokens < len(sequence.tokens) or num_blocks != len(ticket.block_ids):
            self._compute_here(_Arrival(sequence, ticket))
            return
        self._engine.scheduler.number(sequence)
        self._waiting.append(_Arrival(sequence, ticket))

    def advance(self, now: float) -> bool:
        """Start the pulls there is room for. True while another look soon is worth it."""
        while self._waiting:
            arrival = self._waiting[0]
            if now >= arrival.sequence.deadline_unix_s:
                self._compute_here(self._waiting.pop(0))  # where the engine will end it
                continue
            if not self._start(arrival):
                break
            self._waiting.pop(0)
        return bool(self._pulling) or (bool(self._waiting) and not self._engine.has_work)

    def finish(self, done: PullDone) -> None:
        """A pull ended: the sequence joins, or is computed here."""
        arrival = self._pulling.pop(done.pull_id)
        self._report(arrival.sequence, arrival.ticket, done)
        if arrival.cancelled:
            self._give_back(arrival)
        elif done.error is not None:
            self._compute_here(arrival)
        else:
            self._join(arrival)

    def cancel(self, request_id: str) -> bool:
        """Forget a sequence. Blocks that a transport may still write come back when it is done."""
        for arrival in self._pulling.values():
            if arrival.sequence.request_id == request_id:
                arrival.cancelled = True
                return True
        for arrival in self._waiting:
            if arrival.sequence.request_id == request_id:
                self._waiting.remove(arrival)
                self._transport.release(arrival.ticket)
                return True
        return False

    def holders(self) -> Iterable[list[int]]:
        """Blocks held by sequences on their way in, for `Engine.check`."""
        return ([*each.held, *each.pulled] for each in self._pulling.values())

    def _start(self, arrival: _Arrival) -> bool:
        """Skip what is here, pull the rest. False: no room yet."""
        sequence, ticket, pool = arrival.sequence, arrival.ticket, self._engine.pool
        num_full = ticket.num_tokens // pool.block_size
        held: list[int] = []
        if self._engine.scheduler.enable_prefix_caching:
            held = pool.match(sequence.block_hashes[:num_full])
            pool.acquire(held)  # before reserving, which might evict them
        pulled: list[int] = []
        num_missing = len(ticket.block_ids) - len(held)
        if num_missing:
            reserved = self._engine.reserve(num_missing, sequence.arrival)
            if reserved is None:
                pool.release(held)
                return False
            pulled = reserved
        arrival.held, arrival.pulled = held, pulled
        if not pulled:
            self._transport.release(ticket)
            self._join(arrival)
            return True
        try:
            pull_id = self._transport.pull(ticket, len(held), pulled)
        except TransferFailed:
            self._compute_here(arrival)
        else:
            self._pulling[pull_id] = arrival
        return True

    def _join(self, arrival: _Arrival) -> None:
        sequence = arrival.sequence
        sequence.block_ids = [*arrival.held, *arrival.pulled]
        sequence.num_computed = arrival.ticket.num_tokens
        enter_or_end(self._engine, sequence, self._engine.join)

    def _compute_here(self, arrival: _Arrival) -> None:
        """The one move for everything that went wrong. Blocks found here are found again."""
        self._give_back(arrival)
        self._transport.release(arrival.ticket)
        enter_or_end(self._engine, arrival.sequence, self._engine.submit)

    def _give_back(self, arrival: _Arrival) -> None:
        self._engine.pool.release([*arrival.held, *arrival.pulled])
        arrival.held, arrival.pulled = [], []
