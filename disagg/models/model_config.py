"""What config.json says about a decoder, as transformers reads it: checked, and in our words.

A key that is absent has the value that the family's configuration class of transformers gives it.
What transformers refuses or would ignore is refused here in words. Reads no file, knows no torch,
no devices and no batches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from disagg.errors import ModelError
from disagg.models.families import FAMILIES, Family, Json
from disagg.models.rope import RopeConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The numbers of one decoder.

    `sliding_windows` has one entry per layer: the number of positions a token sees, itself
    included, or None for all of them.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int  # positions that the model was made for
    dtype: str  # one of `DTYPES`, as it was trained
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf(cls, raw: Json, place: object) -> ModelConfig:
        """
        Args:
            raw: what a config.json holds.
            place: which one, for messages.

        Raises:
            ModelError: a field is missing, broken or unsupported.
        """
        name = _family(raw, place)
        family = FAMILIES[name]
        fields = _Fields({**family.defaults, **raw}, place)
        try:
            return _parsed(fields, name, family)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise fields.wrong(str(error)) from error


class _Fields:
    """The keys of a config.json with the defaults of its family."""

    def __init__(self, raw: Json, place: object) -> None:
        self.raw = raw
        self.place = place

    def wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.place} is wrong: {what}")

    def size(self, key: str) -> int:
        """A positive whole number. Raises `ModelError`."""
        if key not in self.raw:
            raise ModelError(f"{self.place} has no {key!r}")
        value = self.raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.wrong(f"{key} must be a positive number, not {value!r}")
        return value

    def optional_size(self, key: str) -> int | None:
        """As `size`, or None for null."""
        return None if self.raw[key] is None else self.size(key)

    def flag(self, key: str) -> bool:
        """True or false. Raises `ModelError`: also for null, which transformers refuses."""
        value = self.raw[key]
        if not isinstance(value, bool):
            raise self.wrong(f"{key} must be true or false, not {json.dumps(value)}")
        return value


def _family(raw: Json, place: object) -> str:
    architectures = raw.get("architectures") or []
    known = [str(name) for name in architectures if name in FAMILIES]
    if not known:
        said = ", ".join(map(str, architectures))
        raise ModelError(
            f"{place} describes a {said or 'model without architectures'}; supported are"
            f" {', '.join(FAMILIES)}"
        )
    model_type = raw.get("model_type", FAMILIES[known[0]].model_type)
    if model_type != FAMILIES[known[0]].model_type:
        raise ModelError(
            f"{place} contradicts itself: architectures says {known[0]} and model_type says"
            f" {model_type!r}, by which transformers chooses; make them agree"
        )
    return known[0]


def _parsed(fields: _Fields, name: str, family: Family) -> ModelConfig:
    _refuse_unsupported(fields)
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    # Where the default is a size of its own (Qwen3), heads need not divide the hidden size, and
    # the class takes no null.
    has_own = family.defaults["head_dim"] is not None
    head_dim = fields.size("head_dim") if has_own else fields.optional_size("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.wrong(f"hidden_size {hidden_size} is no multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    num_kv_heads = fields.optional_size("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise fields.wrong(
            f"{num_heads} heads over {num_kv_heads} KV heads of size {head_dim} do not fit; the"
            " heads must be a multiple of the KV heads and the size even"
        )
    max_position = fields.size("max_position_embeddings")
    rope = _rope(fields, max_position)
    attention_bias = family.attention_bias == "stated" and fields.flag("attention_bias")
    return ModelConfig(
        family=name,
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_model_len=rope.max_model_len(max_position),
        dtype=_dtype(fields),
        rms_norm_eps=_rms_norm_eps(fields),
        rope=rope,
        sliding_windows=_sliding_windows(fields, name, family),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family.attention_bias == "qkv",
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
    )


def _refuse_unsupported(fields: _Fields) -> None:
    raw, place = fields.raw, fields.place
    if raw.get("quantization_config"):
        raise ModelError(f"{place}: the weights are quantised; only float checkpoints are loaded")
    if raw.get("per_layer_config"):
        raise ModelError(f"{place}: per_layer_config (layers that differ) is not supported")
    if raw["hidden_act"] != "silu":
        raise ModelError(f"{place}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")


def _dtype(fields: _Fields) -> str:
    raw = fields.raw
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{fields.place}: dtype {name} is not one of {', '.join(DTYPES)}")
    return name


def _rms_norm_eps(fields: _Fields) -> float:
    value = fields.raw["rms_norm_eps"]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise fields.wrong(f"rms_norm_eps must lie between 0 and 1, not {value!r}")
    return float(value)


def _rope(fields: _Fields, max_position: int) -> RopeConfig:
    try:
        return RopeConfig.from_hf(fields.raw, max_position)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise fields.wrong(f"the rope settings cannot be read: {error}") from error
    except ModelError as error:
        raise fields.wrong(error.message) from error


def _sliding_windows(fields: _Fields, name: str, family: Family) -> tuple[int | None, ...]:
    """One entry per layer: how many positions a token sees, itself included; None: all."""
    num_layers, is_stated = fields.size("num_hidden_layers"), family.windows == "stated"
    window = fields.optional_size("sliding_window")
    if family.windows == "none" or (is_stated and not fields.flag("use_sliding_window")):
        window = None
    first = fields.raw["max_window_layers"] if is_stated else 0
    if not isinstance(first, int) or isinstance(first, bool):
        raise fields.wrong(f"max_window_layers must be a number, not {first!r}")
    usual = tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return usual
    stated = _windows_of(fields, kinds, window, num_layers)
    if not is_stated and stated != usual:
        raise fields.wrong(f"layer_types is not supported for {name}; take it away")
    return stated


def _windows_of(
    fields: _Fields, kinds: Any, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list):
        raise fields.wrong(f"layer_types must be a list, not {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds if kind not in known})
    if unknown or len(kinds) != num_layers:
        raise fields.wrong(
            f"layer_types must name {num_layers} layers as {' or '.join(known)}; found "
            f"{len(kinds)} with {', '.join(unknown) or 'nothing else'}"
        )
    if window is None and "sliding_attention" in kinds:
        raise fields.wrong(
            "layer_types names sliding_attention, but no window is set; set sliding_window (and"
            " for Qwen use_sliding_window), or call the layers full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
