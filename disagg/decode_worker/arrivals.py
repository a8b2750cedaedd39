"""The arriving door: a ticket becomes a sequence with its KV in place, or one to compute here.

Decides when to pull, which blocks can be skipped, and that whatever goes wrong ends in the same
move: submit the sequence and let the engine compute it. Knows nothing of links or models. Owned
by the engine's thread.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from disagg.decode_worker.entering import enter_or_end
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.errors import TransferFailed
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone, Transport

log = logging.getLogger(__name__)

# A source that freezes may let a transfer hang with it. A pull may take so long, and so many times
# what pulls from that source are predicted to take.
PULL_PATIENCE_S = 3.0
PULL_FACTOR = 4.0

# (source id, blocks) -> seconds
TransferTimes = Callable[[str, int], float]


def patience_s(predicted_s: float) -> float:
    """How long a pull may take that should take so long."""
    return PULL_PATIENCE_S + PULL_FACTOR * predicted_s


@dataclass(slots=True, eq=False)
class _Arrival:
    sequence: Sequence
    ticket: KVTicket
    patient_until_s: float = 0.0  # once its pull has begun
    held: list[int] = field(default_factory=list)  # leading blocks that were here already
    pulled: list[int] = field(default_factory=list)  # blocks that the transport fills
    is_given_up: bool = False  # nobody waits for the pull; its blocks come back when it ends


def _place(arrival: _Arrival) -> tuple[int, int]:
    return arrival.sequence.arrival


class Arrivals:
    """Sequences on their way in.

    Args:
        transfer_times: predictions as of now.
    """

    def __init__(self, engine: Engine, transport: Transport, transfer_times: TransferTimes) -> None:
        self._engine = engine
        self._transport = transport
        self._transfer_times = transfer_times
        self._waiting: list[_Arrival] = []  # for blocks; the source is the buffer meanwhile
        self._pulling: dict[int, _Arrival] = {}  # by pull id

    @property
    def num_arriving(self) -> int:
        return len(self._waiting) + sum(not each.is_given_up for each in self._pulling.values())

    @property
    def is_stuck(self) -> bool:
        """Some wait for blocks, and no pull under way will lead to any."""
        return bool(self._waiting) and all(each.is_given_up for each in self._pulling.values())

    def admit(self, sequence: Sequence, ticket: KVTicket) -> None:
        """Take in a sequence whose first `ticket.num_tokens` tokens have their KV elsewhere.

        Raises:
            RequestError: it is to be computed here, and `Engine.submit` refuses it.
        """
        pool, num_blocks = self._engine.pool, len(ticket.block_ids)
        is_sound = num_blocks == -(-ticket.num_tokens // pool.block_size) <= pool.num_blocks
        if is_sound and 0 < ticket.num_tokens < len(sequence.tokens):
            self._engine.scheduler.number(sequence)
            insort(self._waiting, _Arrival(sequence, ticket), key=_place)
        else:
            self._transport.release(ticket)
            self._engine.submit(sequence)

    def advance(self, now: float) -> bool:
        """Start the pulls there is room for. True while another look soon is worth it."""
        self._end_patience(now)
        while self._waiting and self._start(self._waiting[0], now):
            del self._waiting[0]
        return bool(self._pulling) or (bool(self._waiting) and not self._engine.has_work)

    def finish(self, done: PullDone) -> tuple[Sequence, KVTicket]:
        """A pull ended: the sequence joins, or is computed here. Returns what was pulled."""
        arrival = self._pulling.pop(done.pull_id)
        if arrival.is_given_up or done.error is not None:
            self._engine.pool.release([*arrival.held, *arrival.pulled])
        if not arrival.is_given_up:
            if done.error is None:
                self._join(arrival)
            else:  # the transport has told the source that the ticket is used up
                enter_or_end(self._engine, arrival.sequence, self._engine.submit)
        return arrival.sequence, arrival.ticket

    def cancel(self, request_id: str) -> bool:
        """Forget a sequence. Blocks that a transport may still write come back when it is done."""
        for arrival in self._pulling.values():
            if arrival.sequence.request_id == request_id and not arrival.is_given_up:
                arrival.is_given_up = True
                return True
        for arrival in self._waiting:
            if arrival.sequence.request_id == request_id:
                self._waiting.remove(arrival)
                self._transport.release(arrival.ticket)
                return True
        return False

    def take_waiting(self) -> list[Sequence]:
        """Give up those whose pull has not begun. Their tickets can be used elsewhere."""
        waiting, self._waiting = self._waiting, []
        return [arrival.sequence for arrival in waiting]

    def holders(self) -> Iterable[list[int]]:
        """Blocks held by sequences on their way in, for `Engine.check`."""
        return ([*each.held, *each.pulled] for each in self._pulling.values())

    def _start(self, arrival: _Arrival, now: float) -> bool:
        """Skip what is here, pull the rest. False: no room yet."""
        sequence, ticket, pool = arrival.sequence, arrival.ticket, self._engine.pool
        num_full = ticket.num_tokens // pool.block_size
        held: list[int] = []
        if self._engine.scheduler.enable_prefix_caching:
            held = pool.match(sequence.block_hashes[:num_full])
            pool.acquire(held)  # before reserving, which might evict them
        num_missing = len(ticket.block_ids) - len(held)
        pulled = self._engine.reserve(num_missing, sequence.arrival) if num_missing else []
        if pulled is None:
            pool.release(held)
            return False
        arrival.held, arrival.pulled = held, pulled
        predicted_s = self._transfer_times(ticket.source_id, num_missing)
        arrival.patient_until_s = min(sequence.deadline_unix_s, now + patience_s(predicted_s))
        if not pulled:
            self._transport.release(ticket)
            self._join(arrival)
            return True
        try:
            pull_id = self._transport.pull(ticket, len(held), pulled)
        except Exception as error:  # whatever the ticket says harms nobody else
            if not isinstance(error, TransferFailed):
                log.exception("The pull of %s could not begin.", ticket.ticket_id)
            pool.release([*held, *pulled])
            self._compute_here(arrival)
        else:
            self._pulling[pull_id] = arrival
        return True

    def _join(self, arrival: _Arrival) -> None:
        sequence = arrival.sequence
        sequence.block_ids = [*arrival.held, *arrival.pulled]
        sequence.num_computed = arrival.ticket.num_tokens
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        enter_or_end(self._engine, sequence, self._engine.join)

    def _compute_here(self, arrival: _Arrival) -> None:
        """The one move for everything that went wrong. Blocks found here are found again."""
        self._transport.release(arrival.ticket)
        enter_or_end(self._engine, arrival.sequence, self._engine.submit)

    def _end_patience(self, now: float) -> None:
        """Who cannot wait any longer goes to the engine, which ends those that are too late."""
        late = [each for each in self._waiting if now >= each.sequence.deadline_unix_s]
        for arrival in late:
            self._waiting.remove(arrival)
            self._compute_here(arrival)
        for arrival in self._pulling.values():
            if now >= arrival.patient_until_s and not arrival.is_given_up:
                arrival.is_given_up = True
                enter_or_end(self._engine, arrival.sequence, self._engine.submit)
