"""The gated delta rule from torch's own operations (arXiv 2412.06464), with its convolution.

A head's state S, [key_dim, value_dim], predicts a token's value from its key. Each token lets the
state decay, and corrects what it predicts:

    S' = exp(decay) S;   S = S' + beta k (v - k S')^T;   out = q S

Prompts are computed in chunks. Inside a chunk the corrections depend on each other like the
unknowns of a triangular system, so a chunk is a few products of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import PagedBatch
from disagg.kernels.recurrent_state import DeltaHeads

CHUNK = 64  # tokens
_EPS = 1e-6  # of the norms of queries and keys


class TokenHeads(NamedTuple):
    """What the rule reads of some tokens, in float32.

    Attributes:
        q, k: [..., num_heads, num_tokens, key_dim], of length 1; queries are also scaled.
        v: [..., num_heads, num_tokens, value_dim].
        decay: [..., num_heads, num_tokens]: the logarithm of what is left of the state, at most 0.
        beta: [..., num_heads, num_tokens]: how much of the error is corrected.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True)
class StatePaging:
    """Where the layers of one step read and write states.

    A step reads the state in the row of the token before its first one, and writes it to the row of
    its last token.

    Attributes:
        read, write: int64 [num_seqs, blocks of a state].
        is_new: bool [num_seqs], whether a sequence has no state yet.
        spans: for each sequence the rows of its tokens.
        num_decodes: the first sequences, which have one token each.
    """

    read: Tensor
    write: Tensor
    is_new: Tensor
    spans: Sequence[tuple[int, int]]
    num_decodes: int


