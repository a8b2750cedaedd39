"""The gated delta rule in chunks is that of single tokens, and states keep their places.

What models compute with it is compared with transformers in `tests/models`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.kernels.kv_pages import format_of, new_pages
from disagg.kernels.recurrent_state import DeltaHeads, StateShape
from disagg.kernels.torch.delta_net import (
    CHUNK,
    StatePaging,
    TokenHeads,
    chunked,
    delta_net,
    one_token,
)

HEADS = DeltaHeads(num_key_heads=2, num_heads=4, key_dim=5, value_dim=7, taps=3)


def _tokens(num_tokens: int) -> TokenHeads:
    drawn = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, num_tokens, size, generator=drawn) for size in (5, 5, 7))
    q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
    decay, beta = (torch.rand(4, num_tokens, generator=drawn) for _ in range(2))
    # So much is left that the first tokens still matter at the end.
    return TokenHeads(q, k, v, (1 - decay / 50).log(), beta)


def _part(tokens: TokenHeads, first: int, end: int) -> TokenHeads:
    return TokenHeads(*(each[:, first:end] for each in tokens))


def test_chunks_are_the_rule_token_by_token() -> None:
    tokens, start = _tokens(2 * CHUNK + 9), torch.randn(4, 5, 7)
    state, outputs = start, list[Tensor]()
    for place in range(2 * CHUNK + 9):
        state, made = one_token(_part(tokens, place, place + 1), state)
        outputs.append(made)
    by_chunks, made = chunked(tokens, start)
    torch.testing.assert_close(made, torch.cat(outputs, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(by_chunks, state, atol=1e-5, rtol=0)


def test_heads_fill_blocks_and_none_lies_in_two() -> None:
    """Of a state whose layers share a block; each layer changes its own heads only."""
    shape = StateShape(HEADS, num_layers=3)
    places = (0, 0), (1, 0), (1, 1), (1, 2)
    pages = new_pages(
        format_of(torch.float32), 12, 1, 2, 8, 12, torch.device("cpu"), places=places, states=shape
    )
    states = pages.states
    assert states is not None
    held = states.values.shape[1]
    assert states.num_blocks == -(-12 // held) and pages.num_groups == 1 + states.num_blocks
    found = {(int(b), int(p)) for at in states.places for b, p in zip(*at, strict=True)}
    assert len(found) == 12 and all(place < held for _, place in found)
    drawn = torch.Generator().manual_seed(4)
    pages.blocks.normal_(generator=drawn)
    before = states.values.clone()
    read, write = (torch.arange(first, first + states.num_blocks)[None] for first in (0, 6))
    paging = StatePaging(read, write, torch.tensor([False]), [(0, 5)], 0)
    x = torch.randn(5, HEADS.num_channels, generator=drawn)
    gates = torch.rand(2, 5, 4, generator=drawn)
    taps = torch.randn(HEADS.num_channels, 3, generator=drawn)
    delta_net(x, gates[0].log(), gates[1], taps, pages, 2, paging)
    changed = (states.values != before).any(-1)
    block, place = states.places[1]
    assert changed.sum() == 4 and changed[write[0, block], place].all()
