"""A prefix that was evicted everywhere comes back from the store, if that beats computing it.

Decides when to look and what to do with what was found. Whatever goes wrong ends in the same
move: the engine computes. Knows nothing of links, models or Redis. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from disagg.blocks import BlockHash
from disagg.decode_worker.entering import enter_or_end
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.messages import StoreCounts
from disagg.store.cold_tier import ColdTier, Fetch

ReadBlocks = Callable[[SequenceOf[int]], SequenceOf[bytes]]
WriteBlock = Callable[[int, bytes], None]
# (new tokens, tokens before them) -> seconds; a value, for it is called in the store's thread
PrefillTimes = Callable[[int, int], float]


@dataclass(slots=True, eq=False)
class _Lookup:
    sequence: Sequence
    fetch: Fetch
    num_here: int  # leading blocks that were found in this worker's own cache
    ends_s: float  # by then the blocks would have been computed


class ColdPrefixes:
    """Sequences that wait for the store's answer, and the way out for evicted blocks.

    Args:
        prefill_times: the step model as of now.
    """

    def __init__(
        self,
        engine: Engine,
        tier: ColdTier,
        read_blocks: ReadBlocks,
        write_block: WriteBlock,
        prefill_times: Callable[[], PrefillTimes],
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._read_blocks = read_blocks
        self._write_block = write_block
        self._prefill_times = prefill_times
        self._lookups: list[_Lookup] = []

    @property
    def num_arriving(self) -> int:
        return len(self._lookups)

    def counts(self) -> StoreCounts:
        """For `WorkerStatus`."""
        return self._tier.counts()

    def save(self, evicted: list[tuple[int, BlockHash]]) -> None:
        """Keep copies of blocks that are about to be overwritten. `Engine.save_evicted`."""
        names = [block_hash for _, block_hash in evicted]
        self._tier.offer_all(names, lambda kept: self._read_blocks([evicted[i][0] for i in kept]))

    def admit(self, sequence: Sequence, now: float) -> None:
        """Look for the rest of the sequence's prefix, or submit it at once.

        A store that is slower than predicted costs at most what computing would have cost; one
        that is away costs nothing.

        Raises:
            RequestError: as `Engine.submit`.
        """
        block_size = self._engine.pool.block_size
        # The last token is computed in any case: its logits are wanted.
        wanted = sequence.block_hashes[: (len(sequence.tokens) - 1) // block_size]
        num_here = len(self._engine.pool.match(wanted))
        missing = wanted[num_here:]
        times = self._prefill_times()

        def compute_s(num_blocks: int) -> float:
            return times(num_blocks * block_size, num_here * block_size)

        is_away = self._tier.is_away
        if is_away and missing:
            self._tier.probe(missing[0])
        if (
            not missing
            or is_away
            or self._tier.predicted_s(len(missing)) >= compute_s(len(missing))
        ):
            self._engine.submit(sequence)
            return
        self._engine.scheduler.number(sequence)
        fetch = self._tier.lookup(missing, compute_s)
        ends_s = min(now + compute_s(len(missing)), sequence.deadline_unix_s)
        self._lookups.append(_Lookup(sequence, fetch, num_here, ends_s))

    def advance(self, now: float) -> bool:
        """Let those in whose answer is there or too late. True while others wait."""
        self._tier.poll()
        waiting = []
        for lookup in self._lookups:
            if lookup.fetch.done:
                self._arrive(lookup)
            elif now >= lookup.ends_s:
                self._tier.cancel(lookup.fetch)
                enter_or_end(self._engine, lookup.sequence, self._engine.submit)
            else:
                waiting.append(lookup)
        self._lookups = waiting
        return bool(waiting)

    def cancel(self, request_id: str) -> bool:
        for lookup in self._lookups:
            if lookup.sequence.request_id == request_id:
                self._tier.cancel(lookup.fetch)
                self._lookups.remove(lookup)
                return True
        return False

    def take_waiting(self) -> list[Sequence]:
        """Give up those that wait for the store."""
        lookups, self._lookups = self._lookups, []
        for lookup in lookups:
            self._tier.cancel(lookup.fetch)
        return [lookup.sequence for lookup in lookups]

    def close(self) -> None:
        self._tier.close()

    def _arrive(self, lookup: _Lookup) -> None:
        """Put what was found into blocks and join; without any, or without room, compute."""
        sequence, blocks, pool = lookup.sequence, lookup.fetch.blocks, self._engine.pool
        held = pool.match(sequence.block_hashes[: lookup.num_here])
        if not blocks or len(held) < lookup.num_here:
            enter_or_end(self._engine, sequence, self._engine.submit)
            return
        pool.acquire(held)
        reserved = self._engine.reserve(len(blocks), sequence.arrival)
        if reserved is None:
            pool.release(held)
            enter_or_end(self._engine, sequence, self._engine.submit)
            return
        for block_id, block in zip(reserved, blocks, strict=True):
            self._write_block(block_id, block)
        sequence.block_ids = [*held, *reserved]
        sequence.num_computed = len(sequence.block_ids) * pool.block_size
        sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        enter_or_end(self._engine, sequence, self._engine.join)
