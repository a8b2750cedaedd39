"""A layer of gated delta nets as `bench.gpu_kernels` measures it, with the heads of Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.gpu.delta_net import delta_net
from disagg.kernels.kv_pages import KVPages, format_of, new_pages
from disagg.kernels.recurrent_state import ITEMSIZE, DeltaHeads, StateShape
from disagg.kernels.torch import delta_net as twin
from disagg.models.batch import Batch

QWEN3_NEXT = DeltaHeads(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, taps=4)
TINY = DeltaHeads(num_key_heads=1, num_heads=2, key_dim=16, value_dim=16, taps=4)
BLOCK_SIZE = 64


@dataclass(frozen=True)
class DeltaNets:
    """A step of sequences that have their states, each in blocks of its own.

    Args:
        num_tokens: of each sequence in the step.
    """

    heads: DeltaHeads
    pages: KVPages
    batch: Batch
    mixed: Tensor
    decay: Tensor
    beta: Tensor
    taps: Tensor

    @classmethod
    def of(
        cls, heads: DeltaHeads, num_seqs: int, num_tokens: int, device: torch.device
    ) -> DeltaNets:
        dtype, shape = torch.bfloat16, StateShape(heads, num_layers=1)
        kv_heads = 1, 2, BLOCK_SIZE, 2 * heads.key_dim  # layers, heads
        block_nbytes = 2 * 2 * 2 * BLOCK_SIZE * heads.key_dim * 2
        num_states = shape.num_blocks(block_nbytes)
        pages = new_pages(
            format_of(dtype),
            num_seqs * num_states,
            *kv_heads,
            device,
            places=((0, 0), (1, 0)),
            states=shape,
        )
        assert pages.states is not None
        pages.states.values.normal_(0.0, 0.1)
        own = torch.arange(num_seqs * num_states, dtype=torch.int32, device=device)
        num_rows = 2 + num_tokens // BLOCK_SIZE
        of_states = own.view(num_seqs, num_states, 1).expand(-1, -1, num_rows)
        tables = torch.cat((of_states[:, :1], of_states), 1).flatten(1)
        total, length = num_seqs * num_tokens, BLOCK_SIZE + num_tokens
        starts = torch.arange(0, total + 1, num_tokens, dtype=torch.int32, device=device)
        batch = Batch(
            token_ids=starts,
            positions=starts,
            slots=torch.empty(total, device=device),
            query_start=starts,
            context_lens=torch.full_like(starts[1:], length),
            block_tables=tables,
            logits_rows=starts,
            num_decodes=num_seqs if num_tokens == 1 else 0,
            max_query_len=num_tokens,
            query_lens=(num_tokens,) * num_seqs,
            context_lens_host=(length,) * num_seqs,
        )
        gates = torch.rand(2, total, heads.num_heads, device=device)
        mixed = torch.randn(total, heads.num_channels, device=device).to(dtype)
        taps = torch.randn(heads.num_channels, heads.taps, device=device).to(dtype)
        return cls(heads, pages, batch, mixed, (1 - gates[0] / 10).log(), gates[1], taps)

    @property
    def nbytes(self) -> int:
        """Of the states, read and written."""
        num_seqs = len(self.batch.query_lens)
        return 2 * num_seqs * self.heads.num_heads * self.heads.state_numel * ITEMSIZE

    def advance(self) -> Tensor:
        numbers = self.mixed, self.decay, self.beta, self.taps
        return delta_net(*numbers, self.pages, 1, self.batch)

    def difference(self) -> float:
        """From the twin, as a share of its largest value."""
        states = self.pages.states
        assert states is not None
        before = states.values.clone()
        made = self.advance()
        states.values.copy_(before)
        tables = self.batch.block_tables.view(len(self.batch.query_lens), self.pages.num_groups, -1)
        paging = twin.plan_states(self.batch, tables[:, 1:], BLOCK_SIZE)
        numbers = self.mixed, self.decay, self.beta, self.taps
        wanted = twin.delta_net(*numbers, self.pages, 1, paging)
        return float((made - wanted).abs().max() / wanted.abs().max())
