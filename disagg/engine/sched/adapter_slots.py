"""Which LoRA adapter is in which slot of the device. Knows no device.

A sequence has its adapter's slot from before it enters the engine until it ends, so a slot can be
given to another adapter only when none of its sequences runs. If all slots are in use, the one with
the fewest sequences is promised to the adapter that waits: it takes no new sequences, and changes
hands when its last one has ended. So the adapters in use cannot keep another one out for ever. Only
one slot is promised at a time, so that the others stay full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from disagg.engine.sched.sequence import Sequence


@dataclass(slots=True, eq=False)
class _Slot:
    """sequences: those that were given the slot; ended ones may still be among them.
    used: the time of its last use, in `take`s.
    awaited_by: the sequence whose adapter will get it.
    """

    digest: str = ""
    sequences: WeakSet[Sequence] = field(default_factory=WeakSet)
    used: int = 0
    awaited_by: Sequence | None = None


class AdapterSlots:
    """The slots of one worker.

    Args:
        is_running: whether a sequence is still on the worker, in any state.
    """

    def __init__(self, num_slots: int, is_running: Callable[[Sequence], bool]) -> None:
        self.is_running = is_running
        self._slots = [_Slot() for _ in range(num_slots)]
        self._num_taken = 0

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the adapters that sequences can get at once."""
        return tuple(each.digest for each in self._slots if each.digest and not self._awaited(each))

    def take(self, digest: str, sequence: Sequence) -> tuple[int, bool] | None:
        """Give a sequence the slot of its adapter.

        Returns the slot, and whether the adapter must be written there first. None: all slots are
        in use; call again later.
        """
        self._num_taken += 1
        found = self._find(digest, sequence)
        if found is None:
            return None
        slot = self._slots[found]
        is_new = slot.digest != digest or slot.awaited_by is not None
        if is_new:
            slot.digest, slot.awaited_by = digest, None
            slot.sequences.clear()
        slot.sequences.add(sequence)
        slot.used = self._num_taken
        return found, is_new

    def _find(self, digest: str, sequence: Sequence) -> int | None:
        open_to = []  # slots that are promised to no other adapter
        for index, slot in enumerate(self._slots):
            awaited = self._awaited(slot)
            if awaited == digest:
                return None if self._num_running(slot) else index
            if not awaited:
                if slot.digest == digest:
                    return index
                open_to.append(index)
        if not open_to:
            return None
        is_promised = len(open_to) < len(self._slots)
        busy = {index: self._num_running(self._slots[index]) for index in open_to}
        best = min(open_to, key=lambda index: (busy[index], self._slots[index].used))
        if not busy[best]:
            return best
        if not is_promised:
            self._slots[best].awaited_by = sequence
        return None

    def _awaited(self, slot: _Slot) -> str:
        """The digest of the adapter to which a slot is promised, while somebody waits for it."""
        waiting = slot.awaited_by
        if waiting is None or waiting.adapter is None or not self.is_running(waiting):
            slot.awaited_by = None
            return ""
        return waiting.adapter.digest

    def _num_running(self, slot: _Slot) -> int:
        return sum(map(self.is_running, slot.sequences))
