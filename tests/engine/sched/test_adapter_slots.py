"""Slots of adapters: the last used stay, running ones are never replaced, nobody waits for ever."""

from __future__ import annotations

from disagg.adapters import Adapter
from disagg.engine.sched.adapter_slots import AdapterSlots
from disagg.engine.sched.sequence import Sequence
from tests.router.fakes import make_request


class Slots:
    """Slots, and the sequences that run."""

    def __init__(self, num_slots: int) -> None:
        self.running: set[Sequence] = set()
        self.slots = AdapterSlots(num_slots, self.running.__contains__)

    def begin(self, digest: str) -> tuple[Sequence, tuple[int, bool] | None]:
        """A new sequence, which runs or waits from now on."""
        sequence = Sequence(make_request(adapter=Adapter(digest, "toy", "", digest)))
        self.running.add(sequence)
        return sequence, self.slots.take(digest, sequence)


def test_an_adapter_is_written_once_and_the_longest_unused_makes_room() -> None:
    slots = Slots(2)
    a, taken = slots.begin("a")
    assert taken == (0, True)
    b, taken = slots.begin("b")
    assert taken == (1, True)
    again, taken = slots.begin("a")
    assert taken == (0, False)
    slots.running -= {a, b, again}
    _, taken = slots.begin("c")
    assert taken == (1, True), "b was used before a"
    assert slots.slots.digests == ("a", "c")
    _, taken = slots.begin("a")
    assert taken == (0, False)


def test_a_running_adapter_is_never_replaced() -> None:
    slots = Slots(1)
    a, _ = slots.begin("a")
    b, taken = slots.begin("b")
    assert taken is None
    assert slots.slots.take("b", b) is None
    slots.running.remove(a)
    assert slots.slots.take("b", b) == (0, True)
    assert slots.slots.digests == ("b",)


def test_adapters_in_use_do_not_keep_another_out() -> None:
    """The slot with the fewest sequences takes no new ones; the other goes on."""
    slots = Slots(2)
    for _ in range(3):
        slots.begin("a")
    (b, _), (waiting, _) = slots.begin("b"), slots.begin("c")
    late, taken = slots.begin("b")
    assert taken is None, "its slot is promised"
    assert slots.begin("a")[1] == (0, False)
    assert slots.slots.digests == ("a",)
    slots.running.remove(b)
    assert slots.slots.take("b", late) is None
    assert slots.slots.take("c", waiting) == (1, True)
    assert slots.slots.take("b", late) is None  # now a slot is promised to it
    slots.running.remove(waiting)
    assert slots.slots.take("b", late) == (1, True)


def test_the_promise_to_a_sequence_that_gave_up_is_void() -> None:
    slots = Slots(1)
    slots.begin("a")
    waiting, _ = slots.begin("b")
    assert slots.begin("a")[1] is None
    slots.running.remove(waiting)
    assert slots.begin("a")[1] == (0, False)


def test_several_sequences_wait_for_one_adapter() -> None:
    slots = Slots(2)
    a, _ = slots.begin("a")
    slots.begin("b")
    first, second = slots.begin("c")[0], slots.begin("c")[0]
    slots.running.remove(a)
    assert slots.slots.take("c", second) == (0, True)
    assert slots.slots.take("c", first) == (0, False)
