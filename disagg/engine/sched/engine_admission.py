"""Admission in an engine: which sequences begin to run, and how many blocks stay free.

Each running sequence grows by one block every `block_size` steps. If a new sequence took the last
blocks, the next step would have to preempt a sequence, and recomputing costs more than waiting. So
one block per running sequence is kept free. This module remembers which sequences found too few
blocks. The scheduler decides which sequence is preempted if none can continue.
"""

from __future__ import annotations

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.block_tables import find_prefix, give_blocks
from disagg.engine.sched.queues import Queues
from disagg.engine.sched.sequence import Sequence

_NOBODY = (1 << 62, 0)  # a place after every sequence


class EngineAdmission:
    """Moves `imported` and `waiting` sequences to `running`, in their order.

    short: the oldest waiting sequence that found too few blocks in the last plan.
    """

    def __init__(self, pool: BlockPool, queues: Queues, max_num_seqs: int) -> None:
        self.short: Sequence | None = None
        self._pool = pool
        self._queues = queues
        self._max_num_seqs = max_num_seqs
        self._refused = _NOBODY  # place of the oldest arrival that was refused since the last plan
        self._left_out: list[Sequence] = []  # found too few blocks in the last plan ...
        self._num_spare_then = 0  # ... when this many were available

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence that owns no blocks.

        Its cached tokens do not count as queued work. Otherwise the router would send the next turn
        of a conversation away from the worker that has cached the earlier turns.
        """
        num_cached = len(find_prefix(self._pool, sequence)) // self._pool.groups.num_groups
        num_cached *= self._pool.block_size
        self._queues.put(sequence, self._queues.waiting, num_cached)

    @property
    def _num_spare_blocks(self) -> int:
        """The number of blocks that are left if every running sequence begins one more row, and
        prompts take the blocks of windows that they will need."""
        running, groups = self._queues.running, self._pool.groups
        num_spare = self._pool.num_free - len(running) * groups.num_groups
        if groups.num_partial and self._queues.num_left > len(running):
            num_spare -= sum(map(self._num_coming, running))
        return num_spare

    def _num_coming(self, sequence: Sequence) -> int:
        """The blocks of windows that a running prompt will take."""
        groups, num_held = self._pool.groups, sequence.num_slots // self._pool.block_size
        num_rows = groups.num_rows(len(sequence.tokens))
        return groups.num_coming(num_rows, num_held, sequence.num_computed)

    def leaves_room(self, num_blocks: int) -> bool:
        """Whether every running sequence could begin one more block after so many were taken."""
        return num_blocks <= self._num_spare_blocks

    def may_reserve(self, num_blocks: int, arrival: tuple[int, int] | None) -> bool:
        """Whether imported KV may take so many blocks.

        An import does not overtake an older waiting sequence that is short of blocks; otherwise
        many imports could starve it. Likewise the next plan admits no sequence that is later than
        a refused import. A refused import may ask again before every plan.

        Args:
            arrival: the import's place in the queue; None counts as the latest.
        """
        short = self.short
        if short is not None and (arrival is None or short.arrival < arrival):
            return False
        if self.leaves_room(num_blocks):
            return True
        if arrival is not None and num_blocks <= self._pool.num_blocks:
            self._refused = min(arrival, self._refused)
        return False

    def join_decodes(self) -> list[Sequence]:
        """Move imported sequences that only decode to `running`, before prompts use the budget."""
        joined: list[Sequence] = []
        imported = self._queues.imported
        while self._may_decode():
            if not give_blocks(self._pool, imported[0], self.leaves_room):
                break
            joined.append(self._queues.admit(imported))
        return joined

    def admit(self, budget: int) -> list[Sequence]:
        """Move sequences to `running` while there are tokens, places and blocks.

        Sequences that found too few blocks in the last plan may try again.
        """
        admitted: list[Sequence] = []
        queues = self._queues
        self.short = None
        self._left_out.clear()
        while budget > 0 and self._has_place() and (queue := self._next_queue()):
            sequence = queue[0]
            if not give_blocks(self._pool, sequence, self.leaves_room):
                self._leave_out(sequence)
                if queue is queues.imported:
                    break
                continue
            admitted.append(queues.admit(queue))
            budget -= sequence.num_uncomputed
        return admitted

    def end(self) -> None:
        """Record that the plan admits no further sequence."""
        self._refused = _NOBODY

    def _has_place(self) -> bool:
        return len(self._queues.running) < self._max_num_seqs

    def _next_queue(self) -> list[Sequence]:
        """The queue whose head is the oldest sequence that may be admitted."""
        imported, waiting = self._queues.imported, self._queues.waiting
        if self.short or not waiting or waiting[0].arrival > self._refused:
            return imported
        return imported if imported and imported[0].arrival < waiting[0].arrival else waiting

    def _may_decode(self) -> bool:
        """Whether the first imported sequence has one token to compute and finds a place.

        Older waiting sequences keep their places; the imported one only gets its token first.
        """
        queues = self._queues
        if not queues.imported or queues.imported[0].num_uncomputed != 1:
            return False
        num_older = queues.num_waiting_before(queues.imported[0])
        return len(queues.running) + num_older < self._max_num_seqs

    def _leave_out(self, sequence: Sequence) -> None:
        """Record that the sequence, the head of a queue, found too few blocks."""
        self._left_out.append(sequence)
        self._num_spare_then = self._num_spare_blocks
        if not sequence.block_ids:
            self.short = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence back into its queue.

        A later arrival must not take the freed blocks, because it would then be preempted for this
        sequence.
        """
        if self.short is None or sequence.arrival < self.short.arrival:
            self.short = sequence

    def forget(self, sequence: Sequence) -> None:
        if self.short is sequence:
            self.short = None

    def may_admit(self, num_left: int) -> bool:
        """Whether the next plan may admit a sequence, with so many tokens for prompts."""
        if not (self._queues.waiting or self._queues.imported):
            return False
        if not (num_left and self._has_place()) and not self._may_decode():
            return False
        if self._left_out and self._num_spare_blocks > self._num_spare_then:
            return True
        queue = self._next_queue()
        return bool(queue) and queue[0] not in self._left_out
