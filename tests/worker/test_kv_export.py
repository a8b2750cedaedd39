"""What leaves is held, named by a ticket, and comes back whatever the reader does."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.blocks import BlockHash
from disagg.engine.engine import Engine
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Choose, Sampled, StepPlan
from disagg.errors import TransferFailed, Unavailable
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.messages import GenerateRequest, HoldCounts, KVEviction
from disagg.worker import kv_export as module
from disagg.worker.kv_export import HOLD_TTL_S, LOST_TTL_S, KVExport
from tests import generate_requests
from tests.engine.fake_runner import FakeDevice, FakeKV
from tests.engine.workload import new_engine, new_sequence
from tests.generate_requests import new_request

BLOCK_SIZE = 4


class ExportRig:
    """A KV export, and sequences that it exports."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.engine, _ = new_engine(num_blocks, BLOCK_SIZE)
        self.generations = self.engine.pool.generations
        peer = Peer("prefill", 7, "local", "fake:4", num_blocks, 32, 1, 1, -1, b"")
        self.kv_export = KVExport(self.engine, peer, self.generations)

    def leave(self, num_tokens: int, first: int = 4, now: float = 0.0) -> KVTicket:
        sequence = prefill(self.engine, tuple(range(first, first + num_tokens)))
        ticket = self.kv_export.leave(sequence, now)
        self.check()
        return ticket

    def check(self) -> None:
        self.engine.check(self.kv_export.holders())

    @property
    def num_held(self) -> int:
        return self.engine.pool.num_blocks - self.engine.pool.num_free


def prefill(engine: Engine, prompt: tuple[int, ...]) -> Sequence:
    """Run a sequence up to its first token."""
    sequence = new_sequence(prompt, BLOCK_SIZE, hand_over=True, stop_ids=frozenset())
    engine.submit(sequence)
    while True:
        for event in engine.step():
            assert event.left and event.sequence is sequence
            return sequence


@given(st.integers(1, 40))
def test_a_ticket_names_the_blocks_of_all_tokens_but_the_new_one(num_tokens: int) -> None:
    rig = ExportRig()
    ticket = rig.leave(num_tokens)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    assert ticket.num_tokens == num_tokens
    assert len(ticket.block_ids) == num_blocks == rig.num_held, "a spare block stayed behind"
    assert ticket.generations == tuple(rig.generations[block] for block in ticket.block_ids)
    assert (ticket.source_id, ticket.epoch, ticket.layout) == ("prefill", 7, "fake:4")


