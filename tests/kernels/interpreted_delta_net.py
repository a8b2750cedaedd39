"""Gated delta nets in Triton equal their twin in torch; run by `test_interpreted.py`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.random_models import random_weights
from disagg.kernels.gpu.delta_net import delta_net
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.kv_pages import KVPages, format_of, new_pages
from disagg.kernels.recurrent_state import DeltaHeads, StateShape
from disagg.kernels.torch import delta_net as twin
from disagg.kv_groups import state_places
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder
from tests.models.paging import SMALL_HYBRID, Tokens, new_slab, run_step

BLOCK_SIZE, NUM_COLUMNS = 4, 11
# Of each sequence its tokens in the step, and those after it: decodes in a row and at its begin, a
# new prompt, prompts in one chunk and more, after others and new, and fewer tokens than taps.
MIXED = [(1, 6), (1, 5), (1, 1), (9, 9), (19, 23), (37, 43), (2, 12), (16, 16)]
SIZES = [
    DeltaHeads(num_key_heads=2, num_heads=4, key_dim=8, value_dim=16, taps=4),
    DeltaHeads(num_key_heads=3, num_heads=3, key_dim=5, value_dim=6, taps=2),
]


@dataclass
class _Inputs:
    mixed: Tensor
    decay: Tensor
    beta: Tensor
    taps: Tensor
    pages: KVPages
    batch: Batch


def _inputs(heads: DeltaHeads, dtype: torch.dtype, *, has_rows: bool) -> _Inputs:
    """Blocks full of other numbers; each sequence has the blocks of its rows, apart."""
    drawn = torch.Generator().manual_seed(11)
    num_seqs, num_tokens = len(MIXED), sum(count for count, _ in MIXED)
    shape, places = StateShape(heads, num_layers=2), state_places(4, (0, 3))
    sizes = 2, 2, BLOCK_SIZE, 14
    pages = new_pages(
        format_of(torch.float32), 800, *sizes, torch.device("cpu"), places=places, states=shape
    )
    pages.blocks.normal_(generator=drawn)
    num_groups = pages.num_groups
    order = torch.randperm(800, generator=drawn)[: num_seqs * num_groups * NUM_COLUMNS]
    tables = order.view(num_seqs, num_groups * NUM_COLUMNS).int()
    counts, lengths = zip(*MIXED, strict=True)
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = torch.arange(num_seqs).flip(0) if has_rows else None
    batch = Batch(
        token_ids=torch.zeros(num_tokens),
        positions=torch.zeros(num_tokens),
        slots=torch.zeros(num_tokens),
        query_start=starts.int(),
        context_lens=torch.tensor(lengths).int(),
        block_tables=tables,
        logits_rows=starts[1:] - 1,
        num_decodes=3,
        max_query_len=max(counts),
        query_lens=counts,
        context_lens_host=lengths,
        table_rows=rows,
    )
    gates = torch.rand(2, num_tokens, heads.num_heads, generator=drawn)
    return _Inputs(
        torch.randn(num_tokens, heads.num_channels, generator=drawn).to(dtype),
        gates[0].log(),
        gates[1],
        torch.randn(heads.num_channels, heads.taps, generator=drawn).to(dtype),
        pages,
        batch,
    )


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_it_is_its_twin(heads: DeltaHeads, dtype: torch.dtype, tolerance: float) -> None:
    """Also the states that it leaves, and that it changes nothing else."""
    inputs, wanted = (_inputs(heads, dtype, has_rows=heads.taps == 2) for _ in range(2))
    for layer in (0, 3):
        numbers = inputs.mixed, inputs.decay, inputs.beta, inputs.taps
        made = delta_net(*numbers, inputs.pages, layer, inputs.batch)
        tables = wanted.batch.block_tables.view(len(MIXED), -1, NUM_COLUMNS)
        of_states = tables[:, wanted.pages.num_kv_groups :]
        paging = twin.plan_states(wanted.batch, of_states, BLOCK_SIZE)
        expected = twin.delta_net(*numbers, wanted.pages, layer, paging)
        torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)
    for pages in (inputs.pages, wanted.pages):
        assert pages.states is not None
        num_used = heads.key_dim * heads.value_dim + heads.channels_of_head * (heads.taps - 1)
        pages.states.values[..., num_used:] = 0.0  # to whole alignment, which nobody reads
    torch.testing.assert_close(inputs.pages.blocks, wanted.pages.blocks, atol=2e-5, rtol=2e-5)


def test_a_sequence_without_context_is_none() -> None:
    """As those are with which a captured graph is filled up."""
    inputs = _inputs(SIZES[0], torch.float32, has_rows=False)
    before = inputs.pages.blocks.clone()
    inputs.batch.context_lens.zero_()
    inputs.batch.query_start[-1] = 1000  # the last one's tokens end behind all rows
    numbers = inputs.mixed, inputs.decay, inputs.beta, inputs.taps
    made = delta_net(*numbers, inputs.pages, 0, inputs.batch)
    assert not made.any()
    assert torch.equal(inputs.pages.blocks, before)


def test_nan_stays_in_its_sequence() -> None:
    inputs, clean = (_inputs(SIZES[0], torch.float32, has_rows=False) for _ in range(2))
    inputs.mixed[4] = torch.nan  # of the second prompt
    made, expected = (
        delta_net(each.mixed, each.decay, each.beta, each.taps, each.pages, 0, each.batch)
        for each in (inputs, clean)
    )
    owner = torch.repeat_interleave(torch.arange(8), inputs.batch.query_start.diff())
    assert made[owner == 3].isnan().any()
    assert torch.equal(made[owner != 3], expected[owner != 3])


def test_a_decoder_is_that_of_a_cpu() -> None:
    """A prompt, a chunk after it, and decodes."""
    made = []
    for ops in (None, TritonOps(SMALL_HYBRID.num_heads, 2)):
        weights = random_weights(SMALL_HYBRID, torch.float32, torch.device("cpu"), seed=2)
        decoder = Decoder(SMALL_HYBRID, weights, ops)
        slab = new_slab(SMALL_HYBRID, 16, 8, torch.float32)
        tokens = Tokens(list(range(40)), [9, 2, 3, 7, 1])
        for count in (11, 9, 1, 1):
            run_step(decoder, slab, [(tokens, count)], 8)
        made.append(torch.stack(tokens.logits))
    torch.testing.assert_close(made[1], made[0], atol=1e-4, rtol=1e-4)
