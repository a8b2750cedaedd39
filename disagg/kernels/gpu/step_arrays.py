"""The input tensors of steps. Those of small steps stay where they are, so graphs can read them.

One kernel launch writes them from the numbers that the host uploaded. Rows beyond the step have
token 0, write no KV, and belong to one more sequence, which has no context: whatever the size of a
graph, its unused rows are cheap and harm nobody. `engine.device.batching` makes the same in torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "num_unread", "num_changes", "num_logits", "are_decodes",
        "max_num_seqs", "max_num_tokens",
    ],
    do_not_specialize_on_alignment=["numbers_ptr"],
)  # fmt: skip
def _fill_kernel(
    numbers_ptr,
    tables_ptr,
    chosen_ptr,
    token_ids_ptr,
    positions_ptr,
    kv_slots_ptr,
    logits_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    table_rows_ptr,
    num_seqs,
    num_tokens,
    num_unread,
    num_changes,
    num_logits,
    are_decodes,
    max_num_seqs,
    max_num_tokens,
    BLOCK: tl.constexpr,
):
    """Write some rows of each tensor, and some cells of the block tables."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The parts of the upload, one after the other.
    positions_part = numbers_ptr + num_seqs
    kv_slots_part = positions_part + num_tokens
    ends_part = kv_slots_part + num_tokens
    known_part = ends_part + num_seqs
    cells_part = known_part + num_tokens - num_unread
    begins_part = cells_part + 2 * num_changes
    logits_part = begins_part + num_seqs + 1

    is_token, is_seq = row < num_tokens, row < num_seqs
    slots = tl.load(numbers_ptr + row, mask=is_seq, other=0)
    # The tokens that the host has not read are those of the first sequences, one of each.
    is_unread = row < num_unread
    unread = tl.load(chosen_ptr + slots, mask=is_unread, other=0)
    known = tl.load(known_part + row - num_unread, mask=is_token & (row >= num_unread), other=0)
    is_row = row < max_num_tokens
    tl.store(token_ids_ptr + row, tl.where(is_unread, unread, known), mask=is_row)
    positions = tl.load(positions_part + row, mask=is_token, other=0)
    tl.store(positions_ptr + row, positions, mask=is_row)
    kv_slots = tl.load(kv_slots_part + row, mask=is_token, other=-1)
    tl.store(kv_slots_ptr + row, kv_slots, mask=is_row)
    logits_rows = tl.where(row < num_logits, row, 0).to(tl.int64)
    if are_decodes == 0:
        logits_rows = tl.load(logits_part + row, mask=row < num_logits, other=0)
    tl.store(logits_rows_ptr + row, logits_rows, mask=is_row)

    # One sequence more than there may be, and the end of its tokens, which is behind all rows.
    begins = tl.minimum(row, num_tokens).to(tl.int64)
    if are_decodes == 0:
        begins = tl.load(begins_part + row, mask=row <= num_seqs, other=0)
    begins = tl.where(row <= num_seqs, begins, max_num_tokens)
    tl.store(query_start_ptr + row, begins.to(tl.int32), mask=row < max_num_seqs + 2)
    ends = tl.load(ends_part + row, mask=is_seq, other=0)
    tl.store(context_lens_ptr + row, ends.to(tl.int32), mask=row < max_num_seqs + 1)
    tl.store(table_rows_ptr + row, slots, mask=row < max_num_seqs + 1)

    for begin in range(tl.program_id(0) * BLOCK, num_changes, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        cells = tl.load(cells_part + index, mask=index < num_changes, other=0)
        blocks = tl.load(cells_part + num_changes + index, mask=index < num_changes, other=0)
        tl.store(tables_ptr + cells, blocks.to(tl.int32), mask=index < num_changes)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Tensors of steps with up to so many tokens and sequences, named as in `models.batch.Batch`.

    Those of sequences have a row more, for the tokens of no sequence.
    """

    token_ids: Tensor  # int64 [max_num_tokens], like the next three
    positions: Tensor
    slots: Tensor  # -1: the row has no sequence, and nothing is written
    logits_rows: Tensor
    query_start: Tensor  # int32 [max_num_seqs + 2]
    context_lens: Tensor  # int32 [max_num_seqs + 1]
    table_rows: Tensor  # int64 [max_num_seqs + 1]

    @classmethod
    def empty(cls, max_num_seqs: int, max_num_tokens: int, device: torch.device) -> StepArrays:
        """Not yet written."""

        def empty(length: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(length, dtype=dtype, device=device)

        return cls(
            token_ids=empty(max_num_tokens, torch.int64),
            positions=empty(max_num_tokens, torch.int64),
            slots=empty(max_num_tokens, torch.int64),
            logits_rows=empty(max_num_tokens, torch.int64),
            query_start=empty(max_num_seqs + 2, torch.int32),
            context_lens=empty(max_num_seqs + 1, torch.int32),
            table_rows=empty(max_num_seqs + 1, torch.int64),
        )

    def first(self, num_seqs: int, num_tokens: int, num_logits: int) -> dict[str, Tensor]:
        """Those of so many sequences, tokens and logits, by name."""
        return {
            "token_ids": self.token_ids[:num_tokens],
            "positions": self.positions[:num_tokens],
            "slots": self.slots[:num_tokens],
            "logits_rows": self.logits_rows[:num_logits],
            "query_start": self.query_start[: num_seqs + 1],
            "context_lens": self.context_lens[:num_seqs],
            "table_rows": self.table_rows[:num_seqs],
        }

    @property
    def max_num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def max_num_seqs(self) -> int:
        return self.context_lens.shape[0] - 1

    def clear(self) -> None:
        """Make all rows those of no sequence."""
        for each in (self.token_ids, self.positions, self.logits_rows, self.table_rows):
            each.zero_()
        self.slots.fill_(-1)
        self.query_start.fill_(self.max_num_tokens)
        self.query_start[0] = 0
        self.context_lens.zero_()

    def fill(
        self,
        numbers: Tensor,
        tables: Tensor,
        chosen: Tensor,
        *,
        num_seqs: int,
        num_tokens: int,
        num_unread: int,
        num_changes: int,
        num_logits: int,
        are_decodes: bool,
    ) -> None:
        """Update the tables and these tensors for a step, in order with the device's other work.

        Args:
            numbers: int64, parts one after the other: the slots of the sequences, the positions
                and KV slots of their tokens, the ends of their contexts; token ids of all but the
                first `num_unread` tokens; cells of the block tables that change, and the blocks to
                write there; unless `are_decodes`, also the first token of each sequence and the
                end, and the rows that need logits.
            tables: int32 [num_slots, max_num_blocks], the block tables.
            chosen: int64 [num_slots], the last chosen tokens, which the host has not read.
        """
        rows = max(self.max_num_tokens, self.query_start.shape[0])
        _fill_kernel[(-(-rows // 128),)](
            numbers,
            tables,
            chosen,
            self.token_ids,
            self.positions,
            self.slots,
            self.logits_rows,
            self.query_start,
            self.context_lens,
            self.table_rows,
            num_seqs,
            num_tokens,
            num_unread,
            num_changes,
            num_logits,
            int(are_decodes),
            self.max_num_seqs,
            self.max_num_tokens,
            BLOCK=128,
        )
