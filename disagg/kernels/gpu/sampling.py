"""Sampling on CUDA: few kernel launches, and no wait for the device.

`floors` finds what top-k, top-p and min-p keep. `kernels/torch/sampling.py` is the plain-torch twin
and the specification.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels import sampling_rows
from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.gpu.floors import (
    NUM_GROUPS_AT_ONCE,
    find_floors,
    float_of,
    row_of,
    safe,
    scaled,
    scaled_groups,
)
from disagg.kernels.sampling_rows import GROUP_SIZE, SampledRows, SamplingTables

_NUM_COLUMNS = tl.constexpr(sampling_rows.NUM_COLUMNS)
_SEED = tl.constexpr(sampling_rows.SEED)
_MIN_TOKENS = tl.constexpr(sampling_rows.MIN_TOKENS)
_REPETITION = tl.constexpr(sampling_rows.REPETITION)
_PRESENCE = tl.constexpr(sampling_rows.PRESENCE)
_FREQUENCY = tl.constexpr(sampling_rows.FREQUENCY)
_GOLDEN = tl.constexpr(sampling_rows.GOLDEN)
_MIX_1 = tl.constexpr(sampling_rows.MIX_1)
_MIX_2 = tl.constexpr(sampling_rows.MIX_2)
_FIRST_GROUP_COUNTER = tl.constexpr(sampling_rows.FIRST_GROUP_COUNTER)
_GROUP = tl.constexpr(GROUP_SIZE)

_MIN_STOPS = 16  # so that hardly any request has more stop tokens, which need another compilation
_ANY_ADDRESS = ["slots_ptr", "rows_ptr", "positions_ptr", "token_ids_ptr"]
_ANY_SIZE = ["num_stop_ids", "seen_width"]


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _noise_key(seed, position):
    return _mix(seed.to(tl.uint64) + position.to(tl.uint64) * _GOLDEN)


@triton.jit
def _gumbel(key, counters):
    bits = _mix(key + (counters.to(tl.uint64) + 1) * _GOLDEN) >> 32
    uniform = (bits.to(tl.int64).to(tl.float64) + 0.5) / 4294967296.0
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=_ANY_SIZE, do_not_specialize_on_alignment=_ANY_ADDRESS)
def _adjust_kernel(
    logits_ptr,
    numbers_ptr,
    stop_ids_ptr,
    seen_ids_ptr,
    num_seen_ptr,
    counts_ptr,
    slots_ptr,
    rows_ptr,
    positions_ptr,
    vocab_size,
    num_stop_ids,
    seen_width,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
):
    row = tl.load(rows_ptr + tl.program_id(0))
    slot = tl.load(slots_ptr + row)
    numbers = numbers_ptr + slot * _NUM_COLUMNS
    logits = logits_ptr + row * vocab_size
    repetition = float_of(numbers, _REPETITION).to(tl.float32)
    presence, frequency = float_of(numbers, _PRESENCE), float_of(numbers, _FREQUENCY)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        num_seen = tl.load(num_seen_ptr + slot)
        for begin in range(0, num_seen, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            is_seen = places < num_seen
            ids = tl.load(seen_ids_ptr + slot * seen_width + places, mask=is_seen, other=0)
            count = tl.load(counts_ptr + slot * vocab_size + ids, mask=is_seen, other=1) - 1
            score = tl.load(logits + ids, mask=is_seen, other=0.0)
            divisor = tl.where(score > 0, repetition, 1.0)
            score = tl.where(score > 0, tl.div_rn(score, divisor), score * repetition)
            penalty = presence * (count > 0).to(tl.float64) + frequency * count.to(tl.float64)
            tl.store(logits + ids, score - penalty.to(tl.float32), mask=is_seen)
    if tl.load(positions_ptr + row) < tl.load(numbers + _MIN_TOKENS):
        tl.debug_barrier()  # the same logit may just have been written
        places = tl.arange(0, STOPS)
        named = places < num_stop_ids
        ids = tl.load(stop_ids_ptr + slot * num_stop_ids + places, mask=named, other=-1)
        is_banned = (ids >= 0) & (ids < vocab_size)
        score = tl.load(logits + ids, mask=is_banned, other=0.0)
        banned = tl.where(score < float("inf"), float("-inf"), score)
        tl.store(logits + ids, banned, mask=is_banned)


@triton.jit
def _kept(x, floors_ptr, row):
    """Scaled logits of a row that is drawn; -inf for tokens that are no candidates."""
    if floors_ptr is not None:
        x = tl.where(x >= tl.load(floors_ptr + row), x, float("-inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=_ANY_ADDRESS)
def _score_kernel(
    logits_ptr,
    numbers_ptr,
    slots_ptr,
    positions_ptr,
    floors_ptr,
    scores_ptr,
    vocab_size,
    num_groups,
    TILE: tl.constexpr,
):
    """Score each group: log probability plus noise; in a greedy row the largest logit.

    No score is NaN, and it is infinite only if a logit of the group is NaN or infinite.
    """
    row, numbers, temperature = row_of(numbers_ptr, slots_ptr)
    groups = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = scaled_groups(logits_ptr, row, groups, vocab_size, temperature)
    is_invalid = tl.max(tl.where(x < float("inf"), 0, 1), axis=1) > 0
    x = safe(x)
    if temperature > 0.0:
        x = _kept(x, floors_ptr, row)
        peak = tl.max(x, axis=1)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        total = tl.log(tl.maximum(tl.sum(tl.exp(x - base[:, None]), axis=1), 1e-30))
        weight = tl.where(peak > float("-inf"), base + total, peak).to(tl.float64)
        key = _noise_key(tl.load(numbers + _SEED), tl.load(positions_ptr + row))
        score = weight + _gumbel(key, groups.to(tl.int64) + _FIRST_GROUP_COUNTER)
    else:
        score = tl.max(x, axis=1).to(tl.float64)
    score = tl.where(is_invalid, float("inf"), score)
    tl.store(scores_ptr + row * num_groups + groups, score, mask=groups < num_groups)


@triton.jit(do_not_specialize_on_alignment=_ANY_ADDRESS)
def _pick_kernel(
    logits_ptr,
    numbers_ptr,
    slots_ptr,
    positions_ptr,
    floors_ptr,
    scores_ptr,
    chosen_ptr,
    vocab_size,
    num_groups,
    BLOCK: tl.constexpr,
):
    """Choose the best token of the best group of each row; see `SamplingOps.choose`."""
    row, numbers, temperature = row_of(numbers_ptr, slots_ptr)
    places = tl.arange(0, BLOCK)
    inside = places < num_groups
    scores = tl.load(scores_ptr + row * num_groups + places, mask=inside, other=float("-inf"))
    best = tl.max(scores, axis=0)
    has_none = (best == float("inf")) | (best == float("-inf"))
    group = tl.argmax(scores, axis=0).to(tl.int64)
    columns = group * _GROUP + tl.arange(0, _GROUP)
    inside = columns < vocab_size
    x = tl.load(logits_ptr + row * vocab_size + columns, mask=inside, other=float("-inf"))
    x = safe(scaled(x, temperature))
    score = x.to(tl.float64)
    if temperature > 0.0:
        x = _kept(x, floors_ptr, row)
        key = _noise_key(tl.load(numbers + _SEED), tl.load(positions_ptr + row))
        score = x.to(tl.float64) + _gumbel(key, columns)
    token_id = group * _GROUP + tl.argmax(score, axis=0)
    tl.store(chosen_ptr + row, tl.where(has_none, 0, token_id))
    tl.store(chosen_ptr + tl.num_programs(0) + row, has_none.to(tl.int64))


@triton.jit(do_not_specialize=_ANY_SIZE, do_not_specialize_on_alignment=_ANY_ADDRESS)
def _remember_kernel(
    seen_ids_ptr,
    num_seen_ptr,
    counts_ptr,
    slots_ptr,
    rows_ptr,
    token_ids_ptr,
    vocab_size,
    seen_width,
):
    row = tl.load(rows_ptr + tl.program_id(0))
    slot, token_id = tl.load(slots_ptr + row), tl.load(token_ids_ptr + row)
    place = counts_ptr + slot * vocab_size + token_id
    count, num_seen = tl.load(place), tl.load(num_seen_ptr + slot)
    tl.store(place, tl.maximum(count, 1) + 1)
    if count == 0:
        tl.store(seen_ids_ptr + slot * seen_width + num_seen, token_id.to(tl.int32))
        tl.store(num_seen_ptr + slot, num_seen + 1)


class TritonSampling:
    """`SamplingOps` for CUDA."""

    def adjust_(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> None:
        _adjust_kernel[rows.adjusted.shape[0],](
            logits,
            tables.numbers,
            tables.stop_ids,
            tables.seen_ids,
            tables.num_seen,
            tables.counts,
            rows.slots,
            rows.adjusted,
            positions,
            logits.shape[1],
            tables.stop_ids.shape[1],
            tables.seen_ids.shape[1],
            BLOCK=1024,
            STOPS=max(_MIN_STOPS, next_power_of_2(tables.stop_ids.shape[1])),
        )

    def choose(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> Tensor:
        floors = None
        if rows.has_min_p or rows.narrowed.shape[0]:
            floors = find_floors(logits, tables, rows)
        num_rows, vocab_size = logits.shape
        num_groups = -(-vocab_size // GROUP_SIZE)
        chosen = torch.empty(2, num_rows, dtype=torch.int64, device=logits.device)
        scores = torch.empty(num_rows, num_groups, dtype=torch.float64, device=logits.device)
        row = (logits, tables.numbers, rows.slots, positions, floors, scores)
        tile = NUM_GROUPS_AT_ONCE
        grid = (num_rows, -(-num_groups // tile))
        _score_kernel[grid](*row, vocab_size, num_groups, TILE=tile)
        block = next_power_of_2(num_groups)
        _pick_kernel[(num_rows,)](*row, chosen, vocab_size, num_groups, BLOCK=block)
        return chosen

    def remember(
        self,
        tables: SamplingTables,
        slots: Tensor,
        token_ids: Tensor,
        rows: Tensor,
    ) -> None:
        _remember_kernel[rows.shape[0],](
            tables.seen_ids,
            tables.num_seen,
            tables.counts,
            slots,
            rows,
            token_ids,
            tables.counts.shape[1],
            tables.seen_ids.shape[1],
        )