def test_a_prompt_gives_up_its_middle_once_and_an_answer_nothing() -> None:
    """An answer leaves twice, as when its worker stops; it is longer than what its prompt keeps."""
    rig, kept = ExportRig(), KVEviction(window=6, sinks=5)
    pool, num_evicted = rig.engine.pool, 0
    for name, num_output in (("first", 1), ("second", 18), ("third", 30)):
        sequence = generate_requests.new_sequence(
            range(30), range(num_output), request_id=name, kv_eviction=kept
        )
        sequence.num_computed, sequence.num_evicted = 29 + num_output, num_evicted
        num_rows = -(-(sequence.num_computed - num_evicted) // BLOCK_SIZE)
        sequence.block_ids = table = pool.allocate(num_rows) or []
        ticket = rig.kv_export.leave(sequence, 0.0)
        rig.check()
        given_up = 0 if num_evicted else 4  # rows from 2 up to that of position 24
        assert ticket.block_ids == (*table[:2], *table[2 + given_up :])
        num_evicted = ticket.num_evicted
        assert (ticket.num_tokens, num_evicted) == (sequence.num_computed, 4 * BLOCK_SIZE)
        rig.kv_export.release(name)


def test_a_hold_ends_by_itself() -> None:
    rig = ExportRig()
    rig.leave(9, now=10.0)
    rig.kv_export.advance(10.0 + HOLD_TTL_S - 0.1)
    assert rig.kv_export.num_holds == 1
    rig.kv_export.advance(10.0 + HOLD_TTL_S)
    assert rig.num_held == rig.kv_export.num_holds == 0


def test_lost_tickets_end_soon_and_others_do_not() -> None:
    rig = ExportRig()
    lost, kept = rig.leave(9, now=10.0), rig.leave(9, first=50, now=10.0)
    rig.kv_export.hurry(lambda ticket_id: ticket_id == lost.ticket_id, 20.0)
    rig.kv_export.advance(20.0 + LOST_TTL_S - 0.1)
    assert rig.kv_export.num_holds == 2, "its reader may be about to come"
    rig.kv_export.advance(20.0 + LOST_TTL_S)
    rig.check()
    assert rig.kv_export.num_holds == 1 and rig.num_held == len(kept.block_ids)
    rig.kv_export.hurry(lambda ticket_id: True, 10.0 + HOLD_TTL_S)
    rig.kv_export.advance(10.0 + HOLD_TTL_S)
    assert rig.kv_export.num_holds == 0, "hurry made it stay longer"


def test_a_hold_that_cannot_be_made_keeps_no_blocks() -> None:
    rig = ExportRig()
    sequence = prefill(rig.engine, tuple(range(4, 14)))
    sequence.request_id = "taken"
    rig.kv_export.leave(sequence, 0.0)
    namesake = prefill(rig.engine, tuple(range(50, 60)))
    namesake.request_id = "taken"
    with pytest.raises(TransferFailed, match="held already"):
        rig.kv_export.leave(namesake, 0.0)
    rig.check()
    assert rig.num_held == 3


def test_the_oldest_hold_is_broken_first_and_its_stamps_tell() -> None:
    rig = ExportRig(num_blocks=8)
    old, young = rig.leave(12), rig.leave(12, first=50)
    rig.kv_export.break_oldest()
    rig.check()
    assert rig.kv_export.num_holds == 1
    assert rig.engine.pool.allocate(5) is not None
    assert _stamps(rig.generations, old.block_ids) != old.generations
    assert _stamps(rig.generations, young.block_ids) == young.generations
    rig.kv_export.break_oldest()
    rig.kv_export.break_oldest()  # nothing is left to break
    assert rig.kv_export.num_holds == 0


def prefix_request_of(names: Iterable[BlockHash], deadline_unix_s: float = 1e9) -> GenerateRequest:
    names = tuple(names)
    return new_request(
        (), num_prompt_tokens=100, block_hashes=names, deadline_unix_s=deadline_unix_s
    )


def computed(rig: ExportRig, num_tokens: int, first: int) -> list[BlockHash]:
    """The names of a prompt's full blocks, which are cached and idle."""
    sequence = prefill(rig.engine, tuple(range(first, first + num_tokens)))
    rig.kv_export.release(rig.kv_export.leave(sequence, 0.0).ticket_id)
    rig.kv_export.advance(0.0)
    return sequence.block_hashes[: num_tokens // BLOCK_SIZE]


def test_a_prefix_ticket_has_the_leading_blocks_that_are_cached() -> None:
    rig = ExportRig()
    names = computed(rig, 13, first=4)
    ticket = rig.kv_export.prefix_ticket("1/7", prefix_request_of((*names, b"x" * 16)), 0.0)
    rig.check()
    assert (ticket.ticket_id, ticket.num_tokens) == ("1/7", 12)
    assert list(ticket.block_ids) == rig.engine.pool.match(names)
    assert rig.num_held == 3 and rig.kv_export.num_holds == 1
    for _ in range(2):  # notifications may be doubled
        rig.kv_export.release("1/7")
        rig.kv_export.advance(0.0)
        rig.check()
    assert rig.num_held == rig.kv_export.num_holds == 0
    assert len(rig.engine.pool.match(names)) == 3, "others may still find it"


def test_a_prefix_that_is_not_cached_gets_no_ticket() -> None:
    rig = ExportRig()
    with pytest.raises(Unavailable, match="not cached any more"):
        rig.kv_export.prefix_ticket("1/7", prefix_request_of([b"x" * 16]), 0.0)
    assert rig.kv_export.num_holds == 0


def test_pulled_prefixes_are_evicted_first_from_their_end() -> None:
    rig = ExportRig(num_blocks=8)
    other, cached = computed(rig, 12, first=50), computed(rig, 12, first=4)
    rig.kv_export.prefix_ticket("1/7", prefix_request_of(cached), 0.0)
    rig.kv_export.release("1/7")
    rig.kv_export.advance(0.0)
    assert rig.engine.pool.allocate(4) is not None  # two free ones, and two of the prefix
    assert len(rig.engine.pool.match(cached)) == 1
    assert len(rig.engine.pool.match(other)) == 3


def test_a_hold_of_a_prefix_expires_and_is_broken_before_a_hand_over() -> None:
    rig = ExportRig()
    ticket, names = rig.leave(9, first=50), computed(rig, 12, first=4)
    rig.kv_export.prefix_ticket("1/7", prefix_request_of(names), 0.0)
    rig.kv_export.break_oldest()
    rig.check()
    assert rig.num_held == len(ticket.block_ids)
    rig.kv_export.prefix_ticket("1/8", prefix_request_of(names, deadline_unix_s=5.0), 0.0)
    rig.kv_export.advance(5.0)
    assert rig.kv_export.num_holds == 1, "its reader comes no later than its deadline"
    rig.kv_export.prefix_ticket("1/9", prefix_request_of(names), 6.0)
    rig.kv_export.hurry(lambda ticket_id: ticket_id == "1/9", 6.0)
    rig.kv_export.advance(6.0 + LOST_TTL_S)
    rig.check()
    assert rig.num_held == len(ticket.block_ids)


def _stamps(generations: Iterable[int], block_ids: Iterable[int]) -> tuple[int, ...]:
    table = array("Q", generations)
    return tuple(table[block_id] for block_id in block_ids)


class AskedWhileReading(FakeDevice):
    """Asks a sequence to leave when the step that it leaves with is over and the next one, which
    was launched ahead with a row of the same sequence, is not."""

    def __init__(self, kv: FakeKV, scheduler: Scheduler, leaves_with: int) -> None:
        super().__init__(kv)
        self.scheduler = scheduler
        self.leaves_with = leaves_with  # that step

    def launch(self, plan: StepPlan) -> Choose:
        choose, number = super().launch(plan), self._num_launched

        def ask_and_read() -> SequenceOf[Sampled]:
            if number == self.leaves_with:
                self.scheduler.hand_over(plan.sequences[0])
            return choose()()

        return lambda: ask_and_read


@pytest.mark.parametrize(
    "leaves_with", [2, 3], ids=["the wasted row is in a spare block", "in a kept block"]
)
def test_a_step_under_way_writes_to_no_block_that_somebody_else_has(leaves_with: int) -> None:
    """Bytes that come from elsewhere know no order of the device's."""
    engine, kv = new_engine(3, BLOCK_SIZE, on_device=True)
    engine.runner = engine.launcher = AskedWhileReading(kv, engine.scheduler, leaves_with)
    leaving = KVExport(
        engine, Peer("prefill", 7, "local", "fake:4", 3, 32, 1, 1, -1, b""), engine.pool.generations
    )
    engine.submit(new_sequence(tuple(range(10, 17)), BLOCK_SIZE, 5, stop_ids=frozenset()))
    events = [event for _ in range(leaves_with) for event in engine.step()]
    assert events[-1].left and engine.is_under_way
    ticket = leaving.leave(events[-1].sequence, 0.0)
    leaving.release(ticket.ticket_id)
    arrived: dict[int, bytes] = {}
    while engine.has_work or len(arrived) < 3:
        leaving.advance(1.0)
        engine.check([*leaving.holders(), [*arrived]])
        for block_id in engine.reserve(1) or ():
            arrived[block_id] = bytes([block_id + 1]) * kv.block_nbytes
            kv.write_block(block_id, arrived[block_id])
        engine.step()
    for block_id, sent in arrived.items():
        assert kv.read_block(block_id) == sent, "a step that came late wrote over it"


def test_blocks_that_left_are_still_found_by_name() -> None:
    rig = ExportRig()
    ticket = rig.leave(9)
    again = rig.leave(9)
    assert again.block_ids[:2] == ticket.block_ids[:2]
    rig.kv_export.release(ticket.ticket_id)
    rig.kv_export.advance(0.0)
    rig.check()
    assert rig.num_held == len(again.block_ids)


def test_ends_are_counted_by_their_kind() -> None:
    rig = ExportRig()
    tickets = [rig.leave(9, first=20 * number) for number in range(1, 4)]
    assert rig.kv_export.counts == HoldCounts()
    rig.kv_export.release(tickets[0].ticket_id)
    rig.kv_export.release(tickets[0].ticket_id)
    rig.kv_export.break_oldest()
    rig.kv_export.advance(HOLD_TTL_S + 1.0)
    assert rig.kv_export.counts == HoldCounts(
        num_released=1, num_expired=1, num_broken=1, num_unknown=1
    )
    assert rig.num_held == 0


def test_one_too_many_breaks_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HOLDS", 2)
    rig = ExportRig()
    _, *kept = (rig.leave(4, first=20 * number) for number in range(1, 4))
    assert rig.kv_export.num_holds == 2 and rig.kv_export.counts == HoldCounts(num_broken=1)
    assert rig.num_held == sum(len(ticket.block_ids) for ticket in kept)


class Holds(RuleBasedStateMachine):
    """Whatever happens, in whatever order: every held block comes back exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = ExportRig()
        self.now = 0.0
        self.num_tickets = 0
        self.cached = computed(self.rig, 9, first=4)

    @precondition(lambda self: self.rig.engine.pool.num_free > 4)
    @rule(num_tokens=st.integers(1, 12), left_s=st.floats(0.0, 90.0))
    def leave(self, num_tokens: int, left_s: float) -> None:
        sequence = prefill(self.rig.engine, tuple(range(50, 50 + num_tokens)))
        self.num_tickets += 1
        sequence.request_id = f"t{self.num_tickets}"
        sequence.deadline_unix_s = self.now + left_s
        self.rig.kv_export.leave(sequence, self.now)

    @precondition(lambda self: self.rig.engine.pool.match(self.cached))
    @rule()
    def prefix(self) -> None:
        self.num_tickets += 1
        request = prefix_request_of(self.cached)
        self.rig.kv_export.prefix_ticket(f"t{self.num_tickets}", request, self.now)

    @rule(which=st.integers(0, 1 << 16))
    def release(self, which: int) -> None:
        """Notifications may be doubled, or of a ticket that was never issued."""
        self.rig.kv_export.release(f"t{1 + which % (1 + self.num_tickets)}")

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.rig.kv_export.advance(self.now)

    @rule(which=st.integers(0, 3))
    def hurry(self, which: int) -> None:
        self.rig.kv_export.hurry(lambda name: int(name[1:]) % 4 == which, self.now)

    @rule()
    def press(self) -> None:
        self.rig.kv_export.break_oldest()

    @invariant()
    def nothing_is_lost_or_given_twice(self) -> None:
        self.rig.check()
        counts = self.rig.kv_export.counts
        num_ended = counts.num_released + counts.num_expired + counts.num_broken - 1
        assert self.rig.kv_export.num_holds + num_ended == self.num_tickets

    def teardown(self) -> None:
        self.rig.kv_export.advance(self.now + HOLD_TTL_S)
        self.rig.check()
        assert self.rig.num_held == self.rig.kv_export.num_holds == 0


TestHolds = Holds.TestCase
