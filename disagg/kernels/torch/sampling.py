"""Applies sampling parameters and chooses tokens in plain torch.

This is the reference of the Triton kernels and of the C++ loops. A CPU uses it if the C++ loops are
not built, so it sorts only the most likely tokens: sorting all 128k of a vocabulary takes ten times
as long, 0.25 s for 32 sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.sampling_rows import (
    FIRST_GROUP_COUNTER,
    FREQUENCY,
    GOLDEN,
    GROUP_SIZE,
    MIN_TOKENS,
    MIX_1,
    MIX_2,
    PRESENCE,
    REACH,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SampledRows,
    SamplingTables,
)

# So many most likely tokens are sorted: the first number is enough for nearly every row, then the
# second is tried, and then all tokens are sorted.
SORTED_COLUMNS = (1024, 16384)
PLACES = 128  # size of a group in which `most_likely` looks for the largest number
LEAST_GROUPED = 32768  # with fewer numbers per row, the additional calls would take longer


class TorchSampling:
    """`SamplingOps` for every device, meant for CPUs: on a GPU, `choose` would wait for it."""

    def adjust_(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> None:
        vocab_size = logits.shape[1]
        flat = logits.view(-1)
        if rows.remembered.shape[0]:
            slots = rows.slots[rows.remembered]
            numbers = tables.numbers[slots].view(torch.float64)
            num_seen = tables.num_seen[slots].unsqueeze(1)
            ids = tables.seen_ids[slots, : int(num_seen.max())]
            # Unused places repeat the first token, which is then written twice with the same value.
            ids = torch.where(torch.arange(ids.shape[1]) < num_seen, ids, ids[:, :1]).long()
            counts = tables.counts.view(-1)[ids + (slots * vocab_size).unsqueeze(1)] - 1
            places = ids + (rows.remembered * vocab_size).unsqueeze(1)
            scores, repetition = flat[places], _column(numbers, REPETITION).float()
            scores = torch.where(scores > 0, scores / repetition, scores * repetition)
            presence, frequency = _column(numbers, PRESENCE), _column(numbers, FREQUENCY)
            penalties = presence * (counts > 0) + frequency * counts
            flat[places] = scores - penalties.float()
        slots = rows.slots[rows.adjusted]
        is_early = positions[rows.adjusted] < tables.numbers[slots, MIN_TOKENS]
        stop_ids = tables.stop_ids[slots].long()
        # A client may name any token id, also one that is not in the vocabulary.
        is_banned = is_early.unsqueeze(1) & (stop_ids >= 0) & (stop_ids < vocab_size)
        flat[(stop_ids + (rows.adjusted * vocab_size).unsqueeze(1))[is_banned]] += -torch.inf

    def choose(
        self, logits: Tensor, tables: SamplingTables, rows: SampledRows, positions: Tensor
    ) -> Tensor:
        drawn, numbers = rows.drawn, tables.numbers[rows.slots]
        temperatures = numbers[:, TEMPERATURE].view(torch.float64).float()
        peaks = logits.amax(dim=-1)  # NaN if any is
        has_none = ~torch.where(temperatures > 0, peaks / temperatures, peaks).isfinite()
        if drawn.shape[0] == logits.shape[0]:
            token_ids = _draw(logits, numbers, rows, positions)
        else:
            token_ids = most_likely(logits)
            if drawn.shape[0]:
                token_ids[drawn] = _draw(logits[drawn], numbers[drawn], rows, positions[drawn])
        return torch.stack((token_ids.masked_fill_(has_none, 0), has_none.long()))

    def remember(
        self,
        tables: SamplingTables,
        slots: Tensor,
        token_ids: Tensor,
        rows: Tensor,
    ) -> None:
        slots, token_ids = slots[rows], token_ids[rows]
        counts = tables.counts[slots, token_ids]
        tables.counts[slots, token_ids] = counts.clamp(min=1) + 1
        num_seen = tables.num_seen[slots]
        # A token that was seen before is written after the end, and overwritten by the next one.
        tables.seen_ids[slots, num_seen.long()] = token_ids.int()
        tables.num_seen[slots] = num_seen + (counts == 0)


def most_likely(logits: Tensor) -> Tensor:
    """The index of each row's largest number, int64 [num_rows]; the first one if several are equal.

    torch finds the largest number of a row a dozen times faster than its index. So with a large
    vocabulary the index is searched only in the group that has the largest number.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % PLACES or logits.numel() < LEAST_GROUPED:
        return logits.max(dim=-1).indices  # on a CPU three times as fast as argmax
    groups = logits.view(num_rows, -1, PLACES)
    chosen = groups.amax(dim=-1).max(dim=-1).indices
    members = groups[torch.arange(num_rows, device=logits.device), chosen]
    return chosen * PLACES + members.max(dim=-1).indices


def _column(numbers: Tensor, column: int) -> Tensor:
    return numbers[:, column : column + 1]


