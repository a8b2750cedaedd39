"""The order of admission in an engine, and the blocks that are reserved for running sequences.

Running sequences grow by one block each `block_size` steps. If a new sequence took the last blocks,
the next step would have to preempt, and recomputing costs more than waiting: so one block per
running sequence is kept free. Remembers which sequences found too few blocks. Allocates no blocks.
"""

from __future__ import annotations

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.queues import Queues
from disagg.engine.sched.sequence import Sequence

_NOBODY = (1 << 62, 0)  # a place after every sequence


class AdmissionOrder:
    """The order in which `arrived` and `waiting` sequences are admitted.

    short: the oldest waiting one that found too few blocks in the last plan.
    """

    def __init__(self, pool: BlockPool, queues: Queues) -> None:
        self.short: Sequence | None = None
        self._pool = pool
        self._queues = queues
        self._refused = _NOBODY  # place of the oldest arrival that was refused since the last plan
        self._left_out: list[Sequence] = []  # found too few blocks in the last plan ...
        self._num_spare_then = 0  # ... when this many were available

    @property
    def _num_spare_blocks(self) -> int:
        """Blocks that are left if every running sequence begins one more."""
        return self._pool.num_free - len(self._queues.running)

    def leaves_room(self, num_blocks: int) -> bool:
        """Whether every running sequence could still begin one more block afterwards."""
        return num_blocks <= self._num_spare_blocks

    def may_reserve(self, num_blocks: int, arrival: tuple[int, int] | None) -> bool:
        """Whether imported KV may take so many blocks.

        An import does not overtake an older waiting sequence that is short of blocks; otherwise
        many imports could starve it. In turn, the next plan admits no sequence that is later than
        a refused import, which may ask again before every plan.

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

    def begin(self) -> None:
        """A plan begins to admit: sequences that found too few blocks may try again."""
        self.short = None
        self._left_out.clear()

    def end(self) -> None:
        """The plan admits no further sequence."""
        self._refused = _NOBODY

    def next_queue(self) -> list[Sequence]:
        """The queue whose head is the oldest sequence that may be admitted."""
        arrived, waiting = self._queues.arrived, self._queues.waiting
        if self.short or not waiting or waiting[0].arrival > self._refused:
            return arrived
        return arrived if arrived and arrived[0].arrival < waiting[0].arrival else waiting

    def may_decode(self, max_num_seqs: int) -> bool:
        """Whether the first arrived sequence has one token to compute, and there is a place for it.

        Older waiting sequences keep their places: it overtakes them only in tokens of the step.
        """
        queues = self._queues
        if not queues.arrived or queues.arrived[0].num_uncomputed != 1:
            return False
        num_older = queues.num_waiting_before(queues.arrived[0])
        return len(queues.running) + num_older < max_num_seqs

    def leave_out(self, sequence: Sequence) -> None:
        """The head of a queue found too few blocks."""
        self._left_out.append(sequence)
        self._num_spare_then = self._num_spare_blocks
        if not sequence.block_ids:
            self.short = sequence

    def put_back(self, sequence: Sequence) -> None:
        """A sequence was preempted. A later arrival must not take the freed blocks: it would be
        preempted for this sequence in turn."""
        if self.short is None or sequence.arrival < self.short.arrival:
            self.short = sequence

    def forget(self, sequence: Sequence) -> None:
        if self.short is sequence:
            self.short = None

    def may_admit(self) -> bool:
        """Whether the next plan may find blocks for a sequence that is not running."""
        if not (self._queues.waiting or self._queues.arrived):
            return False
        if self._left_out and self._num_spare_blocks > self._num_spare_then:
            return True
        queue = self.next_queue()
        return bool(queue) and queue[0] not in self._left_out
