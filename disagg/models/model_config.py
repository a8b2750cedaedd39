"""Reads the settings of a decoder from config.json as transformers does, and checks them.

A missing key has the default of the family's configuration class in transformers. Settings that
transformers refuses or would ignore raise an error. Reads no file, and knows no torch, no devices
and no batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from disagg.errors import ModelError
from disagg.kernels.activation import Activation
from disagg.models.experts_config import ExpertsConfig, dense_layers, experts_config
from disagg.models.families import FAMILIES, NOT_YET
from disagg.models.family import Family, Fields, Json
from disagg.models.quantized import QuantizedFormat, quantized_format
from disagg.models.rope import RopeConfig, ropes_by_kind

DTYPES = ("float32", "bfloat16", "float16")
_MOST_LAYERS = 10_000  # each layer is described before its weights are known
_LAYER_TYPES = ("sliding_attention", "full_attention")
_SCALAR = "query_pre_attn_scalar"


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Settings of attention in which each token has one small vector, its latent.

    The keys and values of all heads are made from the latent. The cache keeps the latent and one
    key with rotary positions. All heads share both.

    Attributes:
        rank: values of a latent (`kv_lora_rank`).
        query_rank: values of the vector from which queries are made (`q_lora_rank`); None: queries
            are made from the hidden state.
        rope_dim: values of a query, and of a key, with rotary positions (`qk_rope_head_dim`).
        nope_dim: values of both without positions (`qk_nope_head_dim`).
        value_dim: values of a head's value (`v_head_dim`).
        scale: scores are multiplied by this before the softmax.
        is_interleaved: whether RoPE rotates pairs of neighbouring values. If not, it rotates value
            i of the first half together with value i of the second half.
    """

    rank: int
    query_rank: int | None
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    is_interleaved: bool

    @property
    def query_dim(self) -> int:
        """The number of values of a head's query before it is multiplied by the key matrix."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """The number of values that the cache keeps for each token in each layer."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of one decoder.

    `sliding_windows` has one entry per layer: the number of positions that a token sees, including
    itself, or None for all.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int  # most positions
    dtype: str  # one of `DTYPES`, in which it was trained
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = False  # one norm over all heads of q, one over those of k
    is_fused: bool = False  # the checkpoint has q, k and v in one tensor, and gate and up too
    sinks: bool = False  # each query head has a logit that takes part in its softmax
    experts: ExpertsConfig | None = None
    dense_layers: frozenset[int] = frozenset()  # layers without experts, if the model has experts
    latent: LatentConfig | None = None  # latents are then the only KV head
    num_nextn_layers: int = 0  # layers after the others that predict further tokens; not used
    quantized: QuantizedFormat | None = None  # the format of a quantised checkpoint
    norms: Literal["before", "after", "around"] = "before"  # attention and MLP of a layer
    norms_less_one: bool = False  # the checkpoint has weights of norms minus one
    scaled_embedding: bool = False  # embeddings are multiplied by the root of the hidden size
    activation: Activation = "silu"  # of MLPs
    window_rope: RopeConfig | None = None  # of layers with a window, if it differs
    query_scalar: int | None = None  # scores are divided by its root; None: by the head size's root
    score_cap: float | None = None  # the same for attention scores as `logit_cap` for logits
    logit_cap: float | None = None  # the largest absolute value of logits: cap * tanh(x / cap)

    @property
    def rope_dim(self) -> int:
        """The number of values of a head that RoPE rotates."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.rope.partial_factor)

    @property
    def num_vectors(self) -> int:
        """The number of cached vectors per token, layer and KV head: a key and a value, or one."""
        return 2 if self.latent is None else 1

    @property
    def score_scale(self) -> float | None:
        """The factor of products of queries and keys; None: head_dim^-0.5."""
        is_usual = self.query_scalar in (None, self.head_dim)
        return None if is_usual or self.query_scalar is None else self.query_scalar**-0.5

    def experts_in(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None if its MLP is dense."""
        return None if layer in self.dense_layers else self.experts

    @classmethod
    def from_hf(cls, raw: Json, place: object) -> ModelConfig:
        """Read and check a config.json.

        Args:
            raw: the contents of the file.
            place: the file's path, for messages.

        Raises:
            ModelError: a field is missing, broken or unsupported.
        """
        fields = Fields(raw, place)
        try:
            name = _family(raw, place)
            family = FAMILIES[name]
            fields = Fields({**family.defaults, **raw}, place)
            return _parsed(fields, name, family)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise fields.wrong(str(error)) from error


