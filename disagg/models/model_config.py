"""Reads the settings of a decoder from config.json as transformers does, and checks them.

A missing key has the default of the family's configuration class in transformers. Settings that
transformers refuses or would ignore raise an error. Reads no file, and knows no torch, no devices
and no batches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from disagg.errors import ModelError
from disagg.kernels.activation import Activation
from disagg.kernels.recurrent_state import DeltaHeads, StateShape
from disagg.models.altup_config import AltUpConfig, altup_config, one_inner_size
from disagg.models.experts_config import ExpertsConfig, dense_layers, experts_config
from disagg.models.families import FAMILIES, NOT_YET
from disagg.models.family import Family, Fields, Json, Norms
from disagg.models.quantized import QuantizedFormat, quantized_format
from disagg.models.rope import RopeConfig, ropes_by_kind

DTYPES = ("float32", "bfloat16", "float16")
_MOST_LAYERS = 10_000  # each layer is described before its weights are known
_LAYER_TYPES = ("sliding_attention", "full_attention")
_MIXED_TYPES = ("linear_attention", "full_attention")
_INDEX_TYPES = ("full", "shared")
_SCALAR = "query_pre_attn_scalar"


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Settings of the index by which a query chooses the tokens that it attends to.

    DeepSeek-V3.2 calls it lightning indexer, and what uses it sparse attention.

    Attributes:
        num_heads: heads of its queries (`index_n_heads`), which share one key for each token.
        head_dim: values of a query and of a key (`index_head_dim`). The first `rope_dim` of them
            have rotary positions.
        num_chosen: most tokens that a query attends to (`index_topk`).
        is_interleaved: as in `LatentConfig`.
        sharing_layers: layers without an index: their queries attend to the tokens that those of
            the layer before have chosen.
    """

    num_heads: int
    head_dim: int
    num_chosen: int
    is_interleaved: bool
    sharing_layers: frozenset[int] = frozenset()


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
        index: by which a query chooses the tokens that it attends to; None: it attends to all.
    """

    rank: int
    query_rank: int | None
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    is_interleaved: bool
    index: IndexConfig | None = None

    @property
    def query_dim(self) -> int:
        """The number of values of a head's query before it is multiplied by the key matrix."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """The number of values that are the key of all heads: a latent, and a rotated key."""
        return self.rank + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """The number of values that the cache keeps for each token in each layer.

        The key of the index lies behind that of the heads.
        """
        return self.key_dim + (0 if self.index is None else self.index.head_dim)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of one decoder.

    `sliding_windows` has one entry per layer: the number of positions that a token sees, including
    itself, or None for all.

    Layers of `delta_layers` have no attention, but a gated delta net with `delta_heads`. The last
    `num_shared_layers` have queries only (`kv_sources`).
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
    fused: tuple[str, ...] = ()  # which of "qkv" and "gate_up" are one tensor of the checkpoint
    sinks: bool = False  # each query head has a logit that takes part in its softmax
    experts: ExpertsConfig | None = None
    stacks_experts: bool = False  # the checkpoint has names as in `ExpertNames.or_stacked`
    dense_layers: frozenset[int] = frozenset()  # layers without experts, if the model has experts
    latent: LatentConfig | None = None  # latents are then the only KV head
    num_nextn_layers: int = 0  # layers after the others that predict further tokens; not used
    quantized: QuantizedFormat | None = None  # the format of a quantised checkpoint
    norms: Norms = "before"  # attention and MLP of a layer
    norms_less_one: bool = False  # the checkpoint has weights of norms minus one
    scaled_embedding: bool = False  # embeddings are multiplied by the root of the hidden size
    embedding_scale: float = 1.0  # embeddings are multiplied by it
    residual_scale: float = 1.0  # what attention and MLPs add is multiplied by it
    activation: Activation = "silu"  # of MLPs
    window_rope: RopeConfig | None = None  # of layers with a window, if it differs
    no_rope_layers: frozenset[int] = frozenset()  # layers without positions
    num_shared_layers: int = 0
    altup: AltUpConfig | None = None
    delta_layers: tuple[int, ...] = ()
    delta_heads: DeltaHeads | None = None
    gates_output: bool = False  # of attention (`Family.gates_output`)
    rotates_pairs: bool = False  # RoPE rotates neighbouring values (`Family.rotates_pairs`)
    score_scale: float | None = None  # the factor of queries times keys; None: head_dim^-0.5
    score_cap: float | None = None  # the same for attention scores as `logit_cap` for logits
    logit_cap: float | None = None  # the largest absolute value of logits: cap * tanh(x / cap)
    logit_divisor: float = 1.0

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
    def states(self) -> StateShape | None:
        """The recurrent state of a sequence; None: it has none."""
        heads = self.delta_heads
        return None if heads is None else StateShape(heads, len(self.delta_layers))

    @property
    def num_kv_layers(self) -> int:
        """The number of layers that keep keys and values, or latents."""
        return self.num_attending_layers - self.num_shared_layers

    @property
    def num_attending_layers(self) -> int:
        """The number of layers that read keys and values, or latents."""
        return self.num_layers - len(self.delta_layers)

    def shares_kv(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another."""
        return self.num_layers - self.num_shared_layers <= layer < self.num_layers

    @cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer reads: its own, or the last that keeps some
        and has the same window."""
        num_own, windows = self.num_layers - self.num_shared_layers, self.sliding_windows
        last = {window: layer for layer, window in enumerate(windows[:num_own])}
        return *range(num_own), *(last[window] for window in windows[num_own:])

    def experts_in(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None if its MLP is dense."""
        return None if layer in self.dense_layers else self.experts

    def rope_in(self, layer: int) -> RopeConfig:
        """The rotary positions of a layer."""
        if layer in self.no_rope_layers:
            return self.rope.unturned
        is_windowed = self.sliding_windows[layer] is not None
        return self.window_rope if is_windowed and self.window_rope else self.rope

    @property
    def ropes(self) -> list[RopeConfig]:
        """The different rotary positions of layers."""
        return list(dict.fromkeys(map(self.rope_in, range(self.num_layers))))

    def within(self, max_model_len: int) -> ModelConfig:
        """The settings for contexts of at most so many tokens."""
        return replace(self, max_model_len=max_model_len, rope=self.rope.within(max_model_len))

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
        "layers with a recurrent state": config.delta_heads is not None,
        "gated outputs of attention": config.gates_output,
        "heads that are rotated in part": is_partial,
        "norms over all heads": config.qk_norm_all_heads,
        "norms after attention and MLP": config.norms != "before",
        "norms in float32": config.norms_less_one,
        "scaled embeddings": config.scaled_embedding or config.embedding_scale != 1.0,
        "scaled residuals": config.residual_scale != 1.0,
        "layers with different positions": len(config.ropes) > 1,
        "heads of which pairs are rotated": config.rotates_pairs,
        "queries that grow with the position": config.rope.query_beta > 0,
        "an unusual scale of attention scores": config.score_scale is not None,
        "capped attention scores": config.score_cap is not None,
        "several residual streams": config.altup is not None,
        "capped logits": config.logit_cap is not None,
        "scaled logits": config.logit_divisor != 1.0,
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
    num_factors = {len(rope.short_factors), len(rope.long_factors)}
    if rope.kind == "longrope" and num_factors != {rope_dim // 2}:
        raise fields.wrong(
            f"short_factor and long_factor of the rope settings must have {rope_dim // 2} numbers"
        )
    has_qk_norm = family.qk_norm != "none"
    if family.qk_norm == "stated":
        has_qk_norm = fields.flag("use_qk_norm")
    names = family.experts
    windows = _sliding_windows(fields, name, family)
    delta_layers = _delta_layers(fields, len(windows)) if family.delta_nets else ()
    dense, inner = frozenset[int](), "intermediate_size"
    if names is not None and not (dense := dense_layers(fields, names)):
        inner = fields.first_of(inner, names.intermediate_size)  # no layer has it
    altup = altup_config(fields, len(windows)) if family.has_altup else None
    return ModelConfig(
        family=name,
        num_layers=len(windows),
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=fields.size("hidden_size"),
        intermediate_size=one_inner_size(fields, len(windows)) if altup else fields.size(inner),
        vocab_size=fields.size("vocab_size"),
        max_model_len=rope.max_model_len(max_position),
        dtype=_dtype(fields),
        rms_norm_eps=_rms_norm_eps(fields),
        rope=rope,
        sliding_windows=windows,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=fields.is_so(family.qkv_bias),
        output_bias=fields.is_so(family.output_bias),
        mlp_bias=fields.is_so(family.mlp_bias),
        qk_norm=has_qk_norm,
        qk_norm_all_heads=family.qk_norm == "all heads",
        fused=family.fused,
        sinks=family.sinks,
        experts=None if names is None else experts_config(fields, names),
        dense_layers=dense,
        latent=latent,
        num_nextn_layers=_num_nextn_layers(fields),
        quantized=quantized_format(fields, stacked="" if names is None else names.stacked),
        norms=family.norms,
        norms_less_one=family.norms_less_one,
        scaled_embedding=family.scaled_embedding,
        activation="silu" if family.activations == ("silu",) else "gelu_tanh",
        window_rope=window_rope,
        no_rope_layers=_no_rope_layers(fields, family, windows),
        num_shared_layers=_num_shared_layers(fields, family, windows),
        altup=altup,
        delta_layers=delta_layers,
        delta_heads=_delta_heads(fields) if delta_layers else None,
        gates_output=family.gates_output,
        rotates_pairs=family.rotates_pairs,
        score_scale=_score_scale(fields, family, head_dim),
        score_cap=_cap(fields, family, "attn_logit_softcapping"),
        logit_cap=_cap(fields, family, "final_logit_softcapping"),
        embedding_scale=_scale(fields, family, "embedding_multiplier"),
        residual_scale=_scale(fields, family, "residual_multiplier"),
        logit_divisor=_scale(fields, family, "logits_scaling"),
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
    query_rank = fields.optional_size("q_lora_rank")
    if family.index_rotation and query_rank is None:
        raise fields.wrong("q_lora_rank must be set: the queries of the index are made from it")
    return LatentConfig(
        rank=fields.size("kv_lora_rank"),
        query_rank=query_rank,
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.size("v_head_dim"),
        scale=rope.score_factor * (nope_dim + rope_dim) ** -0.5,
        is_interleaved=is_interleaved,
        index=_index(fields, family, rope_dim) if family.index_rotation else None,
    )


def _index(fields: Fields, family: Family, rope_dim: int) -> IndexConfig:
    """Read the settings. Raises `ModelError` if one is missing, wrong or not supported."""
    head_dim = fields.size("index_head_dim")
    if head_dim % 2 or head_dim < rope_dim:
        raise fields.wrong(
            f"index_head_dim must be even and at least qk_rope_head_dim, {rope_dim}, not {head_dim}"
        )
    is_interleaved = family.index_rotation == "pairs"
    if fields.raw.get("indexer_rope_interleave", is_interleaved) is not is_interleaved:
        raise fields.wrong(
            "indexer_rope_interleave must be"
            f" {json.dumps(is_interleaved)} for this family, as in transformers; remove it"
        )
    sharing = _sharing_layers(fields) if "indexer_types" in family.defaults else ()
    return IndexConfig(
        num_heads=fields.size("index_n_heads"),
        head_dim=head_dim,
        num_chosen=fields.size("index_topk"),
        is_interleaved=is_interleaved,
        sharing_layers=frozenset(sharing),
    )


def _sharing_layers(fields: Fields) -> list[int]:
    """The layers that have no index of their own. Raises `ModelError`.

    A list names them, or a pattern of letters, or each `index_topk_freq`-th layer has one.
    """
    num_layers, kinds = fields.size("num_hidden_layers"), fields.raw["indexer_types"]
    pattern = fields.raw["index_topk_pattern"]
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif kinds is None and pattern is not None:
        kinds = pattern
    elif kinds is None:
        every, offset = fields.raw["index_topk_freq"], fields.raw["index_skip_topk_offset"]
        if type(every) is not int or type(offset) is not int:
            raise fields.wrong("index_topk_freq and index_skip_topk_offset must be whole numbers")
        every = max(every, 1)
        kinds = [
            "full" if max(layer - offset + 1, 0) % every == 0 else "shared"
            for layer in range(num_layers)
        ]
    _check_kinds(fields, kinds, num_layers, _INDEX_TYPES, key="indexer_types")
    if kinds[0] == "shared":
        raise fields.wrong(
            "indexer_types (or index_topk_pattern) must call the first layer full, since no layer"
            " before it has chosen tokens"
        )
    return [layer for layer, kind in enumerate(kinds) if kind == "shared"]


def _delta_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers with a gated delta net. Raises `ModelError`."""
    kinds = fields.raw["layer_types"]
    if kinds is None:
        every = fields.size("full_attention_interval")
        kinds = [_MIXED_TYPES[(layer + 1) % every == 0] for layer in range(num_layers)]
    _check_kinds(fields, kinds, num_layers, _MIXED_TYPES)
    if "full_attention" not in kinds:
        raise fields.wrong(
            "layer_types (or full_attention_interval) must name a layer of full_attention; models"
            " without one are not supported"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def _delta_heads(fields: Fields) -> DeltaHeads:
    heads = DeltaHeads(
        num_key_heads=fields.size("linear_num_key_heads"),
        num_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        taps=fields.size("linear_conv_kernel_dim"),
    )
    if heads.num_heads % heads.num_key_heads or heads.taps < 2:
        raise fields.wrong(
            f"linear_num_value_heads {heads.num_heads} must be a multiple of linear_num_key_heads"
            f" {heads.num_key_heads}, and linear_conv_kernel_dim {heads.taps} at least 2"
        )
    return heads


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
    for key in ("use_bidirectional_attention", "attn_logit_softcapping", "clip_qkv"):
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


def _scale(fields: Fields, family: Family, key: str) -> float:
    """The value of a factor; 1 if the family has none."""
    return fields.number(key) if key in family.defaults else 1.0


def _score_scale(fields: Fields, family: Family, head_dim: int) -> float | None:
    scale = 1.0 if family.has_altup else head_dim**-0.5
    if _SCALAR in family.defaults:
        scale = fields.size(_SCALAR) ** -0.5
    elif "attention_multiplier" in family.defaults:
        scale = fields.number("attention_multiplier")
    return None if scale == head_dim**-0.5 else scale


def _no_rope_layers(
    fields: Fields, family: Family, windows: tuple[int | None, ...]
) -> frozenset[int]:
    if family.no_rope == "full" and fields.raw["sliding_window"] is not None:
        return frozenset(layer for layer, window in enumerate(windows) if window is None)
    if family.no_rope != "stated":
        return frozenset()
    num_layers, stated = len(windows), fields.raw["no_rope_layers"]
    if stated is None:
        every = fields.size("no_rope_layer_interval")
        return frozenset(range(every - 1, num_layers, every))
    is_list = isinstance(stated, list) and len(stated) >= num_layers
    if not is_list or any(each not in (0, 1) for each in stated):
        raise fields.wrong(
            f"no_rope_layers must have a 0 (no positions) or 1 for each of {num_layers} layers, not"
            f" {stated!r}"
        )
    return frozenset(layer for layer in range(num_layers) if not stated[layer])


def _num_shared_layers(fields: Fields, family: Family, windows: tuple[int | None, ...]) -> int:
    key = "num_kv_shared_layers"
    if key not in family.defaults:
        return 0
    number, most = fields.raw[key], len(windows) - 1
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
        raise fields.wrong(f"{key} must be a number of layers from 0 to {most}, not {number!r}")
    num_own = len(windows) - number
    if not set(windows[num_own:]) <= set(windows[:num_own]):
        raise fields.wrong(
            f"{key} = {number} leaves no earlier layer of each kind of layer_types that shares KV"
        )
    return number


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
    grows = "llama_4_scaling_beta" in family.defaults.get("rope_parameters", ())
    if grows != bool(rope.query_beta):
        raise ModelError(
            f"llama_4_scaling_beta of the rope settings must be {'set' if grows else 'left out'}"
            f" for {family.model_type}"
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
    num_layers = fields.size("num_hidden_layers", _MOST_LAYERS)
    if family.delta_nets:
        return (None,) * num_layers
    is_stated = family.windows == "stated"
    kinds = fields.raw.get("layer_types")
    if family.index_rotation and kinds is not None:
        _check_kinds(fields, kinds, num_layers, ("indexed_attention",))
        kinds = None
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
        if key in family.defaults and kinds is None:
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
    _check_kinds(fields, kinds, num_layers, _LAYER_TYPES)
    if window is None and "sliding_attention" in kinds:
        raise fields.wrong(
            "layer_types names sliding_attention, but no window is set; set sliding_window (and"
            " for Qwen use_sliding_window), or change these layers to full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _check_kinds(
    fields: Fields, kinds: Any, num_layers: int, known: tuple[str, ...], key: str = "layer_types"
) -> None:
    if not isinstance(kinds, list):
        raise fields.wrong(f"{key} must be a list, not {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds if kind not in known})
    if unknown or len(kinds) != num_layers:
        raise fields.wrong(
            f"{key} must name {num_layers} layers as {' or '.join(known)}; found "
            f"{len(kinds)} with {', '.join(unknown) or 'nothing else'}"
        )
