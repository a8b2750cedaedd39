"""Computes the tables of cosines and sines of rotary position embedding.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and `apply_scaling` of Llama 3.1's
reference code. The tables are equal to those of transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from disagg.models.rope import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 [num_positions, head_dim / 2] each."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return float32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between them."""
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    ramp = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - ramp) * inverse / rope.factor + ramp * inverse
    scaled = torch.where(
        wavelength > rope.original_max_position / low, inverse / rope.factor, blended
    )
    return torch.where(wavelength < rope.original_max_position / high, inverse, scaled)


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> Tensor:
    """Interpolate dimensions that rotate less than `beta_slow` times in the original length."""

    def dimension(num_turns: float) -> float:
        turns = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # If the original length is only a few positions, the ends may be in the wrong order. Then the
    # ramp is 0 everywhere beyond `low`, as in transformers.
    width = high - low if high != low else 0.001
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / width).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)
