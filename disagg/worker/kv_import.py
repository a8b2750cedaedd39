"""KV import: one state machine for KV from any source.

    wanted ──> reserved ──> moving ──> accepted
       └───────────┴───────────┴─────> computed

- wanted: the import waits for free blocks, for the source's answer, for the sequence's grammar, or
  for a transfer of the same blocks that is in progress;
- reserved: the cached blocks are held, and blocks for the others are allocated;
- moving: the source writes the blocks;
- accepted (`KVImport._accept`): the transfer succeeded, so the blocks belong to the sequence, or
  are cached under their hashes. For a pull, the transport has checked the stamps before
  (`kvtransfer/mover.py`);
- computed: the transfer failed or took too long. The sequence goes to the next tier, or the engine
  computes its prompt.

A source (`KVSource`) is one of three: a peer's ticket, for one sequence; an early ticket, for which
no sequence waits yet; or the blocks of a prompt that a `KVTier` (host memory, the store) has.
Blocks that a source may still write are freed only when its transfer ends, even if the sequence has
gone. Knows nothing of links or models. Owned by the engine's thread.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from disagg.blocks import BlockHash
from disagg.engine.engine import Engine
from disagg.engine.sched.block_tables import disown
from disagg.engine.sched.sequence import Sequence
from disagg.errors import DisaggError, TransferFailed, request_failed
from disagg.kv_groups import WantedPrefix
from disagg.kvtransfer.ticket import KVTicket
from disagg.kvtransfer.transport import PullDone, Transport
from disagg.messages import Prefetch, PullCounts
from disagg.time_model import StepTimeModel

log = logging.getLogger(__name__)

T = TypeVar("T")
PrefillTimes = Callable[[int, int], float]  # (new tokens, tokens before them) -> seconds
TransferTimes = Callable[[str, int], float]  # (source id, blocks) -> seconds

MAX_EARLY = 1024  # early pulls whose bytes are remembered

# If a source freezes, a transfer from it may hang. A pull may take this many seconds, plus this
# many times the predicted time of the pull.
PULL_PATIENCE_S = 3.0
PULL_FACTOR = 4.0


class KVSource(Protocol):
    """The KV of one import. Blocks are counted in the order of `KVGroups.needed`; no method waits.

    names: of the full blocks that it may have.
    num_tokens: tokens with KV in its blocks, of which the last may be partial. The source keeps
        them for this sequence, which may wait for free blocks. 0: full blocks for any sequence.
    answer_s: how long `find` may return None.
    """

    names: SequenceOf[BlockHash]
    num_tokens: int
    answer_s: float

    def find(self, first_block: int) -> int | None:
        """How many blocks it has from `first_block` on; None: not known yet."""
        ...

    def patience_s(self, num_blocks: int) -> float:
        """Seconds that a transfer of so many blocks may take before it is given up."""
        ...

    def begin(self, first_block: int, into: list[int]) -> Hashable | None:
        """Start writing blocks. Returns the key that reports the end; None: it has ended already.

        Raises:
            TransferFailed: nothing was started.
        """
        ...

    def drop(self) -> None:
        """Release the source: it will not be used."""
        ...


class KVTier(Protocol):
    """A tier behind the cache that stores blocks by hash. No method waits.

    num_under_way: copies in progress; poll often while there are any.
    """

    @property
    def num_under_way(self) -> int: ...

    def ask(self, wanted: WantedPrefix) -> KVSource | None:
        """A source for more of the prefix; None: it has no more, or computing is faster."""
        ...

    def poll(self) -> Iterable[tuple[Hashable, str | None]]:
        """Keys of the transfers that ended since the last call, each with its error or None."""
        ...


@dataclass(slots=True, eq=False)
class TicketSource:
    """Blocks in another worker's cache."""

    ticket: KVTicket
    names: SequenceOf[BlockHash]
    transport: Transport
    transfer_times: TransferTimes
    traceparent: str
    is_early: bool = False  # nothing is held for it
    early_nbytes: int = 0  # of its blocks, pulled with early tickets
    answer_s: float = math.inf
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.ticket.num_tokens

    def find(self, first_block: int) -> int:
        return len(self.ticket.block_ids) - first_block

    def patience_s(self, num_blocks: int) -> float:
        predicted_s = self.transfer_times(self.ticket.source_id, num_blocks)
        return PULL_PATIENCE_S + PULL_FACTOR * predicted_s

    def begin(self, first_block: int, into: list[int]) -> int:
        # The end of the pull releases the ticket at the source. Nothing is held for an early one.
        return self.transport.pull(self.ticket, first_block, into, releases=not self.is_early)

    def drop(self) -> None:
        if not self.is_early:
            self.transport.release(self.ticket)


