"""Builds the input tensors of a decode step on the device from the numbers that the host uploaded.

One kernel launch builds them. The tensors keep their addresses, so that a captured graph can read
them. Rows beyond the step's sequences write no KV and have token 0. The reference is
`engine.device.batching.Batching.batch`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.launcher import KernelLauncher


@triton.jit(
    do_not_specialize=["num_seqs", "num_unread", "num_changes", "num_columns"],
    do_not_specialize_on_alignment=["numbers_ptr"],
)
def _fill_kernel(
    numbers_ptr,
    tables_ptr,
    chosen_ptr,
    token_ids_ptr,
    positions_ptr,
    kv_slots_ptr,
    context_lens_ptr,
    block_tables_ptr,
    num_seqs,
    num_unread,
    num_changes,
    num_columns,
    max_num_blocks,
    BLOCK: tl.constexpr,
):
    """Process one row: change the block table of its slot, and copy what the step reads of it."""
    row = tl.program_id(0).to(tl.int64)
    if row >= num_seqs:
        tl.store(kv_slots_ptr + row, -1)
        tl.store(context_lens_ptr + row, 0)
        tl.store(token_ids_ptr + row, 0)  # all the same, which go to the same experts
    else:
        slot = tl.load(numbers_ptr + row)
        tl.store(positions_ptr + row, tl.load(numbers_ptr + num_seqs + row))
        tl.store(kv_slots_ptr + row, tl.load(numbers_ptr + 2 * num_seqs + row))
        end = tl.load(numbers_ptr + 3 * num_seqs + row)
        tl.store(context_lens_ptr + row, end.to(tl.int32))
        known_ptr = numbers_ptr + 4 * num_seqs
        is_unread = row < num_unread
        token_id = tl.load(chosen_ptr + slot, mask=is_unread, other=0)
        known = tl.load(known_ptr + row - num_unread, mask=row >= num_unread, other=0)
        tl.store(token_ids_ptr + row, tl.where(is_unread, token_id, known))

        cells_ptr = known_ptr + num_seqs - num_unread
        first = slot * max_num_blocks
        for begin in range(0, num_changes, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            cells = tl.load(cells_ptr + index, mask=index < num_changes, other=-1)
            blocks = tl.load(cells_ptr + num_changes + index, mask=index < num_changes, other=0)
            is_own = (cells >= first) & (cells < first + max_num_blocks)
            tl.store(tables_ptr + cells, blocks.to(tl.int32), mask=is_own)
        tl.debug_barrier()  # the next load may read what was just written
        for begin in range(0, num_columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < num_columns
            blocks = tl.load(tables_ptr + first + column, mask=inside, other=0)
            tl.store(block_tables_ptr + row * max_num_blocks + column, blocks, mask=inside)


_fill = KernelLauncher(_fill_kernel)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Tensors of steps of up to `max_num_seqs` decodes, named as in `models.batch.Batch`."""

    token_ids: Tensor  # int64 [max_num_seqs], like the next two
    positions: Tensor
    slots: Tensor  # -1: the row has no sequence, and nothing is written
    context_lens: Tensor  # int32 [max_num_seqs]
    block_tables: Tensor  # int32 [max_num_seqs, max_num_blocks]

    @classmethod
    def empty(cls, max_num_seqs: int, max_num_blocks: int, device: torch.device) -> DecodeInputs:
        def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            token_ids=full(max_num_seqs),
            positions=full(max_num_seqs),
            slots=full(max_num_seqs, value=-1),
            context_lens=full(max_num_seqs, dtype=torch.int32),
            block_tables=full(max_num_seqs, max_num_blocks, dtype=torch.int32),
        )

    def first(self, num_seqs: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The rows of the first sequences, in the order of the fields."""
        return (
            self.token_ids[:num_seqs],
            self.positions[:num_seqs],
            self.slots[:num_seqs],
            self.context_lens[:num_seqs],
            self.block_tables[:num_seqs],
        )

    def fill(
        self,
        numbers: Tensor,
        tables: Tensor,
        chosen: Tensor,
        *,
        num_seqs: int,
        num_unread: int,
        num_changes: int,
        num_columns: int,
    ) -> None:
        """Update the tables and these tensors for a step, in order with the device's other work.

        Args:
            numbers: int64, parts one after the other: the slots of the sequences, the positions of
                their tokens, the KV slots of these tokens, and the ends of their contexts; token
                ids of all but the first `num_unread` sequences; cells of the block tables that
                change, and the blocks to write there.
            tables: int32 [num_slots, max_num_blocks], the block tables.
            chosen: int64 [num_slots], the last chosen tokens, which the host has not read.
            num_columns: number of columns of the tables that the step reads.
        """
        _fill(
            (self.token_ids.shape[0],),
            numbers,
            tables,
            chosen,
            self.token_ids,
            self.positions,
            self.slots,
            self.context_lens,
            self.block_tables,
            num_seqs,
            num_unread,
            num_changes,
            num_columns,
            self.block_tables.shape[1],
            BLOCK=128,
        )