def not_compiled(config: ModelConfig) -> str:
    """A model's features that the compiled CPU step lacks (`csrc/step.cpp`), as a phrase.

    It is empty if the step has all of them.
    """
    is_partial = config.latent is None and config.rope_dim != config.head_dim
    has = {
        "experts": config.experts is not None,
        "attention sinks": config.sinks,
        "latents": config.latent is not None,
        "heads that are rotated in part": is_partial,
        "norms over all heads": config.qk_norm_all_heads,
        "norms after attention and MLP": config.norms != "before",
        "norms in float32": config.norms_less_one,
        "scaled embeddings": config.scaled_embedding,
        "different RoPE settings for layers with a window": config.window_rope is not None,
        "an unusual scale of attention scores": config.score_scale is not None,
        "capped attention scores": config.score_cap is not None,
        "capped logits": config.logit_cap is not None,
        "GELU": config.activation == "gelu_tanh",
    }
    *others, last = [what for what, is_so in has.items() if is_so] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _family(raw: Json, place: object) -> str:
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"{place} is wrong: architectures must be a list, not {architectures!r}")
    known = [str(name) for name in architectures if name in FAMILIES]
    if not known:
        stated = ", ".join(map(str, architectures))
        missing = "".join(
            f" (not yet: {NOT_YET[name]})" for name in architectures if name in NOT_YET
        )
        raise ModelError(
            f"{place} describes a {stated or 'model without architectures'}{missing}; supported are"
            f" {', '.join(FAMILIES)}. Choose a checkpoint of one of these"
            " (docs/reference/models.md has some)"
        )
    model_type = raw.get("model_type", FAMILIES[known[0]].model_type)
    family = FAMILIES[known[0]]
    if model_type not in (family.model_type, *family.also_called):
        raise ModelError(
            f"{place} contradicts itself: architectures says {known[0]}, but model_type, by which"
            f" transformers chooses, says {model_type!r}; make them agree"
        )
    return known[0]


def _parsed(fields: Fields, name: str, family: Family) -> ModelConfig:
    _refuse_unsupported(fields, family)
    max_position = fields.size("max_position_embeddings")
    rope, window_rope = _ropes(fields, max_position, family)
    latent = _latent(fields, rope, family) if family.is_latent else None
    num_kv_heads, head_dim = _heads(fields, family) if latent is None else (1, latent.cached_dim)
    rope_dim = int(head_dim * rope.partial_factor)
    if latent is None and (rope_dim % 2 or not rope_dim):
        raise fields.wrong(
            f"partial_rotary_factor rotates {rope_dim} values of a head; the number must be even"
            " and not 0"
        )
    qkv_bias, output_bias = _attention_biases(fields, family)
    has_qk_norm = family.qk_norm != "none"
    if family.qk_norm == "stated":
        has_qk_norm = fields.flag("use_qk_norm")
    names = family.experts
    return ModelConfig(
        family=name,
        num_layers=fields.size("num_hidden_layers", _MOST_LAYERS),
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_model_len=rope.max_model_len(max_position),
        dtype=_dtype(fields),
        rms_norm_eps=_rms_norm_eps(fields),
        rope=rope,
        sliding_windows=_sliding_windows(fields, name, family),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        qk_norm=has_qk_norm,
        qk_norm_all_heads=family.qk_norm == "all heads",
        is_fused=family.is_fused,
        sinks=family.sinks,
        experts=None if names is None else experts_config(fields, names),
        dense_layers=frozenset() if names is None else dense_layers(fields, names),
        latent=latent,
        num_nextn_layers=_num_nextn_layers(fields),
        quantized=quantized_format(fields, is_stacked=names is not None and names.is_stacked),
        norms=family.norms,
        norms_less_one=family.norms_less_one,
        scaled_embedding=family.scaled_embedding,
        activation="silu" if family.activations == ("silu",) else "gelu_tanh",
        window_rope=window_rope,
        query_scalar=fields.size(_SCALAR) if _SCALAR in family.defaults else None,
        score_cap=_cap(fields, family, "attn_logit_softcapping"),
        logit_cap=_cap(fields, family, "final_logit_softcapping"),
    )


