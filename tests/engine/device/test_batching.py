"""A plan's tensors against their definitions in `models.batch.Batch`."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.engine.device.batching import Batching, StepInputs
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import NO_SLOT, Sequence
from disagg.engine.sched.step import Choose, Sampled, StepPlan
from disagg.models.batch import Batch
from disagg.time_model import StepFeatures
from tests.engine.fake_runner import FakeDevice, FakeKV, work_of
from tests.engine.workload import Driver, Workload, new_sequence, workloads
from tests.grids import examples


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """Decodes and chunks of sequences over scattered blocks, some more than they need."""
    block_size = draw(st.integers(1, 5))
    free = draw(st.permutations(range(80)))
    sequences, query_lens = [], []
    num_decodes = draw(st.integers(0, 3))
    for i in range(num_decodes + draw(st.integers(0 if num_decodes else 1, 3))):
        num_tokens = draw(st.integers(2, 12))
        sequence = new_sequence(
            tuple(draw(st.integers(4, 99)) for _ in range(num_tokens)), block_size
        )
        num_blocks = -(-num_tokens // block_size) + draw(st.integers(0, 1))
        sequence.block_ids, free = list(free[:num_blocks]), free[num_blocks:]
        sequence.num_slots = num_blocks * block_size
        if i < num_decodes:
            sequence.num_computed = num_tokens - 1
        else:
            sequence.num_computed = draw(st.integers(0, num_tokens - 2))
        most = num_tokens - sequence.num_computed
        sequences.append(sequence)
        query_lens.append(1 if i < num_decodes else draw(st.integers(2, most)))
    plan = StepPlan(sequences, query_lens, num_decodes, StepFeatures())
    return plan, block_size


class Made:
    """Plans made into batches, as a runner does it."""

    def __init__(self, block_size: int, max_num_blocks: int = 20) -> None:
        self.slots = Slots()
        self.batching = Batching(self.slots, block_size, max_num_blocks, torch.device("cpu"))

    def batch(self, plan: StepPlan) -> Batch:
        batch, slots = self.batching.batch(self.inputs(plan))
        assert slots.shape == batch.logits_rows.shape
        return batch

    def inputs(self, plan: StepPlan) -> StepInputs:
        entered = [] if plan.continues else self.slots.enter(plan.sequences)
        return self.batching.inputs(plan, entered)


@given(plans())
def test_every_tensor_is_what_its_name_says(case: tuple[StepPlan, int]) -> None:
    plan, block_size = case
    made = Made(block_size)
    check(plan, block_size, made.batch(plan))
    check(plan, block_size, made.batch(plan))


class Compared(FakeDevice):
    """Makes each plan into a batch, as a runner does it, and by itself."""

    def __init__(self, kv: FakeKV) -> None:
        super().__init__(kv)
        self.made = Made(kv.block_size, kv.num_blocks)

    def run(self, plan: StepPlan) -> list[Sampled]:
        self._compare(plan)
        return super().run(plan)

    def launch(self, plan: StepPlan) -> Choose:
        self._compare(plan)
        return super().launch(plan)

    def _compare(self, plan: StepPlan) -> None:
        batch = self.made.batch(plan)
        kept = [(each, each.slot, each.num_listed) for each in plan.sequences]
        for sequence in plan.sequences:
            sequence.slot = NO_SLOT
        starts = plan.first_positions() if plan.is_ahead else ()
        alone = Made(self.kv.block_size, self.kv.num_blocks)
        expected = alone.batch(replace(plan, starts=starts, continues=False))
        for sequence, slot, num_listed in kept:
            sequence.slot, sequence.num_listed = slot, num_listed
        for name in TENSORS:
            assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name
        known = slice(plan.num_unread, None)
        assert batch.token_ids[known].tolist() == expected.token_ids[known].tolist()
        assert batch.query_lens == expected.query_lens
        assert [*batch.context_lens_host] == [*expected.context_lens_host]
        rows = zip(batch.block_tables, expected.block_tables, batch.context_lens_host, strict=True)
        for found, wanted, num_tokens in rows:
            num_blocks = -(-num_tokens // self.kv.block_size)
            assert found[:num_blocks].tolist() == wanted[:num_blocks].tolist()


TENSORS = ("positions", "slots", "query_start", "context_lens", "logits_rows")


@examples(33)
@given(workloads())
def test_the_batches_of_any_workload_are_those_of_each_plan_alone(workload: Workload) -> None:
    driver = Driver(workload)
    driver.engine.runner = device = Compared(driver.kv)
    if workload.on_device:
        driver.engine.launcher = device
    driver.play()


def test_a_token_that_only_the_device_knows_is_read_there() -> None:
    """Behind a step that samples for two of three, by their slots, in any order."""
    made = Made(4)
    first, second, third = (new_sequence((n, n + 1, n + 2), 4) for n in (10, 20, 30))
    for number, sequence in enumerate((first, second, third)):
        sequence.block_ids, sequence.num_computed = [number], 2
    plan = StepPlan((first, second), (1, 1), 2, StepFeatures())
    made.batch(plan)
    slots = torch.tensor([first.slot, second.slot])
    made.batching.remember(slots, torch.tensor([91, 92]))
    ahead = StepPlan(
        (second, first, third), (1, 1, 1), 3, StepFeatures(), starts=(3, 3, 2), num_unread=2
    )
    batch = made.batch(ahead)
    assert batch.token_ids.tolist() == [92, 91, 32]
    assert batch.positions.tolist() == [3, 3, 2] and batch.context_lens.tolist() == [4, 4, 3]
    assert batch.slots.tolist() == [7, 3, 10] and batch.logits_rows.tolist() == [0, 1, 2]


def test_a_step_uploads_what_it_changes_and_not_whole_tables() -> None:
    made = Made(4)
    sequence = new_sequence(tuple(range(4, 70)), 4)
    sequence.block_ids, sequence.num_slots, sequence.num_computed = list(range(17)), 68, 65
    plan = StepPlan((sequence,), (1,), 1, StepFeatures())
    before = sum(made.inputs(plan).shape.lengths)
    sequence.block_ids.append(77)
    sequence.num_slots += 4
    sequence.tokens += [3, 4, 5]
    sequence.num_computed += 3
    after = sum(made.inputs(plan).shape.lengths)
    # Its slot, position, end and token, and where its KV goes.
    assert (before, after) == (5 + 2 * 17, 5 + 2 * 1)


def check(plan: StepPlan, block_size: int, batch: Batch) -> None:
    rows: list[tuple[Sequence, int]] = []
    starts, wanted = [0], []
    for work in work_of(plan):
        first = work.sequence.num_computed
        rows += [(work.sequence, first + i) for i in range(work.num_tokens)]
        starts.append(len(rows))
        if first + work.num_tokens == len(work.sequence.tokens):
            wanted.append(len(rows) - 1)
    ends = [work.sequence.num_computed + work.num_tokens for work in work_of(plan)]
    assert batch.token_ids.tolist() == [sequence.tokens[p] for sequence, p in rows]
    assert batch.positions.tolist() == [p for _, p in rows]
    assert batch.slots.tolist() == [
        sequence.block_ids[p // block_size] * block_size + p % block_size for sequence, p in rows
    ]
    assert batch.query_start.tolist() == starts
    assert batch.logits_rows.tolist() == wanted
    assert batch.context_lens.tolist() == ends == list(batch.context_lens_host)
    assert batch.query_lens == tuple(work.num_tokens for work in work_of(plan))
    assert batch.max_query_len == max(batch.query_lens)
    assert batch.num_decodes == plan.num_decodes
    num_columns = -(-max(ends) // block_size)
    assert batch.block_tables.shape == (len(plan.sequences), num_columns)
    for row, work, end in zip(batch.block_tables.tolist(), work_of(plan), ends, strict=True):
        used = work.sequence.block_ids[: -(-end // block_size)]
        assert row[: len(used)] == used


def test_types_are_those_that_kernels_expect() -> None:
    sequence = new_sequence((5, 6, 7), 2)
    sequence.block_ids, sequence.num_slots = [3, 1], 4
    plan = StepPlan((sequence,), (3,), 0, StepFeatures())
    batch = Made(2).batch(plan)
    wide = (batch.token_ids, batch.positions, batch.slots, batch.logits_rows)
    narrow = (batch.query_start, batch.context_lens, batch.block_tables)
    assert all(tensor.dtype is torch.int64 for tensor in wide)
    assert all(tensor.dtype is torch.int32 for tensor in narrow)
    assert all(tensor.is_contiguous() for tensor in (*wide, *narrow))
