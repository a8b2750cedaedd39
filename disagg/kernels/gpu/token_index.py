"""The tokens that the index of a layer chooses for each query, as Triton kernels.

One kernel scores every token that a query sees, another finds the largest scores: exactly, and of
equal ones the earlier tokens, in order of their positions. Then a query attends to what is chosen
as a sequence of its own (`latent_attention`), so all queries have the same work, whatever their
context is, and the host cuts it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.gpu.attention_work import KEY_TILE, MIN_SPLIT_KEYS, AttentionWork, Launch
from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.gpu.latent_group import SCORES_NBYTES
from disagg.kernels.group_batches import sequences_of_tokens
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.ops import IndexQueries, PagedBatch, TokenIndex

SCORED_TILE = 128  # keys that a program multiplies with the queries of a token
SCORED_TOKENS = 16  # of a prompt, with which a program multiplies the same keys
# Scores that a program reads together, five times, while the next ones come (`num_stages`).
CHOSEN_TILE, CHOSEN_WARPS = 4096, 16
_STEP_TENSORS = ["rows_ptr", "seen_ptr", "contexts_ptr", "scores_ptr", "chosen_ptr"]


@triton.jit(
    do_not_specialize=["first_token", "end_token", "table_stride", "score_stride"],
    do_not_specialize_on_alignment=_STEP_TENSORS,
)
def _score_kernel(
    queries_ptr,
    weights_ptr,
    pages_ptr,
    tables_ptr,
    rows_ptr,
    seen_ptr,
    contexts_ptr,
    scores_ptr,
    first_token,
    end_token,
    token_stride,
    table_stride,
    block_stride,
    score_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Score every n-th tile of keys for some tokens. Those that see few keys need no scores."""
    begin = first_token + tl.program_id(0).to(tl.int64) * TOKENS
    end = tl.minimum(begin + TOKENS, end_token)
    most = 0
    for token in range(begin, end):
        most = tl.maximum(most, tl.load(seen_ptr + token))
    head, column = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    is_head, is_column = head < HEADS, column < DIM
    for start in range(tl.program_id(1) * TILE, most, tl.num_programs(1) * TILE):
        places = start + tl.arange(0, TILE)
        keys = tl.zeros([BLOCK_DIM, TILE], dtype=pages_ptr.dtype.element_ty)
        loaded = begin * 0 - 1  # the row of block tables of which `keys` are
        for token in range(begin, end):
            seen = tl.load(seen_ptr + token)
            if (seen > NUM_CHOSEN) & (start < seen):
                row = tl.load(rows_ptr + token)
                if row != loaded:
                    written = places < tl.load(contexts_ptr + token)
                    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
                    page = tl.load(table_ptr + places // BLOCK_SIZE, mask=written, other=0)
                    vectors = page.to(tl.int64) * block_stride + places % BLOCK_SIZE * VECTOR
                    key_ptrs = pages_ptr + vectors[None, :] + (VECTOR - DIM) + column[:, None]
                    inside = written[None, :] & is_column[:, None]
                    keys = tl.load(key_ptrs, mask=inside, other=0.0)
                    loaded = row
                query_ptr = queries_ptr + token * token_stride
                queries = tl.load(
                    query_ptr + head[:, None] * DIM + column[None, :],
                    mask=is_head[:, None] & is_column[None, :],
                    other=0.0,
                )
                products = tl.dot(queries, keys, input_precision="ieee")
                products = tl.where(products < 0.0, 0.0, products)  # NaN stays
                weight_ptr = weights_ptr + token * HEADS
                weights = tl.load(weight_ptr + head, mask=is_head, other=0.0)
                weighted = tl.where(is_head[:, None], products * weights[:, None], 0.0)
                row_ptr = scores_ptr + (token - first_token) * score_stride
                tl.store(row_ptr + places, tl.sum(weighted, axis=0), mask=places < seen)


@triton.jit
def _ordered(scores):
    """Numbers without sign in the order of the scores: -0 as 0, and NaN as infinity."""
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F800000, bits)
    bits = tl.where(bits == 0x80000000, 0, bits)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(
    do_not_specialize=["first_token", "score_stride"],
    do_not_specialize_on_alignment=_STEP_TENSORS,
)
def _choose_kernel(
    scores_ptr,
    seen_ptr,
    chosen_ptr,
    first_token,
    score_stride,
    NUM_CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Choose for one token. The least score that is chosen is found by 8 bits at a time."""
    token = first_token + tl.program_id(0)
    seen = tl.load(seen_ptr + token)
    row_ptr = scores_ptr + tl.program_id(0).to(tl.int64) * score_stride
    out_ptr = chosen_ptr + token.to(tl.int64) * NUM_CHOSEN
    index = tl.arange(0, TILE)
    if seen <= NUM_CHOSEN:
        for start in range(0, seen, TILE):
            tl.store(out_ptr + start + index, start + index, mask=start + index < seen)
    else:
        digits = tl.arange(0, 256)
        least = (seen * 0).to(tl.uint32)  # the digits found so far
        num_left = seen * 0 + NUM_CHOSEN  # to be chosen of the scores that begin with them
        for step in range(4):
            shift = 24 - 8 * step
            counts = tl.zeros([256], dtype=tl.int32)
            for start in tl.range(0, seen, TILE, num_stages=3):
                is_seen = start + index < seen
                scores = _ordered(tl.load(row_ptr + start + index, mask=is_seen, other=0.0))
                begins_so = ((scores >> shift) >> 8) == ((least >> shift) >> 8)
                digit = ((scores >> shift) & 255).to(tl.int32)
                counts += tl.histogram(digit, 256, mask=is_seen & begins_so)
            at_least = tl.cumsum(counts, 0, reverse=True)
            digit = tl.sum((at_least >= num_left).to(tl.int32)) - 1
            num_left -= tl.sum(tl.where(digits > digit, counts, 0))
            least = least | (digit.to(tl.uint32) << shift)
        place, num_equal = seen * 0, seen * 0
        for start in tl.range(0, seen, TILE, num_stages=3):
            is_seen = start + index < seen
            scores = _ordered(tl.load(row_ptr + start + index, mask=is_seen, other=0.0))
            is_equal = (is_seen & (scores == least)).to(tl.int32)
            is_first = num_equal + tl.cumsum(is_equal, 0) <= num_left
            is_chosen = is_seen & ((scores > least) | ((is_equal != 0) & is_first))
            taken = is_chosen.to(tl.int32)
            places = place + tl.cumsum(taken, 0) - 1
            tl.store(out_ptr + places, start + index, mask=is_chosen)
            place += tl.sum(taken)
            num_equal += tl.sum(is_equal)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What each token of a step attends to, for all layers one after the other.

    Attributes:
        batch: the step, with each token as a sequence of one query, whose keys are the chosen ones.
        work: its attention.
        ends: int32 [num_pieces]: where the pieces of the work end if all tokens have as many keys.
        seen: int32 [num_tokens]: how many tokens each one sees; 0: it belongs to no sequence.
        contexts: int32 [num_tokens]: those of its sequence with vectors in the cache.
        chosen: int32 [num_tokens, num_chosen]: the positions that the last layer with an index has
            chosen, in order. If fewer are seen, the rest is undefined.
        num_programs: that keep the device busy.
        queries_at_once: tokens of a program that scores.
    """

    batch: PagedBatch
    work: AttentionWork
    ends: Tensor
    seen: Tensor
    contexts: Tensor
    chosen: Tensor
    num_programs: int
    queries_at_once: int

    @classmethod
    def of(
        cls, batch: PagedBatch, index: TokenIndex, group: int, num_groups: int, num_programs: int
    ) -> TokenChoice:
        """Room for a step with so many tokens; `cut` fills it.

        Args:
            group: heads of a program of attention, of which there are `num_groups`.
        """
        num_tokens, device = batch.slots.shape[0], batch.slots.device
        of_tokens = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        whole: Any = batch  # a dataclass in each of its forms
        contexts = torch.empty_like(of_tokens[1:])
        is_prompt = num_tokens >= SCORED_TOKENS // 4 * batch.context_lens.shape[0]
        most_pieces = num_programs // max(1, num_tokens * num_groups)
        launch = _pieces(num_tokens, index.num_chosen, group, most_pieces, device)
        return cls(
            replace(
                whole,
                query_start=of_tokens,
                context_lens=torch.empty_like(contexts),
                table_rows=torch.empty(num_tokens, dtype=torch.int64, device=device),
            ),
            AttentionWork((launch,), None),
            launch.pieces[:, 4].clone(),
            torch.empty_like(contexts),
            contexts,
            torch.empty(num_tokens, index.num_chosen, dtype=torch.int32, device=device),
            num_programs,
            SCORED_TOKENS if is_prompt else 1,
        )

    def cut(self, step: PagedBatch) -> None:
        """Fill in what the step that is in the tensors of `step` needs, on the device."""
        own, (launch,) = self.batch, self.work.launches
        assert own.table_rows is not None
        sequences = sequences_of_tokens(step)
        self.contexts.copy_(step.context_lens.index_select(0, sequences))
        rows = sequences
        if step.table_rows is not None:
            rows = step.table_rows.index_select(0, sequences)
        own.table_rows.copy_(rows)
        # Positions do not tell: KV of tokens before may have been given up (`Batch.are_shifted`).
        num_behind = step.query_start.index_select(0, sequences + 1) - own.query_start[1:]
        torch.clamp(self.contexts - num_behind, min=0, out=self.seen)
        torch.clamp(self.seen, max=self.chosen.shape[1], out=own.context_lens)
        # A piece ends at the token's last key, and has none if that lies before its first one.
        keys = own.context_lens.index_select(0, launch.pieces[:, 0])
        starts = launch.pieces[:, 3]
        launch.pieces[:, 4] = torch.maximum(torch.minimum(self.ends, keys), starts)

    def choose(self, asked: IndexQueries, kv_cache: KVPages, layer: int) -> None:
        """Choose the tokens for a layer, whose vectors of this step are in the cache."""
        num_heads, dim = asked.queries.shape[1:]
        pages, block_size = kv_cache.layers[layer].values, kv_cache.values.shape[4]
        tables, num_tokens = self.batch.block_tables, self.seen.shape[0]
        width = tables.shape[1] * block_size
        at_once = max(1, min(num_tokens, SCORES_NBYTES // 4 // width))
        scores = torch.empty(at_once, width, dtype=torch.float32, device=pages.device)
        for first in range(0, num_tokens, at_once):
            end = min(first + at_once, num_tokens)
            num_blocks = -(-(end - first) // self.queries_at_once)
            num_splits = min(4 * self.num_programs // num_blocks + 1, -(-width // SCORED_TILE))
            _score_kernel[num_blocks, num_splits](
                asked.queries,
                asked.weights,
                pages,
                tables,
                self.batch.table_rows,
                self.seen,
                self.contexts,
                scores,
                first,
                end,
                asked.queries.stride(0),
                tables.stride(0),
                pages.stride(0),
                scores.stride(0),
                HEADS=num_heads,
                DIM=dim,
                BLOCK_HEADS=max(16, next_power_of_2(num_heads)),
                BLOCK_DIM=max(16, next_power_of_2(dim)),
                VECTOR=kv_cache.head_dim,
                NUM_CHOSEN=self.chosen.shape[1],
                TOKENS=self.queries_at_once,
                TILE=SCORED_TILE,
                BLOCK_SIZE=block_size,
                num_warps=4,
            )
            _choose_kernel[end - first,](
                scores,
                self.seen,
                self.chosen,
                first,
                scores.stride(0),
                NUM_CHOSEN=self.chosen.shape[1],
                TILE=CHOSEN_TILE,
                num_warps=CHOSEN_WARPS,
            )


def _pieces(
    num_tokens: int, num_chosen: int, group: int, most: int, device: torch.device
) -> Launch:
    """The attention of each token to its chosen ones, in up to `most` pieces of the same size.

    Pieces end where they would end if all tokens had as many keys.
    """
    num_each = max(1, min(most, num_chosen // MIN_SPLIT_KEYS))
    size = num_chosen
    if num_each > 1:
        size = -(-num_chosen // (num_each * KEY_TILE)) * KEY_TILE
        num_each = -(-num_chosen // size)
    number = torch.arange(num_tokens * num_each, dtype=torch.int32, device=device)
    tokens, starts = number // num_each, number % num_each * size
    zeros, ones = torch.zeros_like(number), torch.ones_like(number)
    partials = number if num_each > 1 else -ones
    pieces = torch.stack((tokens, zeros, ones, starts, starts + size, partials), 1)
    first = tokens[::num_each]
    merged = first, zeros[::num_each], ones[::num_each], first * num_each, ones[::num_each]
    num_reductions = num_tokens if num_each > 1 else 0
    counts = [len(number), 0, num_reductions, len(number)]
    return Launch(
        pieces=pieces,
        reductions=torch.stack((*merged[:4], merged[4] * num_each), 1),
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        num_partials=len(number) if num_each > 1 else 0,
        num_merged_rows=group,
        rows=max(16, next_power_of_2(group)),
        group=group,
        least_queries=1,
        most_queries=1,
        num_programs=0,
        is_split_always=False,
    )