def _latent(fields: Fields, rope: RopeConfig, family: Family) -> LatentConfig:
    """Read the settings. Raises `ModelError` if one is missing, wrong or not supported."""
    raw = fields.raw
    rope_dim, nope_dim = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    num_heads = fields.size("num_attention_heads")
    if rope_dim % 2:
        raise fields.wrong(f"qk_rope_head_dim must be even, not {rope_dim}")
    if raw.get("head_dim", rope_dim) != rope_dim:
        raise fields.wrong(
            f"head_dim is {raw['head_dim']!r}, but with latent attention it must equal"
            f" qk_rope_head_dim, {rope_dim}; remove it"
        )
    if (fields.optional_size("num_key_value_heads") or num_heads) != num_heads:
        raise fields.wrong(
            f"num_key_value_heads is {raw['num_key_value_heads']}, but with latent attention it"
            f" must equal the number of heads, {num_heads}"
        )
    for key in ("attention_bias", "mlp_bias"):
        if key in raw and fields.flag(key):
            raise fields.wrong(f"{key} is not supported with latent attention")
    is_interleaved = True
    if "rope_interleave" in family.defaults:  # otherwise they always are
        is_interleaved = raw["rope_interleave"] is not None and fields.flag("rope_interleave")
    return LatentConfig(
        rank=fields.size("kv_lora_rank"),
        query_rank=fields.optional_size("q_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.size("v_head_dim"),
        scale=rope.score_factor * (nope_dim + rope_dim) ** -0.5,
        is_interleaved=is_interleaved,
    )


def _attention_biases(fields: Fields, family: Family) -> tuple[bool, bool]:
    """Whether q, k and v have biases, and whether the output has one."""
    if family.attention_bias == "stated":
        has_biases = fields.flag("attention_bias")
        return has_biases, has_biases
    key = {"qkv_bias": "qkv_bias", "qkv attention_bias": "attention_bias"}
    if family.attention_bias in key:
        return fields.flag(key[family.attention_bias]), False
    return family.attention_bias == "qkv", False


def _num_nextn_layers(fields: Fields) -> int:
    number = fields.raw.get("num_nextn_predict_layers") or 0
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST_LAYERS:
        raise fields.wrong(f"num_nextn_predict_layers must be a number of layers, not {number!r}")
    return number


def _heads(fields: Fields, family: Family) -> tuple[int, int]:
    """KV heads, and the size of a head."""
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    # If the default is a size and not null (Qwen3), heads need not divide the hidden size, and the
    # class does not accept null.
    has_own = family.defaults["head_dim"] is not None
    head_dim = fields.size("head_dim") if has_own else fields.optional_size("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.wrong(
                f"hidden_size {hidden_size} is no multiple of the {num_heads} heads; set head_dim"
            )
        head_dim = hidden_size // num_heads
    num_kv_heads = fields.optional_size("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise fields.wrong(
            f"{num_heads} heads with {num_kv_heads} KV heads of size {head_dim} are not possible;"
            " the heads must be a multiple of the KV heads, and the size must be even"
        )
    return num_kv_heads, head_dim


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    raw, place = fields.raw, fields.place
    if raw.get("per_layer_config"):
        raise ModelError(f"{place}: per_layer_config (layers that differ) is not supported")
    key = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    if raw[key] not in family.activations:
        known = " or ".join(map(repr, family.activations))
        raise ModelError(f"{place}: {key} {raw[key]!r} is not supported, only {known}")
    for key in ("use_bidirectional_attention", "attn_logit_softcapping"):
        if raw.get(key) and key not in family.defaults:
            raise ModelError(f"{place}: {key} is not supported")


def _dtype(fields: Fields) -> str:
    raw = fields.raw
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{fields.place}: dtype {name} is not one of {', '.join(DTYPES)}")
    return name


def _cap(fields: Fields, family: Family, key: str) -> float | None:
    """The value of a cap on scores or logits; None if it is not set, or the family has none."""
    if key not in family.defaults or fields.raw[key] is None:
        return None
    return fields.number(key)


def _rms_norm_eps(fields: Fields) -> float:
    value = fields.raw["rms_norm_eps"]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise fields.wrong(f"rms_norm_eps must lie between 0 and 1, not {value!r}")
    return float(value)


def _ropes(
    fields: Fields, max_position: int, family: Family
) -> tuple[RopeConfig, RopeConfig | None]:
    """The RoPE of all layers; or of full layers, and of layers with a window."""
    try:
        ropes: tuple[RopeConfig, RopeConfig | None]
        raw = _with_partial_factor(fields)
        if family.ropes_by_kind:
            ropes = ropes_by_kind(raw, max_position, family.defaults)
        else:
            ropes = RopeConfig.from_hf(raw, max_position), None
        for rope in ropes:
            if rope is not None:
                _check_rope(rope, family)
        return ropes
    except (TypeError, ValueError, ArithmeticError) as error:
        raise fields.wrong(f"the rope settings cannot be read: {error}") from error
    except ModelError as error:  # the settings are valid, but not supported
        raise ModelError(f"{fields.place}: {error.message}") from error


def _check_rope(rope: RopeConfig, family: Family) -> None:
    if rope.partial_factor != 1.0 and "partial_rotary_factor" not in family.defaults:
        raise ModelError(
            f"partial_rotary_factor {rope.partial_factor:g} is not supported for"
            f" {family.model_type}, only 1.0"
        )
    if family.rope_kinds and rope.kind not in family.rope_kinds:
        raise ModelError(
            f"rope type {rope.kind!r} is not supported for {family.model_type}, only"
            f" {', '.join(family.rope_kinds)}"
        )


def _with_partial_factor(fields: Fields) -> Json:
    """Add `partial_rotary_factor` for files with `rotary_dim` instead, such as MiniMax-M2's."""
    raw = fields.raw
    if raw.get("rotary_dim") is None or raw.get("partial_rotary_factor") is not None:
        return raw
    rotary_dim, head_dim = fields.size("rotary_dim"), fields.size("head_dim")
    return {**raw, "partial_rotary_factor": rotary_dim / head_dim}


def _sliding_windows(fields: Fields, name: str, family: Family) -> tuple[int | None, ...]:
    """For each layer, the number of positions that a token sees, including itself; None: all."""
    num_layers, is_stated = fields.size("num_hidden_layers"), family.windows == "stated"
    kinds = fields.raw.get("layer_types")
    has_switch = "use_sliding_window" in family.defaults
    is_on = not has_switch or fields.flag("use_sliding_window")
    # Qwen's classes write 0 if the switch is off.
    is_zero = not is_on and fields.raw["sliding_window"] == 0
    window = None if is_zero else fields.optional_size("sliding_window")
    if family.windows == "none" and has_switch and is_on:
        raise fields.wrong(f"use_sliding_window is not supported for {name}")
    if family.windows == "none" or not is_on:
        window = None
    if family.windows == "alternating":
        full_every, key = family.full_every, "sliding_window_pattern"
        if key in family.defaults:
            full_every = fields.size(key)
        is_full = [(layer + 1) % full_every == 0 for layer in range(num_layers)]
        kinds = [_LAYER_TYPES[each] for each in is_full] if kinds is None else kinds
        return _windows_of(fields, kinds, window, num_layers)
    first = fields.raw["max_window_layers"] if is_stated else 0
    if not isinstance(first, int) or isinstance(first, bool):
        raise fields.wrong(f"max_window_layers must be a number, not {first!r}")
    usual = tuple(window if layer >= first else None for layer in range(num_layers))
    if kinds is None:
        return usual
    stated = _windows_of(fields, kinds, window, num_layers)
    if not is_stated and stated != usual:
        raise fields.wrong(f"layer_types is not supported for {name}; remove it")
    return stated


def _windows_of(
    fields: Fields, kinds: Any, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    if not isinstance(kinds, list):
        raise fields.wrong(f"layer_types must be a list, not {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds if kind not in _LAYER_TYPES})
    if unknown or len(kinds) != num_layers:
        raise fields.wrong(
            f"layer_types must name {num_layers} layers as {' or '.join(_LAYER_TYPES)}; found "
            f"{len(kinds)} with {', '.join(unknown) or 'nothing else'}"
        )
    if window is None and "sliding_attention" in kinds:
        raise fields.wrong(
            "layer_types names sliding_attention, but no window is set; set sliding_window (and"
            " for Qwen use_sliding_window), or change these layers to full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
