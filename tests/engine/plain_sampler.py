"""A sampler that keeps nothing: it reads the tokens of each sequence in each step.

The oracle of the sampler's counts, which are kept on the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.engine.sched.speculation import Continued
from disagg.engine.sched.step import SampledToken
from disagg.messages import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperatures that only an argmax survives
SORTED_COLUMNS = (
    1024,
    16384,
)  # the first is enough for nearly every row; the rest are sorted whole

GROUP_SIZE = 256
FIRST_GROUP_COUNTER = 1 << 32  # the noise of groups is not that of tokens

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea and Flood, 2014): increment ...
_MIX_1 = 0xBF58476D1CE4E5B9  # ... and multipliers of the finalizer
_MIX_2 = 0x94D049BB133111EB


@torch.inference_mode()
def sample(logits: Tensor, sequences: SequenceOf[Continued]) -> list[SampledToken]:
    """The next token of each sequence.

    Args:
        logits: float32 [num_sequences, vocab_size]; consumed.
        sequences: row i belongs to sequences[i], whose tokens all have been computed.
    """
    wanted = [i for i, sequence in enumerate(sequences) if _is_scored(sequence)]
    log_probs = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
    for i, sequence in enumerate(sequences):
        if _is_adjusted(sequence):
            _adjust_(logits[i], sequence)
    token_ids = _choose(logits, sequences, 0)
    chosen = token_ids.tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(sequences)
    if log_probs is not None:
        nums_top = [sequences[i].sampling.logprobs or 0 for i in wanted]
        for i, found in zip(wanted, _report(log_probs, token_ids[wanted], nums_top), strict=True):
            logprobs[i] = found
    return [SampledToken(*pair) for pair in zip(chosen, logprobs, strict=True)]


def _choose(logits: Tensor, sequences: SequenceOf[Continued], num_unread: int) -> Tensor:
    drawn = [i for i, sequence in enumerate(sequences) if not _is_greedy(sequence)]
    if len(drawn) == len(sequences):
        return _draw(logits, sequences, num_unread)
    token_ids = logits.max(dim=-1).indices  # on a CPU three times as fast as argmax
    if drawn:
        rows = _upload(drawn, torch.int64, logits.device)
        token_ids[rows] = _draw(logits[rows], [sequences[i] for i in drawn], num_unread)
    return token_ids


def _upload(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(values)] on the device, without waiting for what it computes."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _is_scored(sequence: Continued) -> bool:
    sampling = sequence.sampling
    if sampling.logprobs is None:
        return False
    return sampling.logprobs_until is None or sequence.num_output_tokens < sampling.logprobs_until


def _is_greedy(sequence: Continued) -> bool:
    return sequence.sampling.temperature < GREEDY_BELOW


def _is_adjusted(sequence: Continued) -> bool:
    sampling = sequence.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.min_tokens > 0
    )


def _adjust_(row: Tensor, sequence: Continued) -> None:
    """Apply the penalties, and before `min_tokens` rule out the end, in place.

    Repetition (Keskar et al., 2019) is over prompt and output; presence and frequency, as OpenAI
    defines them, over the output.
    """
    sampling, tokens = sequence.sampling, sequence.tokens
    if sampling.repetition_penalty != 1.0:
        present = torch.tensor(sorted(set(tokens)), device=row.device)
        scores = row[present]
        penalty = sampling.repetition_penalty
        row[present] = torch.where(scores > 0, scores / penalty, scores * penalty)
    output = tokens[sequence.num_prompt_tokens :]
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        seen = Counter(output)
        penalties = [
            sampling.presence_penalty + sampling.frequency_penalty * count
            for count in seen.values()
        ]
        row[list(seen)] -= torch.tensor(penalties, device=row.device)
    if sequence.stop_ids and len(output) < sampling.min_tokens:
        # A client may name any number; only those of the vocabulary can be drawn.
        row[[i for i in sequence.stop_ids if 0 <= i < row.shape[0]]] = -math.inf


def _draw(logits: Tensor, sequences: SequenceOf[Continued], num_unread: int) -> Tensor:
    """One token id for each row, int64 [num_rows]; consumes the logits.

    Drawn in two stages, first a group of neighbouring token ids by its total probability, then a
    token of that group: the same distribution for a fraction of the noise.
    """
    device = logits.device
    params = [sequence.sampling for sequence in sequences]
    scaled = logits.div_(_column([p.temperature for p in params], device))
    if any(p.min_p > 0 or _is_narrowed(p) for p in params):
        scaled.masked_fill_(scaled < _floor(scaled, params), -math.inf)
    num_rows, vocab_size = scaled.shape
    padded = functional.pad(scaled, (0, -vocab_size % GROUP_SIZE), value=-math.inf)
    groups = padded.view(num_rows, -1, GROUP_SIZE)
    positions = [sequence.num_tokens + num_unread for sequence in sequences]
    seeds = [_key(p.seed, position) for p, position in zip(params, positions, strict=True)]
    keys = _upload(seeds, torch.int64, device).unsqueeze(1)
    counters = torch.arange(groups.shape[1], device=device) + FIRST_GROUP_COUNTER
    weights = groups.logsumexp(dim=-1).double()
    chosen = (weights + _gumbel(keys, counters)).argmax(dim=-1)  # [num_rows]
    members = groups[torch.arange(num_rows, device=device), chosen].double()
    first_ids = chosen * GROUP_SIZE
    token_ids = first_ids.unsqueeze(1) + torch.arange(GROUP_SIZE, device=device)
    return first_ids + (members + _gumbel(keys, token_ids)).argmax(dim=-1)


def _floor(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """The smallest scaled logit that stays a candidate, float32 [num_rows, 1]."""
    device = scaled.device
    reach = [-math.log(p.min_p) if p.min_p > 0 else math.inf for p in params]
    floor = scaled.amax(dim=-1, keepdim=True) - _column(reach, device)
    narrowed = [i for i, p in enumerate(params) if _is_narrowed(p)]
    if narrowed:
        floor[narrowed] = _nucleus_floor(scaled[narrowed], [params[i] for i in narrowed])
    return floor


def _is_narrowed(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _column(values: list[float], device: torch.device) -> Tensor:
    return _upload(values, torch.float32, device).unsqueeze(1)


def _nucleus_floor(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """The smallest scaled logit that min-p, top-k and top-p keep, float32 [num_rows, 1].

    Top-k keeps ties with its last token. Top-p keeps the fewest tokens, most likely first, whose
    probabilities, among what min-p and top-k have kept, add up to at least p.
    """
    vocab_size = scaled.shape[-1]
    floor = scaled.new_empty(len(params), 1)
    rows = list(range(len(params)))
    for num_columns in (*SORTED_COLUMNS, vocab_size):
        some = [params[i] for i in rows]
        floor[rows], is_cut = _floor_of_sorted(scaled[rows], some, min(num_columns, vocab_size))
        if num_columns >= vocab_size or not bool(is_cut.any()):
            break
        rows = [i for i, cut in zip(rows, is_cut.tolist(), strict=True) if cut]
    return floor


def _floor_of_sorted(
    scaled: Tensor, params: list[SamplingParams], num_columns: int
) -> tuple[Tensor, Tensor]:
    """The floor as found in the largest `num_columns` of each row, and bool [num_rows]: whether
    columns that were not looked at could matter.
    """
    device, vocab_size = scaled.device, scaled.shape[-1]
    ordered = scaled.topk(num_columns, dim=-1).values  # [num_rows, num_columns], falling
    ranks = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    last_kept = torch.tensor(ranks, device=device).clamp(max=num_columns).unsqueeze(1) - 1
    is_limited = torch.tensor([rank <= num_columns for rank in ranks], device=device).unsqueeze(1)
    reach = [-math.log(p.min_p) if p.min_p > 0 else math.inf for p in params]
    lowest = ordered[:, :1] - _column(reach, device)  # of min-p
    lowest = torch.where(is_limited, lowest.maximum(ordered.gather(1, last_kept)), lowest)
    is_kept = ordered >= lowest
    ends_inside = is_limited | ~is_kept[:, -1:]
    # The probabilities are relative to all that is kept, also in columns that are not looked at.
    total = torch.where(
        ends_inside,
        ordered.masked_fill(~is_kept, -math.inf).logsumexp(dim=-1, keepdim=True),
        scaled.masked_fill(scaled < lowest, -math.inf).logsumexp(dim=-1, keepdim=True),
    )
    mass = (ordered - total).double().exp().masked_fill(~is_kept, 0.0)
    before = mass.cumsum(dim=-1) - mass
    enough = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
    is_kept &= before < torch.tensor(enough, device=device).unsqueeze(1)
    is_kept[:, 0] = True
    floor = ordered.masked_fill(~is_kept, math.inf).amin(dim=-1, keepdim=True)
    is_cut = is_kept[:, -1] & ~is_limited.squeeze(1)
    # Nor is the total known of what a larger top-k keeps.
    is_ranked = torch.tensor([rank < vocab_size for rank in ranks], device=device)
    return floor, is_cut | (is_ranked & ~ends_inside.squeeze(1))


def _report(log_probs: Tensor, token_ids: Tensor, nums_top: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens and of the most likely `nums_top[i]` ones."""
    chosen = log_probs.gather(1, token_ids.unsqueeze(1)).flatten().tolist()
    if not any(nums_top):
        return [TokenLogprobs(logprob) for logprob in chosen]
    values, ids = log_probs.topk(min(max(nums_top), log_probs.shape[-1]), dim=-1)
    tops = [
        tuple(zip(row_ids[:num_top], row_values[:num_top], strict=True))
        for row_ids, row_values, num_top in zip(
            ids.tolist(), values.tolist(), nums_top, strict=True
        )
    ]
    return [TokenLogprobs(*pair) for pair in zip(chosen, tops, strict=True)]


def _key(seed: int, position: int) -> int:
    """Where the noise of one position starts, as a signed 64-bit integer."""
    return _signed(_mix(_mix(seed & _MASK) + position * _GOLDEN & _MASK))


def _mix(x: int) -> int:
    """SplitMix64's finalizer on Python integers; `_gumbel` has the same on tensors."""
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise for each (key, counter), float64; int64 arithmetic wraps around."""
    x = keys + (counters + 1) * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    bits = _shift_right(x ^ _shift_right(x, 31), 32)
    uniform = (bits.double() + 0.5) / (1 << 32)
    return -torch.log(-torch.log(uniform))


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Logical shift; torch's is arithmetic."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