def plan_states(batch: PagedBatch, tables: Tensor, block_size: int) -> StatePaging:
    """Find where a step reads and writes.

    Args:
        tables: int32 [num_rows, blocks of a state, max_num_rows], block tables of states.
    """
    ends = batch.context_lens.long()
    starts = ends - batch.query_start.diff()
    rows = torch.arange(len(ends), device=ends.device)
    if batch.table_rows is not None:
        rows = batch.table_rows
    columns = [((last - 1).clamp_(min=0) // block_size) for last in (starts, ends)]
    read, write = (tables[rows, :, column].long() for column in columns)
    spans, first = [], 0
    for num_tokens in batch.query_lens:
        spans.append((first, first + num_tokens))
        first += num_tokens
    return StatePaging(read, write, starts == 0, spans, batch.num_decodes)


def delta_net(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    taps: Tensor,
    kv_cache: KVPages,
    layer: int,
    paging: StatePaging,
) -> Tensor:
    """See `Ops.delta_net`."""
    pages = kv_cache.states
    assert pages is not None
    block, place = pages.places[kv_cache.places[layer][1]]
    before = pages.values[paging.read[:, block], place]
    before = before.masked_fill(paging.is_new[:, None, None], 0.0)
    after, out = torch.empty_like(before), mixed.new_empty(*decay.shape, pages.heads.value_dim)
    x, taps = _by_head(mixed, pages.heads), _by_head(taps.T, pages.heads).movedim(0, -1)
    n = paging.num_decodes
    if n:
        own = (each[:n].unsqueeze(2) for each in (x, decay, beta))  # [sequences, heads, 1, ...]
        after[:n], made = _step(_Inputs(*own), taps, before[:n], pages.heads)
        out[:n] = made[:, :, 0]
    for row, (first, end) in list(enumerate(paging.spans))[n:]:
        own = (each[first:end].transpose(0, 1) for each in (x, decay, beta))
        after[row], made = _step(_Inputs(*own), taps, before[row], pages.heads)
        out[first:end] = made.transpose(0, 1)
    pages.values[paging.write[:, block], place] = after
    return out


class _Inputs(NamedTuple):
    """Some tokens of as many sequences before their convolution.

    Attributes:
        x: [..., num_heads, num_tokens, channels_of_head].
        decay, beta: [..., num_heads, num_tokens].
    """

    x: Tensor
    decay: Tensor
    beta: Tensor


def _by_head(mixed: Tensor, heads: DeltaHeads) -> Tensor:
    """Give each head of values its channels: float32 [num_tokens, num_heads, channels_of_head]."""
    size, num_keys = heads.num_key_heads * heads.key_dim, heads.num_key_heads
    q, k, v = mixed.float().tensor_split((size, 2 * size), 1)
    shared = torch.cat([each.view(len(mixed), num_keys, heads.key_dim) for each in (q, k)], 2)
    shared = shared.repeat_interleave(heads.num_heads // num_keys, 1)
    return torch.cat((shared, v.view(len(mixed), heads.num_heads, heads.value_dim)), 2)


def _step(
    inputs: _Inputs, taps: Tensor, before: Tensor, heads: DeltaHeads
) -> tuple[Tensor, Tensor]:
    """The next tokens of sequences with as many each: their states after them, and their outputs.

    Args:
        taps: [num_heads, channels_of_head, taps].
        before: [..., num_heads, state_numel].
    """
    matrix_numel, num_last = heads.key_dim * heads.value_dim, taps.shape[-1] - 1
    kept, num_tokens = matrix_numel + heads.channels_of_head * num_last, inputs.x.shape[-2]
    each_head = before.shape[:-1]
    last = before[..., matrix_numel:kept].reshape(*each_head, heads.channels_of_head, num_last)
    seen = torch.cat((last, inputs.x.transpose(-1, -2)), -1)  # [..., channels, tokens]
    summed = torch.zeros_like(seen[..., num_last:])
    for place in range(num_last + 1):
        summed += seen[..., place : place + num_tokens] * taps[..., place, None]
    convolved = functional.silu(summed).transpose(-1, -2)
    q, k, v = convolved.tensor_split((heads.key_dim, 2 * heads.key_dim), -1)
    q, k = (each * (each.square().sum(-1, keepdim=True) + _EPS).rsqrt() for each in (q, k))
    tokens = TokenHeads(q * heads.key_dim**-0.5, k, v, inputs.decay, inputs.beta)
    state = before[..., :matrix_numel].reshape(*each_head, heads.key_dim, heads.value_dim)
    state, out = (one_token if num_tokens == 1 else chunked)(tokens, state)
    after = torch.zeros_like(before)
    after[..., :matrix_numel] = state.flatten(-2)
    after[..., matrix_numel:kept] = seen[..., num_tokens:].flatten(-2)
    return after, out


def one_token(tokens: TokenHeads, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for one token of each sequence.

    Args:
        state: [..., num_heads, key_dim, value_dim].

    Returns:
        The states after it, and the outputs, [..., num_heads, 1, value_dim].
    """
    q, k, v, decay, beta = tokens
    state = state * decay.exp().unsqueeze(-1)
    state = state + k.transpose(-1, -2) @ (beta.unsqueeze(-1) * (v - k @ state))
    return state, q @ state


def chunked(tokens: TokenHeads, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `one_token`, for any number of tokens of each sequence."""
    outputs = []
    for first in range(0, tokens.q.shape[-2], CHUNK):
        span = slice(first, first + CHUNK)
        q, k, v = (each[..., span, :] for each in tokens[:3])
        decay, beta = (each[..., span] for each in tokens[3:])
        total = decay.cumsum(-1)  # the logarithm of what is left of the state before the chunk
        # What is left at one token of what another wrote; above the diagonal it could overflow.
        left = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        errors = v - (k * total.exp().unsqueeze(-1)) @ state
        system = beta.unsqueeze(-1) * left * (k @ k.transpose(-1, -2))
        corrections = torch.linalg.solve_triangular(
            system, beta.unsqueeze(-1) * errors, upper=False, unitriangular=True
        )
        scores = left * (q @ k.transpose(-1, -2))
        outputs.append((q * total.exp().unsqueeze(-1)) @ state + scores @ corrections)
        at_end = k * (total[..., -1:] - total).exp().unsqueeze(-1)
        kept = state * total[..., -1, None, None].exp()
        state = kept + at_end.transpose(-1, -2) @ corrections
    return state, torch.cat(outputs, -2)