@dataclass(slots=True, eq=False)
class _Import:
    sequence: Sequence | None  # None: no sequence waits for it (any more)
    source: KVSource | None  # None: no tier was asked yet
    tiers: tuple[KVTier, ...]  # to ask if this source fails
    until_s: float  # Unix seconds; then its sequence continues without this source
    held: list[int] = field(default_factory=list)  # leading blocks that were cached here
    reserved: list[int] = field(default_factory=list)  # blocks that the source writes

    def is_of(self, request_id: str) -> bool:
        return self.sequence is not None and self.sequence.request_id == request_id

    @property
    def has_ticket(self) -> bool:
        """Its source is a ticket for this sequence only."""
        return self.source is not None and self.source.num_tokens > 0

    def drop(self) -> None:
        if self.source is not None:
            self.source.drop()


def _place(each: _Import) -> tuple[int, int]:
    return each.sequence.arrival if each.sequence is not None else (0, 0)


class KVImport:
    """All imports of a worker, with their sequences, and prefetches without one.

    Args:
        transfer_times: predicted seconds of a pull.
        tiers: asked in this order for prompts without a ticket.
        prefill_times: predicted seconds of computing instead.

    Attributes:
        pull_counts: outcomes of pulls since the start, one entry for each lane (UCX's names, or
            ""). A new tuple when a pull ends, so that the status of every step can contain it
            without a copy.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        transfer_times: TransferTimes,
        tiers: SequenceOf[KVTier] = (),
        prefill_times: Callable[[], PrefillTimes] = lambda: StepTimeModel().prefill_s,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._transfer_times = transfer_times
        self._tiers = tuple(tiers)
        self._prefill_times = prefill_times
        self._queued: list[_Import] = []  # by priority, then by arrival
        self._moving: dict[Hashable, _Import] = {}
        self._pulls: dict[str, PullCounts] = {}  # by lane
        self.pull_counts: tuple[PullCounts, ...] = ()
        # Bytes of early pulls, by their last block, until the sequence comes that they are for.
        self._early_nbytes: dict[BlockHash, int] = {}
        self._is_full = False  # in the last `advance` one found too few free blocks

    @property
    def num_arriving(self) -> int:
        return len(self._queued) + sum(each.sequence is not None for each in self._moving.values())

    @property
    def is_stuck(self) -> bool:
        """Imports wait for blocks, and no transfer in progress will free any."""
        return bool(self._queued) and self._is_full and not self._is_awaited

    @property
    def _is_awaited(self) -> bool:
        """Whether a sequence waits for a transfer in progress."""
        return any(each.sequence is not None for each in self._moving.values())

    def admit(
        self, sequence: Sequence, ticket: KVTicket | None, now: float, traceparent: str = ""
    ) -> None:
        """Start the import of a sequence.

        Args:
            ticket: for the KV of its first `ticket.num_tokens` tokens; None: ask the tiers.

        Raises:
            RequestError: no import is needed, and `Engine.submit` refuses the sequence.
        """
        self._engine.scheduler.number(sequence)
        source = None if ticket is None else self._source_of(ticket, sequence, traceparent)
        tiers = self._tiers if ticket is None and sequence.prompt_logprobs is None else ()
        if source is None and self._engine.is_ready(sequence):
            self._next(sequence, tiers, now)
        else:
            self._queue(_Import(sequence, source, tiers, sequence.deadline_unix_s))

    def prefetch(self, asked: Prefetch, now: float) -> None:
        """Pull the blocks of an early ticket that are not cached here, if there is room.

        Each ticket of a prompt names all of its blocks so far, so one that arrives while an earlier
        one is being pulled can be skipped.
        """
        ticket, pool = asked.ticket, self._engine.pool
        num_rows, rest = divmod(ticket.num_tokens, pool.block_size)
        names = pool.groups.full_names(asked.block_hashes[: max(0, num_rows)])
        is_sound = 0 < len(ticket.block_ids) == len(names) and not (rest or ticket.num_evicted)
        if is_sound and pool.enable_prefix_caching:
            source = TicketSource(
                ticket,
                names,
                self._transport,
                self._transfer_times,
                asked.traceparent,
                is_early=True,
            )
            self._start(_Import(None, source, (), math.inf), now)

    def advance(self, now: float) -> bool:
        """Advance every import as far as possible. True: call again soon."""
        is_busy = False
        for tier in self._tiers:
            for move, error in tier.poll():
                self._finish(move, error, now)
            is_busy |= tier.num_under_way > 0
        for each in self._moving.values():
            if now >= each.until_s:
                self._pass_on(each, now)
        self._is_full = False
        if self._queued:
            wanted, self._queued = self._queued, []
            for each in wanted:
                if not self._start(each, now):
                    self._queued.append(each)
            is_busy |= bool(self._queued) and not self._engine.has_work
        return is_busy or bool(self._moving)

    def pull_ended(self, done: PullDone, now: float) -> tuple[TicketSource, Sequence | None]:
        """Accept or give up a pull that has ended. Returns its source and the sequence that waited
        for it."""
        sequence = self._moving[done.pull_id].sequence
        source = self._finish(done.pull_id, done.error, now)
        assert isinstance(source, TicketSource)
        if sequence is None and not source.is_early:
            self._count(done.lane, num_given_up=1)
        elif done.error is None:
            self._count(done.lane, num_ok=1, nbytes=done.nbytes, seconds=done.seconds)
            self._note_bytes(source, done.nbytes)
        elif done.is_torn:
            self._count(done.lane, num_torn=1)
        else:
            self._count(done.lane, num_failed=1)
        return source, sequence

    def _note_bytes(self, source: TicketSource, nbytes: int) -> None:
        """Remember the bytes of an early pull, and give them to the pull of their sequence."""
        early = self._early_nbytes
        if not source.is_early:
            source.early_nbytes = sum(early.pop(name, 0) for name in source.names) if early else 0
            return
        early[source.names[-1]] = nbytes
        if len(early) > MAX_EARLY:
            del early[next(iter(early))]

    def cancel(self, request_id: str) -> bool:
        """Forget a sequence. Returns whether it was here."""
        for each in self._moving.values():
            if each.is_of(request_id):
                each.sequence = None
                return True
        for each in self._queued:
            if each.is_of(request_id):
                self._queued.remove(each)
                each.drop()
                return True
        return False

    def take_waiting(self) -> list[Sequence]:
        """Remove and return the sequences that can start on another worker instead: those whose
        transfer has not begun, and those that load from a tier. Unused tickets stay valid."""
        wanted, self._queued = self._queued, []
        for each in wanted:
            if not each.has_ticket:
                each.drop()
        moving = [each for each in self._moving.values() if not each.has_ticket]
        given_up = [each.sequence for each in [*wanted, *moving] if each.sequence is not None]
        for each in moving:
            each.sequence = None
        return given_up

    def holders(self) -> Iterable[list[int]]:
        """Blocks held for imports, for `Engine.check`."""
        return ([*each.held, *each.reserved] for each in self._moving.values())

    def _count(self, lane: str, **more: float) -> None:
        before = self._pulls.get(lane, PullCounts(lane))
        sums = {name: getattr(before, name) + num for name, num in more.items()}
        self._pulls[lane] = msgspec.structs.replace(before, **sums)
        self.pull_counts = tuple(self._pulls.values())

    def _source_of(
        self, ticket: KVTicket, sequence: Sequence, traceparent: str
    ) -> TicketSource | None:
        """None: the ticket does not fit the sequence, and was released."""
        pool, num_tokens, num_evicted = self._engine.pool, ticket.num_tokens, ticket.num_evicted
        is_sound = 0 <= num_evicted < num_tokens < len(sequence.tokens)
        is_sound = is_sound and not num_evicted % pool.block_size
        is_sound = is_sound and (not num_evicted or pool.groups.can_evict)
        is_sound = is_sound and sequence.prompt_logprobs is None  # these need all computed here
        if is_sound:
            num_needed = pool.groups.num_needed(num_tokens - num_evicted)
            is_sound = len(ticket.block_ids) == num_needed <= pool.num_blocks
        if not is_sound:
            self._transport.release(ticket)
            return None
        is_named = pool.enable_prefix_caching and not num_evicted
        names = pool.groups.names(sequence.block_hashes, num_tokens) if is_named else []
        return TicketSource(ticket, names, self._transport, self._transfer_times, traceparent)

    def _queue(self, each: _Import) -> None:
        insort(self._queued, each, key=_place)

    def _start(self, each: _Import, now: float) -> bool:
        """Advance a wanted import as far as possible. False: it still waits."""
        engine, sequence, source = self._engine, each.sequence, each.source
        if now >= each.until_s:
            each.drop()
            self._pass_on(each, now)
            return True
        if self._is_full:
            return False  # an import that has to wait holds back all later ones
        if sequence is not None:
            is_ready = enter_or_end(engine, sequence, engine.is_ready)
            if not is_ready:
                return is_ready is None  # refused, and ended
        if source is None:
            self._pass_on(each, now)
            return True
        if self._is_coming(source, now):
            return False
        return self._reserve(each, source, now)

    def _reserve(self, each: _Import, source: KVSource, now: float) -> bool:
        """Hold the cached blocks and allocate the missing ones. False: it still waits."""
        pool, sequence = self._engine.pool, each.sequence
        found = pool.match(source.names)
        num_missing = source.find(len(found))
        if num_missing is None:
            return False
        pool.acquire(found)  # before reserving, which might evict them
        if not num_missing:
            source.drop()
            each.held = found
            self._accept(each, now)
            return True
        place = None if sequence is None else sequence.arrival
        reserved = self._engine.reserve(num_missing, place)
        if reserved is None:
            pool.release(found)
            # With a ticket, the source keeps the KV meanwhile. Other imports wait only if blocks
            # may be freed soon.
            waits = each.has_ticket or self._engine.scheduler.running or self._is_awaited
            if sequence is not None and waits:
                self._is_full = True
                return False
            self._pass_on(each, now)
            return True
        each.held, each.reserved = found, reserved
        self._begin(each, source, now)
        return True

    def _begin(self, each: _Import, source: KVSource, now: float) -> None:
        deadline_s = math.inf if each.sequence is None else each.sequence.deadline_unix_s
        each.until_s = min(deadline_s, now + source.patience_s(len(each.reserved)))
        try:
            move = source.begin(len(each.held), each.reserved)
        except Exception as error:  # a bad ticket must not affect other requests
            if not isinstance(error, TransferFailed):
                log.exception("KV could not begin to move.")
            if isinstance(source, TicketSource):
                self._count("", num_failed=1)
            source.drop()
            self._engine.pool.release([*each.held, *each.reserved])
            self._pass_on(each, now)
        else:
            if move is None:
                self._accept(each, now)
            else:
                self._moving[move] = each

    def _is_coming(self, source: KVSource, now: float) -> bool:
        """Whether a running import from the same kind of source brings the same blocks soon."""
        names = source.names
        for each in self._moving.values():
            if now < each.until_s and type(each.source) is type(source):
                coming = each.source.names
                last = len(coming) - 1  # its hash covers all blocks before it
                if 0 <= last < len(names) and names[last] == coming[last]:
                    return True
        return False

    def _finish(self, move: Hashable, error: str | None, now: float) -> KVSource | None:
        """A transfer ended: accept its blocks, or continue without them."""
        each = self._moving.pop(move)
        if error is None:
            self._accept(each, now)
        else:
            self._engine.pool.release([*each.held, *each.reserved])
            self._pass_on(each, now)
        return each.source

    def _accept(self, each: _Import, now: float) -> None:
        """Accept the blocks of a transfer that succeeded.

        From a ticket: the sequence joins the engine with them. Otherwise they are cached under
        their hashes, where any sequence finds them.
        """
        sequence, source, pool = each.sequence, each.source, self._engine.pool
        assert source is not None
        if sequence is not None and isinstance(source, TicketSource):
            blocks, num_tokens = (*each.held, *each.reserved), source.num_tokens
            sequence.num_computed, sequence.num_evicted = num_tokens, source.ticket.num_evicted
            sequence.block_ids = pool.groups.table(blocks, num_tokens - sequence.num_evicted)
            enter_or_end(self._engine, sequence, self._engine.join)
            return
        for block_id, name in zip(each.reserved, source.names[len(each.held) :], strict=False):
            pool.publish(block_id, name)
        pool.release([*each.held, *each.reserved])
        self._pass_on(each, now)

    def _pass_on(self, each: _Import, now: float) -> None:
        """Let the import's sequence continue, whether the import succeeded or failed."""
        sequence, each.sequence = each.sequence, None
        if sequence is not None:
            enter_or_end(self._engine, sequence, lambda it: self._next(it, each.tiers, now))

    def _next(self, sequence: Sequence, tiers: tuple[KVTier, ...], now: float) -> None:
        """Ask the next tier for the blocks of a prompt that are not cached here, or submit the
        sequence to the engine."""
        if tiers:
            pool, times = self._engine.pool, self._prefill_times()
            size, groups = pool.block_size, pool.groups
            # The last token is always computed, because its logits are needed.
            hashes = sequence.block_hashes[: (len(sequence.tokens) - 1) // size]
            num_here = groups.num_found(hashes, pool.__contains__)
            wanted = WantedPrefix(
                groups,
                hashes,
                num_here,
                pool.__contains__,
                lambda num_rows: times(num_rows * size, num_here * size),
            )
        for place, tier in enumerate(tiers, start=1):
            source = tier.ask(wanted)
            if source is not None:
                until_s = min(now + source.answer_s, sequence.deadline_unix_s)
                self._queue(_Import(sequence, source, tiers[place:], until_s))
                return
        self._engine.submit(sequence)


def enter_or_end(engine: Engine, sequence: Sequence, enter: Callable[[Sequence], T]) -> T | None:
    """Call `enter`, usually `engine.submit` or `engine.join`. If it refuses the sequence, end that.

    Any other failure also ends only the sequence, unless it is already in the engine: then the
    engine is broken, and the error is raised.
    """
    try:
        return enter(sequence)
    except Exception as error:
        if sequence in engine.scheduler:
            raise
        if not isinstance(error, DisaggError):
            error = request_failed(error)
        engine.pool.release(disown(sequence))
        engine.end(sequence, error)
        return None
