"""The queues of an engine: running sequences, those whose KV is imported, and waiting ones.

Keeps order and counts; decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from disagg.engine.sched.block_pool import require
from disagg.engine.sched.sequence import Sequence
from disagg.errors import RequestError
from disagg.kv_groups import NO_BLOCK, KVGroups


def _by_arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival


class Queues:
    """Three lists, each ordered by priority and then by arrival. The list objects never change.

    num_queued_tokens: uncomputed tokens of imported and waiting sequences, without the tokens that
        were cached when the sequence was queued.
    num_computed, num_left: computed and uncomputed tokens of running sequences, kept by `advance`.
    """

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.imported: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}
        self.num_queued_tokens = self.num_computed = self.num_left = 0
        self._next_arrival = 0

    def number(self, sequence: Sequence) -> None:
        """Give a sequence its place in the order of arrival, unless it has one."""
        priority, number = sequence.arrival
        if number < 0:
            sequence.arrival = (priority, self._next_arrival)
            self._next_arrival += 1

    def check_new(self, sequence: Sequence) -> None:
        """Raise `RequestError` if another sequence here has the same request id."""
        if sequence.request_id in self.by_id:
            raise RequestError(f"Request {sequence.request_id!r} is already running here.")

    def put(self, sequence: Sequence, queue: list[Sequence], num_cached: int = 0) -> None:
        """Insert a sequence into `imported` or `waiting`.

        Args:
            num_cached: number of its leading tokens that are cached, and so probably not computed.
        """
        insort(queue, sequence, key=_by_arrival)
        sequence.num_queued = sequence.num_uncomputed - num_cached
        self.num_queued_tokens += sequence.num_queued

    def admit(self, queue: list[Sequence]) -> Sequence:
        """Move the head of a queue to `running`."""
        sequence = queue.pop(0)
        self.num_queued_tokens -= sequence.num_queued
        insort(self.running, sequence, key=_by_arrival)
        self._count(sequence, 1)
        return sequence

    def num_waiting_before(self, sequence: Sequence) -> int:
        """How many waiting sequences are older."""
        return bisect_left(self.waiting, sequence.arrival, key=_by_arrival)

    def split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences with one token to compute, and the others; the oldest first."""
        if self.num_left == len(self.running):  # each has at least one token to compute
            return [*self.running], []
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for each in self.running:
            (decodes if len(each.tokens) - each.num_computed == 1 else prefills).append(each)
        return decodes, prefills

    def advance(self, num_computed: int, num_gained: int) -> None:
        """Count computed and new tokens of running sequences."""
        self.num_computed += num_computed
        self.num_left += num_gained - num_computed

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_computed += sign * sequence.num_computed
        self.num_left += sign * sequence.num_uncomputed

    def pop_latest(self) -> Sequence:
        """Remove and return the least urgent sequence that owns blocks; of several, the latest."""
        running, imported = self.running, self.imported
        if not imported or (running and running[-1].arrival > imported[-1].arrival):
            self._count(running[-1], -1)
            return running.pop()
        victim = imported.pop()
        self.num_queued_tokens -= victim.num_queued
        return victim

    def forget(self, sequence: Sequence) -> None:
        del self.by_id[sequence.request_id]
        for queue in (self.running, self.imported, self.waiting):
            place = bisect_left(queue, sequence.arrival, key=_by_arrival)
            if place < len(queue) and queue[place] is sequence:
                del queue[place]
                if queue is self.running:
                    self._count(sequence, -1)
                else:
                    self.num_queued_tokens -= sequence.num_queued
                return

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences."""
        sequences = list(self.by_id.values())
        for queue in (self.running, self.imported, self.waiting, self.by_id):
            queue.clear()
        self.num_queued_tokens = self.num_computed = self.num_left = 0
        return sequences

    def check(self, groups: KVGroups) -> None:
        """Recount everything, including each sequence's blocks.

        Raises:
            AssertionError: names the first difference.
        """
        queued = [*self.imported, *self.waiting]
        num_queued_tokens = sum(sequence.num_queued for sequence in queued)
        require(num_queued_tokens == self.num_queued_tokens, "queued tokens are miscounted")
        everyone = [*self.running, *queued]
        known = self.by_id.values()
        require(
            sorted(map(id, everyone)) == sorted(map(id, known)),
            "the queues and the sequences by request id differ",
        )
        for queue in (self.running, self.imported, self.waiting):
            arrivals = [sequence.arrival for sequence in queue]
            require(arrivals == sorted(set(arrivals)), "a queue is not in order")
        for sequence in everyone:
            _check(sequence, groups)
        num_computed = sum(sequence.num_computed for sequence in self.running)
        require(num_computed == self.num_computed, "computed tokens are miscounted")
        num_left = sum(sequence.num_uncomputed for sequence in self.running)
        require(num_left == self.num_left, "tokens to compute are miscounted")
        holding = [sequence for sequence in self.waiting if sequence.block_ids]
        require(not holding, f"waiting sequences hold blocks: {holding}")


def _misplaced(sequence: Sequence, num_rows: int, groups: KVGroups) -> str:
    """What is wrong with the blocks of windows and states; empty if they are where tokens see
    them."""
    present = {i for i, block_id in enumerate(sequence.block_ids) if block_id != NO_BLOCK}

    def seen(num_tokens: int, num_kv_groups: int) -> set[int]:
        return {
            row * groups.num_groups + group
            for group in range(num_kv_groups)
            for row in range(groups.first_row(group, num_tokens), num_rows)
        }

    wanted = seen(sequence.num_computed, groups.num_groups - groups.num_states)
    if sequence.num_computed:
        wanted.update(groups.of_state((sequence.num_computed - 1) // groups.block_size))
    if not wanted <= present:
        return "a block is missing"
    spare = present - seen(sequence.num_published * groups.block_size, groups.num_groups)
    if any(i % groups.num_groups >= groups.num_full for i in spare):
        return "a block of a window or state is held that no token sees, or none yet"
    return ""


def _check(sequence: Sequence, groups: KVGroups) -> None:
    table, num_groups = sequence.block_ids, groups.num_groups
    num_rows, rest = divmod(sequence.num_slots - sequence.num_evicted, groups.block_size)
    end = num_rows * num_groups
    num_foreseen = len(sequence.tokens) + len(sequence.draft)
    if rest or end > len(table) or (end < len(table) and not groups.num_partial):
        difference = "slots are miscounted"
    elif groups.num_partial and (missing := _misplaced(sequence, num_rows, groups)):
        difference = missing
    elif not 0 <= sequence.num_computed <= sequence.num_slots:
        difference = "KV without slots"
    elif sequence.num_uncomputed <= 0:
        difference = "nothing left to compute"
    elif sequence.draft and num_foreseen >= sequence.max_num_tokens:
        difference = "its draft goes beyond its end"
    else:
        return
    raise AssertionError(f"{sequence}: {difference}")
