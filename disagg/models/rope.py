"""Settings of rotary position embedding; `decoder.rope_tables` makes its tables. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from disagg.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_LAYERS = _FULL, _WINDOWED = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """RoPE settings. Fields other than `theta` are used only by the kinds in their comments."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, dynamic, llama3, yarn
    original_max_position: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: cosines and sines are multiplied by this
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    score_factor: float = 1.0  # yarn: scores of latent attention are multiplied by this
    partial_factor: float = 1.0  # this share of a head's values, the first ones, is rotated
    short_factors: tuple[float, ...] = ()  # longrope: frequencies are divided by these
    long_factors: tuple[float, ...] = ()  # longrope: or by these, if `is_long`
    is_long: bool = False  # longrope: contexts may be longer than `original_max_position`
    query_beta: float = 0.0  # yarn: queries of later original lengths grow by its logarithm

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], max_position: int) -> RopeConfig:
        """Read `rope_scaling` and `rope_theta` (before transformers 5) or `rope_parameters`.

        If a file has a setting twice, the same one counts as in transformers: `rope_scaling` before
        `rope_parameters`, `rope_type` before `type`, and the outer
        `original_max_position_embeddings` before the one next to the factor.

        Raises:
            ModelError: the kind is not one of `KINDS`; a number is missing, null or out of range.
        """
        scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping):
            raise ModelError(f"rope_scaling must be a JSON object, not {scaling!r}")
        nested = [key for key, value in scaling.items() if isinstance(value, Mapping)]
        if nested:
            raise ModelError(
                f"rope settings by kind of layer ({', '.join(nested)}) are not supported"
            )
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in KINDS:
            raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
        stated = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        partial = 1.0
        if stated is not None:
            partial = _number({"partial_rotary_factor": stated}, "partial_rotary_factor")
        if partial > 1.0:
            raise ModelError(f"partial_rotary_factor {partial:g} is larger than 1")
        theta = _number({"rope_theta": 10_000.0, **raw, **scaling}, "rope_theta", above=1.0)
        if kind == "default":
            return cls(theta=theta, partial_factor=partial)
        if kind in ("linear", "dynamic"):
            # Dynamic scaling changes nothing up to `max_position`, which is the longest context.
            return cls(
                kind=kind, theta=theta, factor=_number(scaling, "factor"), partial_factor=partial
            )
        positions = {"original_max_position_embeddings": max_position, **scaling}
        if "original_max_position_embeddings" in raw:
            positions = raw  # type: ignore[assignment]
        original = int(_number(positions, "original_max_position_embeddings", above=1.0))
        if kind == "llama3":
            low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
            if low >= high:
                raise ModelError(f"low_freq_factor {low} must be below high_freq_factor {high}")
            return cls(
                kind=kind,
                theta=theta,
                factor=_number(scaling, "factor"),
                original_max_position=original,
                low_freq_factor=low,
                high_freq_factor=high,
                partial_factor=partial,
            )
        if kind == "longrope":
            return cls._longrope(scaling, theta, original, max_position, partial)
        if "factor" in scaling and scaling["factor"] is None:
            factor = max_position / original  # the meaning in DeepSeek's files
        else:
            factor = _number(scaling, "factor")
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position=original,
            beta_fast=_optional(scaling, "beta_fast") or 32.0,
            beta_slow=_optional(scaling, "beta_slow") or 1.0,
            attention_factor=_attention_factor(scaling, factor),
            truncate=bool(scaling.get("truncate", True)),
            score_factor=_temperature(factor, _optional(scaling, "mscale_all_dim") or 0.0) ** 2,
            partial_factor=partial,
            query_beta=_optional(scaling, "llama_4_scaling_beta") or 0.0,
        )

    @classmethod
    def _longrope(
        cls,
        scaling: Mapping[str, Any],
        theta: float,
        original: int,
        max_position: int,
        partial: float,
    ) -> RopeConfig:
        factor = _optional(scaling, "factor") or max_position / original
        growth = max(1.0, factor)
        stated = _optional(scaling, "attention_factor")
        usual = math.sqrt(1 + math.log(growth) / math.log(original))
        return cls(
            kind="longrope",
            theta=theta,
            factor=factor,
            original_max_position=original,
            attention_factor=usual if stated is None else stated,
            partial_factor=partial,
            short_factors=_numbers(scaling, "short_factor"),
            long_factors=_numbers(scaling, "long_factor"),
        ).within(max_position)

    @property
    def unturned(self) -> RopeConfig:
        """Of layers without positions, whose values are turned by nothing."""
        return RopeConfig(kind="none", partial_factor=self.partial_factor)

    def within(self, max_model_len: int) -> RopeConfig:
        """The settings for contexts of at most so many tokens.

        transformers chooses LongRoPE's factors by the length that a sequence has now, so the keys
        that it cached become wrong when the sequence grows beyond the original length. Here all
        sequences have one set, as in vLLM, so that cached keys are right for all of them.
        """
        is_long = self.kind == "longrope" and max_model_len > self.original_max_position
        return replace(self, is_long=is_long)

    def max_model_len(self, max_position: int) -> int:
        """The longest context in tokens. YaRN multiplies the original length by its factor."""
        if self.kind != "yarn":
            return max_position
        return max(max_position, int(self.original_max_position * self.factor))


