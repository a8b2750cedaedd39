"""Slots: for each running sequence, its row in the tensors that stay on the device.

A sequence keeps its slot from its first step until other sequences need it, so that a step writes
only what changes. The end of a sequence is not announced. When a slot is needed and none is free,
the slots of ended sequences are reclaimed. If there are none, the slots of sequences that are not
in this step are reclaimed, and these sequences get new ones with their next step. `enter` returns
the sequences whose rows must be written completely.

Knows no device. A device executes launched steps in order, so it has read a row for the previous
owner before the row is written for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from weakref import ref

from disagg.engine.sched.sequence import NO_SLOT, Sequence


class Slots:
    """Gives sequences numbers from 0 to `num_slots` - 1 as `Sequence.slot`. Used by one runner.

    num_slots: doubles when a step has more sequences; the tensors indexed by slot grow with it.
    """

    def __init__(self, num_slots: int = 1) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._owners: list[ref[Sequence] | None] = [None] * num_slots

    def enter(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """Give every sequence of a step a slot. Returns those that had none."""
        entered = [sequence for sequence in sequences if sequence.slot == NO_SLOT]
        for sequence in entered:
            if not self._free:
                self._reclaim(sequences)
            sequence.slot = slot = self._free.pop()
            self._owners[slot] = ref(sequence)
        return entered

    def owners(self) -> list[Sequence]:
        """The sequences that have slots."""
        found = [owner() for owner in self._owners if owner is not None]
        return [sequence for sequence in found if sequence is not None]

    def leave(self, sequences: SequenceOf[Sequence]) -> None:
        """Take the sequences' slots, so that they enter anew with their next step."""
        self._take([sequence.slot for sequence in sequences if sequence.slot != NO_SLOT])

    def _reclaim(self, sequences: SequenceOf[Sequence]) -> None:
        """Make at least one slot free; `sequences` keep their slots."""
        self._take([slot for slot, owner in enumerate(self._owners) if not owner or not owner()])
        if self._free:
            return
        staying = {sequence.slot for sequence in sequences}
        self._take([slot for slot in range(self.num_slots) if slot not in staying])
        if self._free:
            return
        self._free = list(reversed(range(self.num_slots, 2 * self.num_slots)))
        self._owners += [None] * self.num_slots
        self.num_slots *= 2

    def _take(self, slots: list[int]) -> None:
        for slot in slots:
            owner = self._owners[slot]
            sequence = owner() if owner else None
            if sequence is not None:
                sequence.slot = NO_SLOT
            self._owners[slot] = None
        self._free += reversed(slots)
