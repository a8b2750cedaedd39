"""A plan's tensors against their definitions in `models.batch.Batch`."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.batching import make_batch
from disagg.engine.sequence import Sequence
from disagg.engine.step import StepPlan
from disagg.time_model import StepFeatures
from tests.engine.workload import new_sequence


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
        if i < num_decodes:
            sequence.num_computed = num_tokens - 1
        else:
            sequence.num_computed = draw(st.integers(0, num_tokens - 2))
        most = num_tokens - sequence.num_computed
        sequences.append(sequence)
        query_lens.append(1 if i < num_decodes else draw(st.integers(2, most)))
    num_new_tokens = sum(query_lens)
    plan = StepPlan(sequences, query_lens, num_decodes, num_new_tokens, StepFeatures())
    return plan, block_size


@given(plans())
def test_every_tensor_is_what_its_name_says(case: tuple[StepPlan, int]) -> None:
    plan, block_size = case
    batch = make_batch(plan, block_size, torch.device("cpu"))
    rows: list[tuple[Sequence, int]] = []
    starts, wanted = [0], []
    for work in plan.work:
        first = work.sequence.num_computed
        rows += [(work.sequence, first + i) for i in range(work.num_tokens)]
        starts.append(len(rows))
        if first + work.num_tokens == len(work.sequence.tokens):
            wanted.append(len(rows) - 1)
    ends = [work.sequence.num_computed + work.num_tokens for work in plan.work]
    assert batch.token_ids.tolist() == [sequence.tokens[p] for sequence, p in rows]
    assert batch.positions.tolist() == [p for _, p in rows]
    assert batch.slots.tolist() == [
        sequence.block_ids[p // block_size] * block_size + p % block_size for sequence, p in rows
    ]
    assert batch.query_start.tolist() == starts
    assert batch.logits_rows.tolist() == wanted
    assert batch.context_lens.tolist() == ends == list(batch.context_lens_host)
    assert batch.query_lens == tuple(work.num_tokens for work in plan.work)
    assert (batch.max_query_len, batch.max_context_len) == (max(batch.query_lens), max(ends))
    assert batch.num_decodes == plan.num_decodes
    num_columns = -(-max(ends) // block_size)
    assert batch.block_tables.shape == (len(plan.work), num_columns)
    for row, work, end in zip(batch.block_tables.tolist(), plan.work, ends, strict=True):
        used = work.sequence.block_ids[: -(-end // block_size)]
        assert row == used + [0] * (num_columns - len(used))


def test_types_are_those_that_kernels_expect() -> None:
    sequence = new_sequence((5, 6, 7), 2)
    sequence.block_ids = [3, 1]
    plan = StepPlan((sequence,), (3,), 0, 3, StepFeatures())
    batch = make_batch(plan, 2, torch.device("cpu"))
    wide = (batch.token_ids, batch.positions, batch.slots, batch.logits_rows)
    narrow = (batch.query_start, batch.context_lens, batch.block_tables)
    assert all(tensor.dtype is torch.int64 for tensor in wide)
    assert all(tensor.dtype is torch.int32 for tensor in narrow)
    assert all(tensor.is_contiguous() for tensor in (*wide, *narrow))