def _draw(logits: Tensor, numbers: Tensor, rows: SampledRows, positions: Tensor) -> Tensor:
    """Draw one token id for each of the drawn rows, int64 [num_rows]. Overwrites their logits.

    A draw has two stages: first a group of neighbouring token ids by its total probability, then a
    token of that group. This gives the same distribution with a fraction of the noise.

    Args:
        numbers: int64 [num_rows, NUM_COLUMNS], the numbers of the rows' slots.
    """
    scaled = logits.div_(_column(numbers.view(torch.float64), TEMPERATURE).float())
    if rows.has_min_p or rows.narrowed.shape[0]:
        scaled.masked_fill_(scaled < floors(scaled, numbers, rows), -torch.inf)
    num_rows, vocab_size = scaled.shape
    padded = functional.pad(scaled, (0, -vocab_size % GROUP_SIZE), value=-torch.inf)
    groups = padded.view(num_rows, -1, GROUP_SIZE)
    keys = noise_keys(numbers[:, SEED], positions).unsqueeze(1)
    counters = torch.arange(groups.shape[1], device=logits.device) + FIRST_GROUP_COUNTER
    weights = groups.logsumexp(dim=-1).double()
    chosen = (weights + gumbel(keys, counters)).argmax(dim=-1)  # [num_rows]
    members = groups[torch.arange(num_rows, device=logits.device), chosen].double()
    first_ids = chosen * GROUP_SIZE
    token_ids = first_ids.unsqueeze(1) + torch.arange(GROUP_SIZE, device=logits.device)
    return first_ids + (members + gumbel(keys, token_ids)).argmax(dim=-1)


def floors(scaled: Tensor, numbers: Tensor, rows: SampledRows) -> Tensor:
    """The smallest scaled logit that stays a candidate, float32 [num_rows, 1].

    Args:
        scaled: scaled logits of the drawn rows.
        numbers: int64 [num_rows, NUM_COLUMNS], the numbers of the rows' slots.
    """
    floats = numbers.view(torch.float64).float()
    found = scaled.amax(dim=-1, keepdim=True) - _column(floats, REACH)
    narrowed, vocab_size = rows.narrowed, scaled.shape[1]
    top_k, top_p = _column(numbers, TOP_K), _column(floats, TOP_P)
    for num_columns in (*SORTED_COLUMNS, vocab_size):
        if not narrowed.shape[0]:
            break
        some = scaled, found, top_k, top_p
        if narrowed.shape[0] < scaled.shape[0]:
            some = scaled[narrowed], found[narrowed], top_k[narrowed], top_p[narrowed]
        inside, is_cut = floors_of_sorted(*some, min(num_columns, vocab_size))
        found[narrowed] = torch.where(is_cut.unsqueeze(1), some[1], inside)
        narrowed = narrowed[is_cut]
    return found


def floors_of_sorted(
    scaled: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor, num_columns: int
) -> tuple[Tensor, Tensor]:
    """The smallest scaled logit that min-p, top-k and top-p keep, from each row's largest logits.

    Top-k keeps ties with its last token. Top-p keeps the fewest tokens, most likely first, whose
    probabilities, among the tokens that min-p and top-k keep, add up to at least p.

    Args:
        lowest: float32 [num_rows, 1], the smallest scaled logit that min-p keeps.
        top_k: int64 [num_rows, 1], as in `Numbers`.
        top_p: float32 [num_rows, 1], as in `Numbers`.
        num_columns: so many of each row's largest logits are sorted.

    Returns:
        float32 [num_rows, 1], the smallest logits; and bool [num_rows], whether logits beyond the
        sorted ones could change them.
    """
    vocab_size = scaled.shape[-1]
    ordered = scaled.topk(num_columns, dim=-1).values  # [num_rows, num_columns], falling
    is_limited = top_k.clamp(max=vocab_size) <= num_columns
    last_kept = top_k.clamp(max=num_columns) - 1
    lowest = torch.where(is_limited, lowest.maximum(ordered.gather(1, last_kept)), lowest)
    is_kept = ordered >= lowest
    ends_inside = is_limited | ~is_kept[:, -1:]
    totals = ordered.masked_fill(~is_kept, -torch.inf).logsumexp(dim=-1, keepdim=True)
    # Some kept tokens may lie beyond these columns: further tokens if top-k does not end within
    # them, or otherwise ties with the last one. Probabilities are relative to all kept tokens.
    is_whole = ~is_kept[:, -1:] | ~is_limited & (top_k < vocab_size)
    if num_columns < vocab_size and not bool(is_whole.all()):
        whole = scaled.masked_fill(scaled < lowest, -torch.inf).logsumexp(dim=-1, keepdim=True)
        totals = torch.where(is_whole, totals, whole)
    mass = (ordered - totals).double().exp().masked_fill(~is_kept, 0.0)
    before = mass.cumsum(dim=-1) - mass
    is_inside = is_kept & (before < top_p)
    is_inside[:, 0] = True
    floors = ordered.masked_fill(~is_inside, torch.inf).amin(dim=-1, keepdim=True)
    # The total of the tokens that a larger top-k keeps is not known either.
    is_cut = ~ends_inside & (is_inside[:, -1:] | (top_k < vocab_size))
    return floors, is_cut.flatten()


def mix(x: int) -> int:
    """SplitMix64's finalizer for a 64-bit Python integer; `_mix` is the same for tensors."""
    x = (x ^ (x >> 30)) * MIX_1 & _MASK
    x = (x ^ (x >> 27)) * MIX_2 & _MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """An unsigned 64-bit integer as the signed one with the same bits, as torch stores it."""
    return x - (1 << 64) if x >> 63 else x


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The int64 key from which the noise of each position is derived. `seeds` are mixed."""
    return _mix(seeds + positions * signed(GOLDEN))


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise for each (key, counter), float64; int64 arithmetic wraps around."""
    bits = _shift_right(_mix(keys + (counters + 1) * signed(GOLDEN)), 32)
    uniform = (bits.double() + 0.5) / (1 << 32)
    return -torch.log(-torch.log(uniform))


_MASK = (1 << 64) - 1


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Logical shift; torch's is arithmetic."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
