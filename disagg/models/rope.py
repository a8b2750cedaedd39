"""Rotary position embedding: the tables of cosines and sines a checkpoint asks for.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's frequency scaling as
defined by its reference `apply_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disagg.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn heads. Fields other than `theta` matter only to the kinds named."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: cosines and sines are multiplied by this
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], max_position: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises:
            ModelError: the kind is not one of `KINDS`, or it turns only part of a head.
        """
        scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        if kind not in KINDS:
            raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
        partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ModelError(f"partial_rotary_factor {partial} is not supported, only 1.0")
        factor = float(scaling.get("factor") or 1.0)
        original = scaling.get("original_max_position_embeddings")
        original = original or raw.get("original_max_position_embeddings") or max_position
        theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
        if not (theta > 1 and 0 < factor < 1e6 and 0 < int(original) < 2**31):
            raise ModelError(
                f"rope settings are out of range: theta {theta}, factor {factor}, "
                f"original_max_position_embeddings {original}"
            )
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position=int(original),
            low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
            high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
            truncate=bool(scaling.get("truncate", True)),
        )

    def max_model_len(self, max_position: int) -> int:
        """Longest context in tokens. YaRN stretches the original length by its factor.

        The dynamic kind changes nothing below `max_position`, which is where we stop.
        """
        if self.kind != "yarn":
            return max_position
        return max(max_position, int(self.original_max_position * self.factor))

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return float32 [head_dim / 2]: radians per position."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            return self._llama3(inverse)
        if self.kind == "yarn":
            return self._yarn(inverse, head_dim)
        return inverse

    def tables(self, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [num_positions, head_dim / 2] each."""
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequencies(head_dim))
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Long waves are slowed by `factor`, short ones kept, a ramp lies between."""
        wavelength = 2 * math.pi / inverse
        low, high = self.low_freq_factor, self.high_freq_factor
        ramp = (self.original_max_position / wavelength - low) / (high - low)
        blended = (1 - ramp) * inverse / self.factor + ramp * inverse
        scaled = torch.where(
            wavelength > self.original_max_position / low, inverse / self.factor, blended
        )
        return torch.where(wavelength < self.original_max_position / high, inverse, scaled)

    def _yarn(self, inverse: Tensor, head_dim: int) -> Tensor:
        """Interpolate dimensions that turn less than `beta_slow` times over the original length."""

        def dimension(num_turns: float) -> float:
            turns = self.original_max_position / (num_turns * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        steps = torch.arange(head_dim // 2, dtype=torch.float32)
        ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
        return inverse / self.factor * ramp + inverse * (1 - ramp)


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature: stated, or a tenth of the logarithm of the factor plus one."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        both = float(scaling["mscale"]), float(scaling["mscale_all_dim"])
        return temperature(both[0]) / temperature(both[1])
    return temperature(1.0)