def ropes_by_kind(
    raw: Mapping[str, Any], max_position: int, defaults: Mapping[str, Any]
) -> tuple[RopeConfig, RopeConfig]:
    """Read the RoPE settings of full layers, and of layers with a window.

    If a file does not have them by kind of layer (`rope_parameters`), `rope_scaling` is for full
    layers only, and `rope_local_base_freq` is the theta of layers with a window.

    Args:
        raw: the settings, with the defaults of the family.
        defaults: the family's `rope_theta`, and `rope_local_base_freq` if it has one.

    Raises:
        ModelError: as in `RopeConfig.from_hf`; or the file is ambiguous.
    """
    given, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for name, settings in (("rope_parameters", given), ("rope_scaling", scaling)):
        if not isinstance(settings, Mapping):
            raise ModelError(f"{name} must be a JSON object, not {settings!r}")
    is_unnamed = "type" in scaling and "rope_type" not in scaling
    if given.keys() - _LAYERS or (given and scaling) or is_unnamed:
        raise ModelError(
            "the rope settings of this family must be rope_parameters with"
            f" {' and '.join(_LAYERS)}, or a rope_scaling with rope_type for full layers"
        )
    thetas = {_FULL: raw["rope_theta"]}
    if "rope_local_base_freq" in defaults:
        thetas[_WINDOWED] = raw["rope_local_base_freq"]
    elif raw["rope_theta"] == defaults["rope_theta"]:
        # Another value may be for all layers or for full ones: releases of transformers differ.
        thetas[_WINDOWED] = raw["rope_theta"]
    found = {}
    for layers in _LAYERS:
        own = {**(given.get(layers) or {}), **(scaling if layers == _FULL else {})}
        own.setdefault("rope_theta", thetas.get(layers))
        if own["rope_theta"] is None:
            raise ModelError(f"the rope_theta of {layers} must be set in rope_parameters")
        if not own.get("truncate", True):
            raise ModelError("truncate of rope settings by kind of layer is not supported")
        found[layers] = RopeConfig.from_hf({"rope_parameters": own}, max_position)
    return found[_FULL], found[_WINDOWED]


def _number(source: Mapping[str, Any], key: str, above: float = 0.0) -> float:
    if key not in source:
        raise ModelError(f"the rope settings have no {key}, which their rope type needs")
    value = source[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < 2**31:
        raise ModelError(
            f"{key} of the rope settings must be a number above {above:g}, not {value!r}"
        )
    return float(value)


def _optional(source: Mapping[str, Any], key: str) -> float | None:
    """A number that may be null or left out, in which case YaRN's default counts."""
    value = source.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ModelError(f"{key} of the rope settings must be a number or null, not {value!r}")
    return float(value)


def _numbers(source: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = source.get(key)
    if not isinstance(values, list):
        raise ModelError(f"{key} of the rope settings must be a list of numbers, not {values!r}")
    return tuple(_number({key: value}, key) for value in values)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature: as set, or else one plus a tenth of the logarithm of the factor."""
    stated = _optional(scaling, "attention_factor")
    if stated is not None:
        return stated
    mscale, mscale_all_dim = _optional(scaling, "mscale"), _optional(scaling, "mscale_all_dim")
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor, 1.0)
