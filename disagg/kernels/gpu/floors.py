"""Finds the smallest logits that top-k, top-p and min-p keep, on CUDA and without sorting.

These parameters keep the tokens above a threshold. Bisecting an interval of float32 bit patterns
finds it exactly: each pass over a row counts the tokens, or adds up their probabilities, above
several thresholds at once. Probabilities are added as integers, so the order of addition does not
matter. First, the largest logit of each group of neighbouring token ids excludes all groups without
candidates; usually few groups remain.

`kernels.torch.sampling.floors` is the plain-torch twin and the specification.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels import sampling_rows
from disagg.kernels.gpu.compiler import next_power_of_2
from disagg.kernels.sampling_rows import GROUP_SIZE, SampledRows, SamplingTables

_NUM_COLUMNS = tl.constexpr(sampling_rows.NUM_COLUMNS)
_TOP_K = tl.constexpr(sampling_rows.TOP_K)
_TEMPERATURE = tl.constexpr(sampling_rows.TEMPERATURE)
_TOP_P = tl.constexpr(sampling_rows.TOP_P)
_REACH = tl.constexpr(sampling_rows.REACH)
_GROUP = tl.constexpr(GROUP_SIZE)
_WAYS = tl.constexpr(8)  # thresholds in one pass over a row
_ONE = tl.constexpr(float(1 << 40))  # the probability of the most likely token, as an integer
_SLACK = tl.constexpr(1e-3)  # margin of a bound that only excludes groups

NUM_GROUPS_AT_ONCE = 8  # groups whose logits a program has in registers
_ANY_ADDRESS = ["slots_ptr"]  # part of the step's upload, so its alignment changes


@triton.jit
def float_of(numbers, COLUMN: tl.constexpr):
    """A column of a slot's numbers that holds a float64."""
    return tl.load(numbers + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def row_of(numbers_ptr, slots_ptr):
    """The row of a program, the numbers of its slot, and its temperature."""
    row = tl.program_id(0).to(tl.int64)
    numbers = numbers_ptr + tl.load(slots_ptr + row) * _NUM_COLUMNS
    return row, numbers, float_of(numbers, _TEMPERATURE).to(tl.float32)


@triton.jit
def scaled(x, temperature):
    """The logits that are compared: in a greedy row as they are, else divided."""
    if temperature > 0.0:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return x


@triton.jit
def scaled_groups(logits_ptr, row, groups, vocab_size, temperature):
    """Scaled logits of some groups of a row, one group a row; -inf beyond the vocabulary."""
    columns = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = columns < vocab_size
    x = tl.load(logits_ptr + row * vocab_size + columns, mask=inside, other=float("-inf"))
    return scaled(x, temperature)


@triton.jit
def safe(x):
    """-inf for NaN and infinity, for which Triton defines no order: a compiled `argmax` may choose
    a place in the padding. `choose` reports such rows, and what is found for them does not matter.
    """
    return tl.where(x < float("inf"), x, float("-inf"))


@triton.jit
def _key(x):
    """Map a float32 to an int64 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _limits(numbers, temperature, vocab_size):
    """Top-k, top-p and min-p's reach of a slot, and whether its row is drawn and cut by them."""
    top_k, top_p = tl.load(numbers + _TOP_K), float_of(numbers, _TOP_P)
    reach = float_of(numbers, _REACH)
    is_limited = (top_k < vocab_size) | (top_p < 1.0) | (reach < float("inf"))
    return top_k, top_p, reach, (temperature > 0.0) & is_limited


@triton.jit(do_not_specialize_on_alignment=_ANY_ADDRESS)
def _groups_kernel(
    logits_ptr,
    numbers_ptr,
    slots_ptr,
    peaks_ptr,
    sums_ptr,
    vocab_size,
    num_groups,
    TILE: tl.constexpr,
):
    """For each group of a row that is cut: the largest scaled logit, and the sum of exp(x - it)."""
    row, numbers, temperature = row_of(numbers_ptr, slots_ptr)
    _, _, _, is_cut = _limits(numbers, temperature, vocab_size)
    if is_cut:
        groups = tl.program_id(1) * TILE + tl.arange(0, TILE)
        x = safe(scaled_groups(logits_ptr, row, groups, vocab_size, temperature))
        peak = tl.max(x, axis=1)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        total = tl.sum(tl.exp(x - base[:, None]), axis=1)
        tl.store(peaks_ptr + row * num_groups + groups, peak, mask=groups < num_groups)
        tl.store(sums_ptr + row * num_groups + groups, total, mask=groups < num_groups)


@triton.jit(do_not_specialize_on_alignment=_ANY_ADDRESS)
def _select_kernel(
    numbers_ptr,
    slots_ptr,
    peaks_ptr,
    sums_ptr,
    chosen_ptr,
    bounds_ptr,
    totals_ptr,
    vocab_size,
    num_groups,
    BLOCK: tl.constexpr,
):
    """For each row that is cut, store the groups that can have a candidate and their number.

    Also store the largest logit (peak) of the row, a bound below which no token is kept, and the
    sum of exp(x - peak) over all tokens.
    """
    row, numbers, temperature = row_of(numbers_ptr, slots_ptr)
    top_k, top_p, reach, is_cut = _limits(numbers, temperature, vocab_size)
    if is_cut:
        places = tl.arange(0, BLOCK)
        inside = places < num_groups
        peaks = tl.load(peaks_ptr + row * num_groups + places, mask=inside, other=float("-inf"))
        sums = tl.load(sums_ptr + row * num_groups + places, mask=inside, other=0.0)
        peak = tl.max(peaks, axis=0)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        total = tl.sum(sums.to(tl.float64) * tl.exp(peaks - base).to(tl.float64), axis=0)
        low = _key(peak - reach.to(tl.float32))
        if top_k < num_groups:  # `top_k` groups have a token at least as large as this:
            low = tl.maximum(low, _kth_largest(peaks, top_k, low, _key(peak) + 1))
        elif (top_k >= vocab_size) & (top_p < 1.0):
            # All tokens less likely than this are together less than the share that top-p omits.
            rest = tl.maximum((1.0 - top_p) * total / vocab_size, 1e-300)
            low = tl.maximum(low, _key(peak + (tl.log(rest) - _SLACK).to(tl.float32)))
        is_chosen = inside & (_key(peaks) >= low)
        order = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        tl.store(chosen_ptr + row * num_groups + order, places, mask=is_chosen)
        tl.store(bounds_ptr + row * 3, low)
        tl.store(bounds_ptr + row * 3 + 1, _key(peak))
        tl.store(bounds_ptr + row * 3 + 2, tl.sum(is_chosen.to(tl.int64), axis=0))
        tl.store(totals_ptr + row, total)


@triton.jit
def _kth_largest(x, k, low, high):
    keys = _key(x)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = tl.sum((keys >= middle).to(tl.int64), axis=0) >= k
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit(do_not_specialize_on_alignment=_ANY_ADDRESS)
def _floors_kernel(
    logits_ptr,
    numbers_ptr,
    slots_ptr,
    chosen_ptr,
    bounds_ptr,
    totals_ptr,
    floors_ptr,
    vocab_size,
    num_groups,
    TILE: tl.constexpr,
):
    """The smallest scaled logit of each row that stays a candidate, float32; -inf if all do."""
    row, numbers, temperature = row_of(numbers_ptr, slots_ptr)
    top_k, top_p, reach, is_cut = _limits(numbers, temperature, vocab_size)
    floor = tl.full((), float("-inf"), tl.float32)
    if is_cut:
        logits, chosen = logits_ptr + row * vocab_size, chosen_ptr + row * num_groups
        low, top = tl.load(bounds_ptr + row * 3), tl.load(bounds_ptr + row * 3 + 1)
        num_chosen = tl.load(bounds_ptr + row * 3 + 2)
        peak = _value(top)
        seen = (logits, chosen, num_chosen, vocab_size, temperature, peak)
        if top_k < vocab_size:
            low = _divide(seen, low, top, top_k, False, TILE)
        if top_p < 1.0:
            total = tl.load(totals_ptr + row) * _ONE
            if (top_k < vocab_size) | (reach < float("inf")):
                bounds = low + tl.zeros((_WAYS,), tl.int64)
                found = _look(seen, bounds, True, TILE)
                total = tl.max(found, axis=0).to(tl.float64)
            # The twin in `kernels.torch.sampling` has top_p in float32.
            needed = tl.ceil(top_p.to(tl.float32).to(tl.float64) * total).to(tl.int64)
            needed = tl.maximum(needed, 1)
            low = _divide(seen, low, top, needed, True, TILE)
        floor = _value(low)
    tl.store(floors_ptr + row, floor)


@triton.jit
def _divide(seen, low, top, needed, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The largest key up to `top` at or above which enough lies; `low` if there is none.

    "Enough" is a number of tokens, or a sum of probabilities.
    """
    high = top + 1
    ways = tl.arange(0, _WAYS).to(tl.int64)
    while high - low > 1:
        step = (high - low + _WAYS - 1) // _WAYS
        bounds = low + ways * step
        found = _look(seen, bounds, BY_MASS, TILE)
        low += step * tl.sum(((found >= needed) & (ways > 0)).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _look(seen, bounds, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """int64 [_WAYS]: for each bound, the number of tokens in the chosen groups whose keys are at
    least the bound, or the sum of their probabilities as integers.

    seen: a row's logits, its chosen groups and their number, the vocabulary size, its temperature
    and its largest scaled logit.
    """
    logits, chosen, num_chosen, vocab_size, temperature, peak = seen
    found = tl.zeros((_WAYS,), tl.int64)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    places = tl.arange(0, TILE * _GROUP)
    for begin in range(0, num_chosen, TILE):
        index = begin + places // _GROUP
        group = tl.load(chosen + index, mask=index < num_chosen, other=0)
        columns = group * _GROUP + places % _GROUP
        inside = (index < num_chosen) & (columns < vocab_size)
        x = tl.load(logits + columns, mask=inside, other=float("-inf"))
        x = safe(tl.div_rn(x, tl.zeros_like(x) + temperature))
        weight = inside.to(tl.int64)
        if BY_MASS:
            weight = (tl.exp(x - base).to(tl.float64) * _ONE).to(tl.int64)
        is_above = (_key(x)[None, :] >= bounds[:, None]) & inside[None, :]
        found += tl.sum(tl.where(is_above, weight[None, :], 0), axis=1)
    return found


def find_floors(logits: Tensor, tables: SamplingTables, rows: SampledRows) -> Tensor:
    """The smallest scaled logit that stays a candidate, float32 [num_rows]; -inf if all do."""
    num_rows, vocab_size = logits.shape
    num_groups = -(-vocab_size // GROUP_SIZE)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    peaks, sums, floors = empty(num_rows, num_groups), empty(num_rows, num_groups), empty(num_rows)
    chosen = empty(num_rows, num_groups, dtype=torch.int32)
    bounds, totals = empty(num_rows, 3, dtype=torch.int64), empty(num_rows, dtype=torch.float64)
    of_row, sizes = (tables.numbers, rows.slots), (vocab_size, num_groups)
    found = chosen, bounds, totals
    tile = NUM_GROUPS_AT_ONCE
    grid = (num_rows, -(-num_groups // tile))
    _groups_kernel[grid](logits, *of_row, peaks, sums, *sizes, TILE=tile)
    block = next_power_of_2(num_groups)
    _select_kernel[(num_rows,)](*of_row, peaks, sums, *found, *sizes, BLOCK=block)
    _floors_kernel[(num_rows,)](logits, *of_row, *found, floors, *sizes, TILE=tile, num_warps=8)
    return floors
