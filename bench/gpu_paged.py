"""Sequences in a paged cache as an engine would have them, for the GPU benches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.kv_pages import KVFormat, format_of, new_pages
from disagg.kernels.kv_write import kv_write
from disagg.kernels.paged_attention import PagedWork, paged_attention, plan_work

PROGRAMS_PER_MULTIPROCESSOR = 3  # as `triton_ops` has it


@dataclass(frozen=True)
class Heads:
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    num_layers: int = 32

    def token_nbytes(self, format: KVFormat) -> float:
        """Keys and values of one position in one layer, with its scales."""
        page_nbytes = format.page_nbytes(self.block_size, self.head_dim)
        return 2 * self.num_kv_heads * page_nbytes / self.block_size


TINY = Heads(4, 2, 32, 16, 2)


class Paged:
    """Sequences in a cache with shuffled blocks, and the step that attends to them."""

    def __init__(
        self,
        heads: Heads,
        lens: list[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        window: int | None = None,
        format: KVFormat | None = None,
    ) -> None:
        self.heads, self.lens, self.window = heads, lens, window
        size = heads.block_size
        counts = [-(-context // size) for _, context in lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
        tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for row, ids in enumerate(torch.split(order, counts)):
            tables[row, : len(ids)] = ids
        self.tables = tables.to(device)
        self.pages = new_pages(
            format or format_of(dtype),
            sum(counts),
            heads.num_layers,
            heads.num_kv_heads,
            size,
            heads.head_dim,
            device,
        )
        self._fill(device)
        num_tokens = sum(query for query, _ in lens)
        all_heads = heads.num_heads + 2 * heads.num_kv_heads
        self.qkv = torch.randn(num_tokens, all_heads, heads.head_dim, device=device).to(dtype)
        starts = torch.tensor([0, *(query for query, _ in lens)]).cumsum(0)
        self.query_start = starts.int().to(device)
        self.context_lens = torch.tensor([context for _, context in lens]).int().to(device)
        self.slots = torch.cat([self._slots(row) for row in range(len(lens))]).to(device)
        self.work = self._plan(device)

    def _fill(self, device: torch.device) -> None:
        """Keys and values of one block, in all of them, times what differs from block to block."""
        values, scales = self.pages.values, self.pages.scales
        factor = 1 + torch.arange(len(values), device=device).view(-1, 1, 1, 1, 1) % 7 * 0.1
        drawn = torch.randn(*values.shape[1:5], self.heads.head_dim, device=device)
        if scales is None:
            values.copy_(drawn.to(values.dtype).expand_as(values))
            values *= factor.unsqueeze(-1)
            return
        stored, of_vector = reference.quantize(drawn, self.pages.format)
        values.view(torch.int8).copy_(stored.view(torch.int8).expand_as(values))
        scales.copy_(of_vector * factor)

    def _slots(self, row: int) -> Tensor:
        query, context = self.lens[row]
        positions = torch.arange(context - query, context)
        blocks = self.tables[row].cpu().long()[positions // self.heads.block_size]
        return blocks * self.heads.block_size + positions % self.heads.block_size

    def _plan(self, device: torch.device) -> PagedWork:
        num_programs = 4
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            num_programs = properties.multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
        heads = self.heads
        return plan_work(
            [query for query, _ in self.lens],
            [context for _, context in self.lens],
            heads.num_heads // heads.num_kv_heads,
            self.window,
            max(num_programs // heads.num_kv_heads, 1),
            device,
        )

    def attend(self, layer: int) -> Tensor:
        return paged_attention(
            self.qkv,
            self.pages,
            layer,
            self.tables,
            self.query_start,
            self.context_lens,
            self.work,
        )

    def write(self, layer: int) -> None:
        kv_write(self.qkv, self.pages, layer, self.slots)

    def attend_all(self) -> None:
        for layer in range(self.heads.num_layers):
            self.attend(layer)
