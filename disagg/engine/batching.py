"""A step plan as tensors.

Everything is gathered into two flat arrays and becomes one tensor, so that a GPU gets one copy a
step; the tensors of a `Batch` are views of it. Must not know what a model does with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from operator import add

import torch
from torch import Tensor

from disagg.engine.sequence import Sequence
from disagg.engine.step import StepPlan
from disagg.models.batch import Batch


def make_batch(
    plan: StepPlan,
    block_size: int,
    device: torch.device,
    rows_before: Mapping[str, int] | None = None,
) -> Batch:
    """The batch of a plan that has work. Shapes and order: `models.batch.Batch`.

    A token that only the device knows yet, which row r of the step before samples, is -1 - r.

    Args:
        rows_before: those rows, by request id.
    """
    query_lens = tuple(plan.query_lens)
    starts = plan.starts or [sequence.num_computed for sequence in plan.sequences]
    ends = tuple(map(add, starts, query_lens))
    token_ids, positions, slots = array("q"), array("q"), array("q")
    logits_rows, query_start = array("q"), array("i", [0])
    for sequence, num_tokens, end in zip(plan.sequences, query_lens, ends, strict=True):
        begin, num_known = end - num_tokens, len(sequence.tokens)
        if begin == num_known and rows_before is not None:
            num_known += 1
            token_ids.append(-1 - rows_before[sequence.request_id])
        elif num_tokens == 1:
            token_ids.append(sequence.tokens[begin])
        if num_tokens == 1:
            positions.append(begin)
            slots.append(sequence.block_ids[begin // block_size] * block_size + begin % block_size)
        else:
            token_ids.extend(sequence.tokens[begin:end])
            positions.extend(range(begin, end))
            _extend_slots(slots, sequence, begin, end, block_size)
        if end > num_known:
            token_ids.extend(sequence.draft[: end - num_known])
        query_start.append(num_packed := len(token_ids))
        if end == num_known:
            logits_rows.append(num_packed - 1)
        elif end > num_known:
            logits_rows.extend(range(num_packed - 1 - (end - num_known), num_packed))
    tables, num_columns = _block_tables(plan, ends, block_size)
    wide = (token_ids, positions, slots, logits_rows)
    narrow = (query_start, array("i", ends), tables)
    tensors = _upload(wide, narrow, device)
    return Batch(
        token_ids=tensors[0],
        positions=tensors[1],
        slots=tensors[2],
        query_start=tensors[4],
        context_lens=tensors[5],
        block_tables=tensors[6].view(len(ends), num_columns),
        logits_rows=tensors[3],
        num_decodes=plan.num_decodes,
        max_query_len=max(query_lens),
        max_context_len=max(ends),
        query_lens=query_lens,
        context_lens_host=ends,
    )


def _extend_slots(
    slots: array[int], sequence: Sequence, begin: int, end: int, block_size: int
) -> None:
    """Append where the KV of positions [begin, end) goes, one run for each block."""
    position = begin
    while position < end:
        index, offset = divmod(position, block_size)
        num_slots = min(block_size - offset, end - position)
        first = sequence.block_ids[index] * block_size + offset
        slots.extend(range(first, first + num_slots))
        position += num_slots


def _block_tables(plan: StepPlan, ends: tuple[int, ...], block_size: int) -> tuple[array[int], int]:
    """Rows of block ids, padded with 0 to the longest, and their length."""
    num_columns = -(-max(ends) // block_size)
    padding = array("i", bytes(4 * num_columns))
    tables = array("i")
    for sequence, end in zip(plan.sequences, ends, strict=True):
        num_blocks = -(-end // block_size)
        tables.fromlist(sequence.block_ids[:num_blocks])
        tables.extend(padding[num_blocks:])
    return tables, num_columns


def _upload(
    wide: tuple[array[int], ...], narrow: tuple[array[int], ...], device: torch.device
) -> list[Tensor]:
    """One tensor for each array, all in one copy; the wide ones go first to stay aligned."""
    raw = bytearray().join((*wide, *narrow))
    packed = torch.frombuffer(raw, dtype=torch.uint8)
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    tensors, begin = [], 0
    for part in (*wide, *narrow):
        end = begin + len(part) * part.itemsize
        dtype = torch.int64 if part.typecode == "q" else torch.int32
        tensors.append(packed[begin:end].view(dtype))
        begin = end
    return tensors
