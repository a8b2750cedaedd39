"""A sequence keeps its slot while it runs, and no two sequences of a step share one."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import NO_SLOT, Sequence
from tests.engine.workload import new_sequence


def new_sequences(num: int) -> list[Sequence]:
    return [new_sequence((1, 2), 4) for _ in range(num)]


def test_a_slot_stays_while_its_sequence_runs() -> None:
    slots = Slots(4)
    running = new_sequences(3)
    assert slots.enter(running) == running
    before = [sequence.slot for sequence in running]
    later = new_sequences(1)
    assert slots.enter([*running, *later]) == later
    assert [sequence.slot for sequence in running] == before
    assert sorted(sequence.slot for sequence in running + later) == [0, 1, 2, 3]


def test_who_is_gone_leaves_a_slot_before_anybody_else_loses_one() -> None:
    slots = Slots(3)
    gone, away, running = new_sequences(3)
    slots.enter([gone, away, running])
    place = gone.slot
    del gone
    gc.collect()
    (new,) = new_sequences(1)
    slots.enter([running, new])
    assert new.slot == place and away.slot != NO_SLOT


def test_who_was_left_out_gives_way_and_enters_again() -> None:
    slots = Slots(2)
    away, running, new = new_sequences(3)
    slots.enter([away, running])
    assert slots.enter([running, new]) == [new]
    assert away.slot == NO_SLOT
    assert slots.enter([away, running]) == [away], "whoever keeps tensors must write its row again"
    assert new.slot == NO_SLOT


def test_a_step_of_more_sequences_than_slots_makes_more() -> None:
    slots = Slots()
    sequences = new_sequences(5)
    slots.enter(sequences)
    assert slots.num_slots == 8
    assert sorted(sequence.slot for sequence in sequences) == [0, 1, 2, 3, 4]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7))), max_size=30),
)
def test_whoever_comes_and_goes(num_slots: int, steps: list[tuple[set[int], set[int]]]) -> None:
    """Each step is of some sequences; then some end, and others come in their places."""
    slots = Slots(num_slots)
    sequences = new_sequences(8)
    rows: dict[int, Sequence] = {}  # who last wrote a row of a tensor
    for present, ending in steps:
        step = [sequences[i] for i in sorted(present)]
        for entered in slots.enter(step):
            rows[entered.slot] = entered
        assert len({sequence.slot for sequence in step}) == len(step)
        assert all(0 <= sequence.slot < slots.num_slots for sequence in step)
        assert all(rows[sequence.slot] is sequence for sequence in step)
        for i in ending:
            rows = {slot: owner for slot, owner in rows.items() if owner is not sequences[i]}
            sequences[i] = new_sequences(1)[0]
    assert slots.num_slots <= max(num_slots, 16)
