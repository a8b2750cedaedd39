"""The batch of a step as each group of layers sees it: with its block table and its KV slots.

A batch has the slots of the first group, and the block tables of all groups side by side. Those of
the others follow from their block tables, on the device, so that the host uploads no more for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch


@dataclass(frozen=True, slots=True)
class GroupBatches:
    """One batch for each group that has KV; with one group only that of the step.

    tables: int32 [num_rows, num_groups, max_num_rows], the block tables; None: there is one group.
    slots: int64 [groups that have KV, num_tokens].
    """

    batches: tuple[PagedBatch, ...]
    tables: Tensor | None
    slots: Tensor
    block_size: int

    @classmethod
    def of(cls, batch: PagedBatch, kv_cache: KVPages) -> GroupBatches:
        """The batches, whose slots `locate` fills in."""
        num_groups, block_size = kv_cache.num_groups, kv_cache.values.shape[4]
        if num_groups == 1:
            return cls((batch,), None, batch.slots, block_size)
        num_columns = batch.block_tables.shape[1] // num_groups  # another column may follow
        tables = batch.block_tables[:, : num_groups * num_columns]
        tables = tables.view(-1, num_groups, num_columns)
        slots = batch.slots.repeat(kv_cache.num_kv_groups, 1)
        whole: Any = batch  # a dataclass in each of its forms
        batches = (
            replace(whole, block_tables=tables[:, group], slots=slots[group])
            for group in range(kv_cache.num_kv_groups)
        )
        return cls(tuple(batches), tables, slots, block_size)

    def locate(self, batch: PagedBatch) -> None:
        """Fill in the slots of the step that is in the batch's tensors now, on the device."""
        if self.tables is None:
            return
        num_groups = len(self.batches)
        rows = sequences_of_tokens(batch)
        if batch.table_rows is not None:
            rows = batch.table_rows.index_select(0, rows)
        columns = batch.positions.div(self.block_size, rounding_mode="floor")
        blocks = self.tables.transpose(0, 1)[:num_groups, rows, columns].long()
        slots = blocks * self.block_size + batch.positions % self.block_size
        self.slots.copy_(slots.masked_fill_(batch.slots < 0, -1))


def sequences_of_tokens(batch: PagedBatch) -> Tensor:
    """int64 [num_tokens]: the sequence of each token, and the last one for those of none."""
    num_tokens, num_seqs = batch.slots.shape[0], batch.context_lens.shape[0]
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=batch.slots.device)
    sequences = torch.searchsorted(batch.query_start[1:], tokens, right=True)
    return sequences.clamp_(max=num_seqs - 1)
