"""The plain-torch twin of every kernel: short, obvious and slow. It computes in float32.

Every other implementation is tested against this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.kernels.activation import Activation
from disagg.kernels.grouping import Grouping
from disagg.kernels.kv_pages import PACKED_STEP, PACKED_TOP, KVFormat, KVPages
from disagg.kernels.ops import Experts, IndexQueries
from disagg.kernels.packed_matrix import LARGEST, PackedMatrix

SMALLEST_PEAK = 1e-30  # so that the scale of a vector of zeros is not 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""
    wide = x.float()
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * inverse * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + residual, and its RMS normalisation."""
    total = (x.float() + residual.float()).to(x.dtype)
    return total, rms_norm(total, weight, eps)


def gated_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up for the halves of [num_rows, 2 * size]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def norm_rope(
    heads: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    mean_squares: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate [num_tokens, num_heads, head_dim] (arXiv 2104.09864).

    The first `rope_dim` values of a head are rotated; the first half of them is paired with the
    second. `cos` and `sin` are the tokens' rows of the tables, [num_tokens, rope_dim / 2]. A head
    is normalised by the mean of its squares, or by `mean_squares`, [num_tokens, num_heads].
    """
    wide = heads.float()
    if norm is not None and mean_squares is not None:
        wide = wide * torch.rsqrt(mean_squares + eps).unsqueeze(-1) * norm
    elif norm is not None:
        wide = rms_norm(wide, norm, eps)
    rotated, rest = wide.tensor_split((2 * cos.shape[-1],), dim=-1)
    left, right = rotated.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = (left * cos - right * sin, right * cos + left * sin, rest)
    return torch.cat(turned, dim=-1).to(heads.dtype)


def choose_experts(logits: Tensor, num_chosen: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return float32 weights and int64 experts, [num_tokens, num_chosen] each, largest first."""
    ordered = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    chosen, experts = ordered.values[:, :num_chosen], ordered.indices[:, :num_chosen]
    if is_normalized:
        return chosen.softmax(-1), experts
    return logits.float().softmax(-1).gather(1, experts), experts


def choose_grouped(
    logits: Tensor,
    bias: Tensor | None,
    num_chosen: int,
    is_normalized: bool,
    grouping: Grouping,
) -> tuple[Tensor, Tensor]:
    """As `choose_experts`, with a `Grouping` (arXiv 2405.04434, 2412.19437).

    Args:
        bias: [num_experts], added to the scores only for the choice; or None.
    """
    wide = logits.float()
    scores = wide.sigmoid() if grouping.is_sigmoid else wide.softmax(-1)
    ranked = scores if bias is None else scores + bias.float()
    if grouping.num_groups > 1:
        size = ranked.shape[1] // grouping.num_groups
        groups = ranked.view(-1, grouping.num_groups, size)
        num_best = min(2 if grouping.is_sigmoid else 1, size)
        of_groups = groups.topk(num_best).values.sum(-1)
        best = of_groups.sort(dim=-1, descending=True, stable=True).indices
        left_out = best[:, grouping.num_chosen_groups :, None].expand(-1, -1, size)
        ranked = groups.scatter(1, left_out, float("-inf")).flatten(1)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weights = scores.gather(1, chosen)
    if is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * grouping.scale, chosen


def gated(gate: Tensor, up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """Return the gated activation of `ops.Experts`."""
    if limit is None:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _multiply(
    stored: Tensor | PackedMatrix, num_rows: int, in_8_bits: bool, expert: int, x: Tensor
) -> Tensor:
    """One expert's matrix times a vector, in float32."""
    if not isinstance(stored, PackedMatrix):
        return stored[expert].float() @ x
    own = stored.rows(expert * num_rows, (expert + 1) * num_rows)
    is_narrow = in_8_bits and own.input_scale is not None
    return (eight_bit_linear if is_narrow else packed_linear)(x[None], own, None)[0]


def choose(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Choose experts as the settings of `experts` say; returns as `choose_experts`."""
    how = experts.num_chosen, experts.is_normalized
    if experts.grouping is None:
        return choose_experts(logits, *how)
    return choose_grouped(logits, experts.score_bias, *how, experts.grouping)


def mix_experts(x: Tensor, logits: Tensor, experts: Experts, *, in_8_bits: bool = False) -> Tensor:
    """Send each token through its experts, one by one; shapes as in `ops.Ops.mix_experts`.

    in_8_bits: whether matrices that say so multiply activations that are quantised.
    """
    gate_up = partial(_multiply, experts.gate_up, 2 * experts.inner, in_8_bits)
    down = partial(_multiply, experts.down, x.shape[1], in_8_bits)
    weights, chosen = choose(logits, experts)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, own in enumerate(chosen.tolist()):
        for weight, expert in zip(weights[token], own, strict=True):
            if expert not in experts.held:
                continue
            place = expert - experts.held.start
            inner = gate_up(place, x[token].float())
            if experts.gate_up_bias is not None:
                inner += experts.gate_up_bias[place].float()
            gate, up = inner.chunk(2)
            made = down(place, gated(gate, up, experts.limit, experts.alpha))
            if experts.down_bias is not None:
                made += experts.down_bias[place].float()
            out[token] += weight * made
    return out.to(x.dtype)


def quantize(vectors: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Quantise vectors (the last dimension). Returns the stored numbers, and float32 scales.

    The largest value becomes `format.largest`; the others are rounded to nearest, half to even.
    """
    wide = vectors.float()
    peaks = wide.abs().amax(-1).clamp(min=SMALLEST_PEAK)
    if format.largest < 0.0:
        peaks = torch.where(wide.amin(-1) <= -peaks, -peaks, peaks)
    scales = peaks / format.largest
    scaled = wide / scales.unsqueeze(-1)
    if format.packed == 2:
        halves = (scaled / PACKED_STEP).round().clamp(max=PACKED_TOP).to(format.dtype)
        return (halves[..., 0::2] & 15) | (halves[..., 1::2] << 4), scales
    return (scaled if format.dtype.is_floating_point else scaled.round()).to(format.dtype), scales


def widen(stored: Tensor, format: KVFormat) -> Tensor:
    """The stored numbers as float32 [..., head_dim], without their scales."""
    if format.packed == 2:
        return torch.stack((stored << 4, stored & -PACKED_STEP), -1).flatten(-2).float()
    return stored.float()


def numbers(kv_cache: KVPages) -> Tensor:
    """All cached values, scaled: float32 in the unpacked shape of `values`."""
    wide = widen(kv_cache.values, kv_cache.format)
    return wide if kv_cache.scales is None else wide * kv_cache.scales.unsqueeze(-1)


def kv_write(qkv: Tensor, kv_cache: KVPages, layer: int, slots: Tensor) -> None:
    """Store the keys and values of `qkv` at `slots`; shapes as in `kernels.kv_write`."""
    num_vectors, num_kv_heads, block_size = kv_cache.values.shape[2:5]
    stored = qkv[:, -num_vectors * num_kv_heads :]
    vectors = stored.view(-1, num_vectors, num_kv_heads, kv_cache.head_dim)
    for row, slot in enumerate(slots.tolist()):
        block_id, offset = divmod(slot, block_size)
        if kv_cache.scales is None:
            kv_cache.values[block_id, layer, :, :, offset] = vectors[row]
            continue
        values, scales = quantize(vectors[row], kv_cache.format)
        kv_cache.values[block_id, layer, :, :, offset] = values
        kv_cache.scales[block_id, layer, :, :, offset] = scales


def paged_attention(
    q: Tensor,
    kv_cache: KVPages,
    layer: int,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    chosen: Sequence[Tensor] | None = None,
) -> Tensor:
    """Attend causally, one sequence after the other, to keys and values in the cache.

    Args:
        q: [num_tokens, num_heads, head_dim], sequences packed back to back.
        block_tables: [num_seqs, max_num_blocks].
        query_lens: number of tokens of each sequence in `q`; they are its last tokens.
        context_lens: positions of each sequence in the cache, including those of the step.
        window: number of positions that a token sees, including itself; None: all.
        sinks: [num_heads], a logit in each head's softmax that has no value.
        scale: softmax scale; None: head_dim^-0.5.
        cap: scores become cap * tanh(score / cap); None: they stay.
        chosen: the result of `choose_tokens` for each sequence; None: each query attends to all.

    Returns:
        [num_tokens, num_heads, head_dim]. Latents are keys and values, so results are as wide.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.values.shape[3]
    parts = []
    for row, own in enumerate(torch.split(q.float(), list(query_lens))):
        length = context_lens[row]
        block_ids = block_tables[row].long()
        blocks = widen(kv_cache.values[block_ids, layer], kv_cache.format)
        if kv_cache.scales is not None:
            blocks = blocks * kv_cache.scales[block_ids, layer].unsqueeze(-1)
        by_head = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        dense = by_head.repeat_interleave(num_heads // num_kv_heads, dim=1)
        keys, values = dense[0], dense[-1]
        scores = torch.einsum("qhd,hkd->hqk", own, keys) * (scale or head_dim**-0.5)
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        key = torch.arange(length, device=q.device)
        query = key[length - own.shape[0] :, None]
        hidden = (key > query) | (key <= query - (window or length))
        if chosen is not None:
            hidden |= ~chosen[row]
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        parts.append(torch.einsum("hqk,hkd->qhd", weights, values))
    return torch.cat(parts).to(q.dtype)


def choose_tokens(asked: IndexQueries, keys: Tensor, num_chosen: int) -> Tensor:
    """Whether each query of a sequence has chosen each token: [num_queries, num_keys].

    Args:
        asked: by the last tokens of the sequence.
        keys: [num_keys, key_dim].
    """
    products = torch.einsum("qhd,kd->qhk", asked.queries.float(), keys.float()).relu()
    scores = torch.einsum("qh,qhk->qk", asked.weights, products)
    scores = scores.where(~scores.isnan(), torch.inf)
    place = torch.arange(len(keys), device=keys.device)
    hidden = place > place[len(keys) - len(scores) :, None]
    ordered = scores.masked_fill(hidden, -torch.inf).sort(descending=True, stable=True).indices
    return torch.zeros_like(hidden).scatter(1, ordered[:, :num_chosen], True) & ~hidden


def packed_linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return x W^T + b: [num_rows, num_in] in, [num_rows, num_out] out."""
    wide_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.widened(torch.float32), wide_bias).to(x.dtype)


def quantize_rows(x: Tensor, weight: PackedMatrix) -> tuple[Tensor, Tensor]:
    """Quantise activations as a product in 8 bits with `weight` does.

    A row, or group of its columns, with NaN or infinity has the scale NaN and zeros.

    Returns:
        Numbers and their scales, as float32 of the shape of `x`.
    """
    size = weight.group or x.shape[1]
    padded = functional.pad(x.float(), (0, -x.shape[1] % size))
    groups = padded.view(len(x), -1, size)
    largest = LARGEST[weight.kind]
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK) / largest
    if weight.input_scale:
        scales = torch.full_like(scales, weight.input_scale)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    scaled = (groups * (1.0 / scales)).clamp(-largest, largest).where(is_finite, 0.0)
    exact = scaled.to(torch.float8_e4m3fn).float() if weight.kind == "fp8" else scaled.round()
    scales = scales.where(is_finite, torch.nan).expand_as(groups)
    return exact.flatten(1)[:, : x.shape[1]], scales.flatten(1)[:, : x.shape[1]]


def eight_bit_linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
    """As `packed_linear` with activations that are quantised, summed in float64."""
    numbers, scales = quantize_rows(x, weight)
    wide = weight.widened(torch.float32).double()
    out = functional.linear(numbers.double() * scales, wide)
    return (out if bias is None else out + bias.double()).to(x.dtype)
