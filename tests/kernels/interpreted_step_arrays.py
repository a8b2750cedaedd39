"""Small steps made by the kernel; run by `test_interpreted.py` under Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.engine.device.batching import Batching
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan
from disagg.models.batch import Batch
from disagg.time_model import StepFeatures
from tests.engine.workload import new_sequence
from tests.grids import examples

CPU = torch.device("cpu")
MAX_NUM_BLOCKS = 150  # more columns than a program looks at at once


@examples(10)
@given(st.data(), st.sampled_from([1, 3, 4]))
def test_the_kernel_makes_the_batches_that_torch_makes(data: st.DataObject, size: int) -> None:
    """Sequences that go on and begin blocks, others in between, long ones, unread tokens."""
    slots = Slots(4)
    torch_ops = Batching(slots, size, MAX_NUM_BLOCKS, CPU)
    kernel = Batching(slots, size, MAX_NUM_BLOCKS, CPU, use_kernel=True)
    lengths = data.draw(st.lists(st.sampled_from([2, 3, 7, 140]), min_size=2, max_size=4))
    blocks = iter(range(10_000))
    sequences = [new_sequence(tuple(range(5, 5 + length)), size) for length in lengths]
    some: list[Sequence] = []
    for step in range(data.draw(st.integers(1, 2 * size + 3))):
        is_same = bool(some) and data.draw(st.booleans())
        some = some if is_same else sequences[: data.draw(st.integers(1, len(sequences)))]
        for sequence in some:
            sequence.tokens.append(20 + step)
            while len(sequence.block_ids) * size < len(sequence.tokens):
                sequence.block_ids.append(next(blocks))
            sequence.num_slots = len(sequence.block_ids) * size
            sequence.num_computed = len(sequence.tokens) - 1
        num = len(some)
        plan = StepPlan(some, [1] * num, num, StepFeatures())
        num_decodes = num if data.draw(st.booleans()) else data.draw(st.integers(0, num))
        if num_decodes < num:  # the others are prompts that are computed again, whole or in part
            for sequence in some[num_decodes:]:
                sequence.num_computed = data.draw(st.integers(0, len(sequence.tokens) - 1))
            lens = [data.draw(st.integers(1, each.num_uncomputed)) for each in some[num_decodes:]]
            plan = StepPlan(some, [1] * num_decodes + lens, num_decodes, StepFeatures())
        elif data.draw(st.booleans()):
            starts = plan.first_positions()
            num_unread = data.draw(st.integers(1, num))
            plan = replace(plan, starts=starts, num_unread=num_unread)
        entered = slots.enter(plan.sequences)
        listed = [sequence.num_listed for sequence in plan.sequences]
        expected, expected_slots = torch_ops.batch(torch_ops.inputs(plan, entered))
        for sequence, num_listed in zip(plan.sequences, listed, strict=True):
            sequence.num_listed = num_listed
        found, found_slots = kernel.batch(kernel.inputs(plan, entered))
        check(found, expected)
        assert torch.equal(found_slots, expected_slots)
        chosen = torch.arange(len(expected_slots)) + 50 * step
        torch_ops.remember(expected_slots, chosen)
        kernel.remember(found_slots, chosen)
        arrays, num_tokens = kernel.arrays, len(expected.token_ids)
        assert arrays is not None
        if num_tokens > arrays.max_num_tokens:
            continue  # in tensors of its own
        assert (arrays.slots[num_tokens:] == -1).all(), "nobody is there to be written"
        assert (arrays.token_ids[num_tokens:] == 0).all(), "experts would be read for them"
        assert (arrays.context_lens[num:] == 0).all(), "these tokens see no keys"
        ends = arrays.query_start[num:].tolist()
        assert ends == [num_tokens] + [arrays.max_num_tokens] * (len(ends) - 1)


def test_a_step_that_is_larger_than_the_arrays_leaves_them_as_they_are() -> None:
    """Graphs do not read it; behind it the small ones are as before."""
    slots = Slots(4)
    torch_ops = Batching(slots, 4, MAX_NUM_BLOCKS, CPU)
    kernel = Batching(slots, 4, MAX_NUM_BLOCKS, CPU, use_kernel=True)
    sequences = [new_sequence(tuple(range(5, 205 + n)), 4) for n in range(2)]
    for n, sequence in enumerate(sequences):
        sequence.block_ids = [*range(100 * n, 100 * n + 51)]
    arrays = kernel.arrays
    assert arrays is not None
    small = StepPlan(sequences[:1], [1], 0, StepFeatures())
    large = StepPlan(sequences, [200, 201], 0, StepFeatures())
    for plan in (small, large, small):
        entered = slots.enter(plan.sequences)
        expected, expected_slots = torch_ops.batch(torch_ops.inputs(plan, entered))
        for sequence in plan.sequences:
            sequence.num_listed = 0
        found, found_slots = kernel.batch(kernel.inputs(plan, entered))
        check(found, expected)
        assert torch.equal(found_slots, expected_slots)
        is_small = plan is small
        assert (found.token_ids.data_ptr() == arrays.token_ids.data_ptr()) == is_small
        assert kernel.arrays is arrays


def check(found: Batch, expected: Batch) -> None:
    for name in ("token_ids", "positions", "slots", "context_lens", "query_start", "logits_rows"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert found.table_rows is not None
    num_columns = expected.block_tables.shape[1]
    tables = found.block_tables[found.table_rows, :num_columns]
    assert torch.equal(tables, expected.block_tables)
    assert [*found.context_lens_host] == [*expected.context_lens_host]
    assert (found.query_lens, found.max_query_len) == (expected.query_lens, expected.max_query_len)
