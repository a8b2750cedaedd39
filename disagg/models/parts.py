"""Maps the weights of a decoder, or of one rank, to the tensors of a checkpoint. Knows no torch.

A rank reads rows of the projections that begin attention and MLP, columns of the projections that
end them, and rows of the vocabulary tables. Biases that follow a sum over ranks belong to the first
rank. With expert parallelism a rank reads whole experts with their biases, and no other experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from disagg.errors import ModelError
from disagg.models.checkpoint import StoredTensor
from disagg.models.description import ModelDescription
from disagg.models.experts_config import ExpertsConfig
from disagg.models.families import FAMILIES
from disagg.models.family import ExpertNames
from disagg.models.gguf_model import GgufStored
from disagg.models.model_config import LatentConfig, ModelConfig
from disagg.models.quantized import QuantizedStored
from disagg.models.share import WHOLE, Share

Shape: TypeAlias = tuple[int, ...]
Range: TypeAlias = tuple[int, int]  # first, end
_MAX_NAMES_IN_AN_ERROR = 8


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint. Parts of one field are stacked along their first dimension.

    Attributes:
        shape: shape after reading, with the rows of all experts one after the other.
        stored: shape in the checkpoint; empty: the same.
        box: the range that is read of each stored dimension; empty: everything.
        is_transposed: whether the last two dimensions are stored as [in, out].
        is_interleaved: whether rows of gate and up alternate in the checkpoint; after reading, all
            rows of gate come first.
        is_exact: whether it is read as float32, whatever the model's dtype is.
        is_less_one: whether 1 is added to its values.
    """

    name: str
    shape: Shape
    stored: Shape = ()
    box: tuple[Range, ...] = ()
    is_transposed: bool = False
    is_interleaved: bool = False
    is_exact: bool = False
    is_less_one: bool = False

    @property
    def stored_shape(self) -> Shape:
        return self.stored or self.shape


Fields: TypeAlias = dict[str, list[Part]]
_OF_EXPERTS = ("gate_up", "gate_up_bias", "down", "down_bias")


def layer_parts(config: ModelConfig, layer: int, share: Share = WHOLE) -> Fields:
    """The checkpoint tensors of each field of `LayerWeights`, or what a rank reads of them.

    Fields that the rank does not have are left out.

    Args:
        config: the settings of the whole model.
    """
    fields = _whole_layer(config, layer)
    if share.num_ranks == 1:
        return fields
    experts = config.experts_in(layer)
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    own = share.of(inner) if experts is None else share.of_experts(experts)
    own_experts = None if experts is None else share.own_experts(experts)
    latent = config.latent
    value_dim = config.head_dim if latent is None else latent.value_dim
    taken: Fields = {}
    for field, parts in fields.items():
        if latent is not None and field in ("qkv", "q_b", "kv_b"):
            taken[field] = _latent_rows(latent, share.of(config.num_heads), field, parts)
        elif field in ("qkv", "qkv_bias"):
            taken[field] = _head_rows(config, share, parts)
        elif field in ("q_norm", "k_norm") and config.qk_norm_all_heads:
            is_q = field == "q_norm"
            heads = share.of(config.num_heads) if is_q else share.kv_heads(config.num_kv_heads)
            taken[field] = [_boxed(parts[0], 0, _scaled(heads, config.head_dim))]
        elif field == "sinks":
            taken[field] = [_boxed(parts[0], 0, share.of(config.num_heads))]
        elif field == "output":
            taken[field] = [_boxed(parts[0], 1, _scaled(share.of(config.num_heads), value_dim))]
        elif own_experts is not None and experts is not None and field in _OF_EXPERTS:
            taken[field] = _of_whole_experts(parts, own_experts, experts.num_experts)
        elif field.startswith("gate_up"):
            taken[field] = [each for part in parts for each in _gate_up(part, inner, own)]
        elif field == "down":
            taken[field] = [_down(part, own) for part in parts]
        elif field in ("shared_gate_up", "shared_down") and experts is not None:
            shared = share.of(experts.shared_intermediate_size)
            dimension = 0 if field == "shared_gate_up" else 1
            taken[field] = [_boxed(part, dimension, shared) for part in parts]
        elif field not in ("output_bias", "down_bias") or share.is_first:
            taken[field] = parts
    return taken


def outer_parts(config: ModelConfig, share: Share = WHOLE) -> Fields:
    """The checkpoint tensors outside the layers, or what a rank reads of them."""
    fields = _whole_tables(config)
    if share.num_ranks == 1:
        return fields
    own = share.of(config.vocab_size)
    return {
        field: parts if field == "norm" else [_boxed(part, 0, own) for part in parts]
        for field, parts in fields.items()
    }


def all_fields(config: ModelConfig, share: Share = WHOLE) -> Iterator[Fields]:
    """The fields outside the layers, and those of each layer."""
    yield outer_parts(config, share)
    for layer in range(config.num_layers):
        yield layer_parts(config, layer, share)


def all_parts(config: ModelConfig, share: Share = WHOLE) -> Iterator[Part]:
    """All tensors of a checkpoint, or what a rank reads of them."""
    for fields in all_fields(config, share):
        for parts in fields.values():
            yield from parts


def check_weights(model: ModelDescription) -> None:
    """Compare the tensors of a checkpoint with those that the decoder needs.

    Raises:
        ModelError: a file is damaged, or tensors are missing, unexpected, of the wrong shape or
            not floating point; the message names them.
    """
    wanted, stored = {part.name: part for part in all_parts(model.config)}, model.tensors
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    further = _further_layers(model)
    missing = [name for name in wanted if name not in stored]
    unexpected = [
        name
        for name in stored
        if name not in wanted
        and name not in ignored
        and not name.startswith(further)
        and not _says_nothing(name, stored[name])
    ]
    reshaped = [
        f"{name} is {list(stored[name].shape)}, not {list(part.stored_shape)}"
        for name, part in wanted.items()
        if name in stored and stored[name].shape != part.stored_shape
    ]
    not_float = [
        f"{name} is {stored[name].dtype}"
        for name in wanted
        # Quantised tensors were checked when the model was described.
        if name in stored and not isinstance(stored[name], GgufStored | QuantizedStored)
        if not stored[name].is_float
    ]
    problems = [
        f"{title}: {_some(names)}"
        for title, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("wrong shapes", reshaped),
            ("types that are not supported (only float weights are)", not_float),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"the weights in {model.source} do not fit its configuration ({model.config.family}). "
            + "; ".join(problems)
        )


def _whole_layer(config: ModelConfig, layer: int) -> Fields:
    prefix = f"model.layers.{layer}"
    parts = {**_norms(config, prefix), **_attention(config, f"{prefix}.self_attn")}
    experts = config.experts_in(layer)
    if experts is None:
        mlp = f"{prefix}.mlp"
        return parts | _mlp(config, mlp, config.intermediate_size, has_bias=config.mlp_bias)
    names = FAMILIES[config.family].experts
    assert names is not None
    return parts | _experts(config, experts, names, prefix)


def _whole_tables(config: ModelConfig) -> Fields:
    table = (config.vocab_size, config.hidden_size)
    parts = {
        "embedding": [Part("model.embed_tokens.weight", table)],
        "norm": [_norm(config, "model.norm")],
    }
    if not config.tie_word_embeddings:
        parts["lm_head"] = [Part("lm_head.weight", table)]
    return parts


# The norms of a layer, by their place: the field of `LayerWeights`, and the name in a checkpoint.
_NORMS: dict[str, dict[str, str]] = {
    "before": {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    "after": {
        "output_norm": "post_attention_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
    "around": {
        "input_norm": "input_layernorm",
        "output_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
}


def _norms(config: ModelConfig, prefix: str) -> Fields:
    names = _NORMS[config.norms]
    return {field: [_norm(config, f"{prefix}.{name}")] for field, name in names.items()}


def _norm(config: ModelConfig, name: str, size: int | None = None) -> Part:
    shape, is_exact = (size or config.hidden_size,), config.norms_less_one
    return Part(f"{name}.weight", shape, is_exact=is_exact, is_less_one=is_exact)


def _attention(config: ModelConfig, prefix: str) -> Fields:
    if config.latent is not None:
        return _latent_attention(config, config.latent, prefix)
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    if config.is_fused:
        qkv = {"qkv_proj": q_size + 2 * kv_size}
    parts = {
        "qkv": [Part(f"{prefix}.{name}.weight", (size, hidden)) for name, size in qkv.items()],
        "output": [Part(f"{prefix}.o_proj.weight", (hidden, q_size))],
    }
    if config.qkv_bias:
        parts["qkv_bias"] = [Part(f"{prefix}.{name}.bias", (size,)) for name, size in qkv.items()]
    if config.output_bias:
        parts["output_bias"] = [Part(f"{prefix}.o_proj.bias", (hidden,))]
    if config.qk_norm:
        sizes = (q_size, kv_size) if config.qk_norm_all_heads else (config.head_dim,) * 2
        parts["q_norm"] = [_norm(config, f"{prefix}.q_norm", sizes[0])]
        parts["k_norm"] = [_norm(config, f"{prefix}.k_norm", sizes[1])]
    if config.sinks:
        parts["sinks"] = [Part(f"{prefix}.sinks", (config.num_heads,))]
    return parts


def _latent_attention(config: ModelConfig, latent: LatentConfig, prefix: str) -> Fields:
    """Latent attention: `qkv` makes the latents of queries (or queries), and the cached vector."""
    hidden, num_heads = config.hidden_size, config.num_heads
    q_size = num_heads * latent.query_dim
    of_head = latent.nope_dim + latent.value_dim
    cached = Part(f"{prefix}.kv_a_proj_with_mqa.weight", (latent.cached_dim, hidden))
    parts = {
        "kv_a_norm": [Part(f"{prefix}.kv_a_layernorm.weight", (latent.rank,))],
        "kv_b": [Part(f"{prefix}.kv_b_proj.weight", (num_heads * of_head, latent.rank))],
        "output": [Part(f"{prefix}.o_proj.weight", (hidden, num_heads * latent.value_dim))],
    }
    if latent.query_rank is None:
        return parts | {"qkv": [Part(f"{prefix}.q_proj.weight", (q_size, hidden)), cached]}
    q_a = Part(f"{prefix}.q_a_proj.weight", (latent.query_rank, hidden))
    return parts | {
        "qkv": [q_a, cached],
        "q_a_norm": [Part(f"{prefix}.q_a_layernorm.weight", (latent.query_rank,))],
        "q_b": [Part(f"{prefix}.q_b_proj.weight", (q_size, latent.query_rank))],
    }


def _mlp(config: ModelConfig, prefix: str, inner: int, *, has_bias: bool = False) -> Fields:
    hidden = config.hidden_size
    gate_up = {"gate_proj": inner, "up_proj": inner}
    if config.is_fused:
        gate_up = {"gate_up_proj": 2 * inner}
    parts = {
        "gate_up": [
            Part(f"{prefix}.{name}.weight", (size, hidden)) for name, size in gate_up.items()
        ],
        "down": [Part(f"{prefix}.down_proj.weight", (hidden, inner))],
    }
    if has_bias:
        parts["gate_up_bias"] = [
            Part(f"{prefix}.{name}.bias", (size,)) for name, size in gate_up.items()
        ]
        parts["down_bias"] = [Part(f"{prefix}.down_proj.bias", (hidden,))]
    return parts


def _experts(
    config: ModelConfig, experts: ExpertsConfig, names: ExpertNames, prefix: str
) -> Fields:
    count, hidden = experts.num_experts, config.hidden_size
    parts = {"router": [Part(f"{prefix}.{names.router}.weight", (count, hidden))]}
    if experts.has_bias:
        parts["router_bias"] = [Part(f"{prefix}.{names.router}.bias", (count,))]
    if experts.shared_intermediate_size:
        shared = _mlp(config, f"{prefix}.{names.shared}", experts.shared_intermediate_size)
        parts |= {f"shared_{field}": its for field, its in shared.items()}
        if names.shared_gate:
            parts["shared_gate"] = [Part(f"{prefix}.{names.shared_gate}.weight", (1, hidden))]
    if names.score_bias:
        parts["score_bias"] = [Part(f"{prefix}.{names.score_bias}", (count,), is_exact=True)]
    if names.is_stacked:
        return parts | _stacked_experts(experts, names, prefix, hidden)
    inner = experts.intermediate_size
    parts["gate_up"] = [
        Part(f"{prefix}.{name.format(expert)}.weight", (inner, hidden))
        for expert in range(count)
        for name in (names.gate, names.up)
    ]
    parts["down"] = [
        Part(f"{prefix}.{names.down.format(expert)}.weight", (hidden, inner))
        for expert in range(count)
    ]
    return parts


def _stacked_experts(
    experts: ExpertsConfig, names: ExpertNames, prefix: str, hidden: int
) -> Fields:
    """All experts of a layer in one tensor, where rows of gate and up alternate (gpt-oss)."""
    count, inner = experts.num_experts, experts.intermediate_size
    parts = {}
    sizes = {"gate_up": (names.gate, 2 * inner, hidden), "down": (names.down, hidden, inner)}
    for field, (name, num_rows, size) in sizes.items():
        place, turned = f"{prefix}.{name}", field == "gate_up"
        rows = count * num_rows
        parts[f"{field}_bias"] = [
            Part(f"{place}_bias", (rows,), (count, num_rows), is_interleaved=turned)
        ]
        # Floats are stored as [in, out], and MXFP4 as [out, in].
        stored = (count, num_rows, size) if experts.is_mxfp4 else (count, size, num_rows)
        matrix = Part(place, (rows, size), stored, is_transposed=not experts.is_mxfp4)
        parts[field] = [replace(matrix, is_interleaved=turned)]
    return parts


def _scaled(heads: Range, size: int) -> Range:
    return heads[0] * size, heads[1] * size


def _latent_rows(latent: LatentConfig, heads: Range, field: str, parts: list[Part]) -> list[Part]:
    """The rows of a rank's heads. Rows that all heads share are whole on every rank."""
    size = latent.nope_dim + latent.value_dim if field == "kv_b" else latent.query_dim
    if field != "qkv":
        return [_boxed(parts[0], 0, _scaled(heads, size))]
    query, cached = parts
    own = query if latent.query_rank else _boxed(query, 0, _scaled(heads, size))
    return [own, cached]


def _head_rows(config: ModelConfig, share: Share, parts: list[Part]) -> list[Part]:
    q, kv = share.of(config.num_heads), share.kv_heads(config.num_kv_heads)
    if len(parts) == 3:
        return [
            _boxed(part, 0, _scaled(heads, config.head_dim))
            for part, heads in zip(parts, (q, kv, kv), strict=True)
        ]
    keys, values = config.num_heads, config.num_heads + config.num_kv_heads  # in one tensor
    places = q, (keys + kv[0], keys + kv[1]), (values + kv[0], values + kv[1])
    return [_boxed(parts[0], 0, _scaled(heads, config.head_dim)) for heads in places]


def _gate_up(part: Part, inner: int, own: Range) -> list[Part]:
    if part.is_interleaved:  # all experts in one tensor
        dimension = 2 if part.is_transposed else 1
        return [_boxed(part, dimension, (2 * own[0], 2 * own[1]))]
    if part.shape[0] == inner:
        return [_boxed(part, 0, own)]
    up = inner + own[0], inner + own[1]  # gate and up in one tensor
    return [_boxed(part, 0, own), _boxed(part, 0, up)]


def _of_whole_experts(parts: list[Part], own: range, num_experts: int) -> list[Part]:
    """The parts of a rank's experts, from one tensor with all experts, or one part per tensor."""
    if parts[0].stored:
        return [_boxed(part, 0, (own.start, own.stop)) for part in parts]
    of_each = len(parts) // num_experts
    return parts[own.start * of_each : own.stop * of_each]


def _down(part: Part, own: Range) -> Part:
    is_last = part.stored and not part.is_transposed
    return _boxed(part, 2 if is_last else 1, own)


def _boxed(part: Part, dimension: int, own: Range) -> Part:
    """The part's range `own` of one stored dimension."""
    stored = part.stored_shape
    box = [(0, size) for size in stored]
    box[dimension] = own
    sizes = [end - first for first, end in box]
    shape: Shape
    if part.stored:
        num_rows = sizes[0] * (sizes[2] if part.is_transposed else sizes[1])  # of all experts
        width = math.prod(sizes) // num_rows
        shape = (num_rows,) if len(part.shape) == 1 else (num_rows, width)
    else:
        shape = tuple(sizes)
    return replace(part, shape=shape, stored=stored, box=tuple(box))


def _further_layers(model: ModelDescription) -> tuple[str, ...]:
    """Prefixes of the names of layers that predict further tokens, which are not used."""
    config = model.config
    last = config.num_layers + config.num_nextn_layers
    return tuple(f"model.layers.{layer}." for layer in range(config.num_layers, last))


def _says_nothing(name: str, stored: StoredTensor) -> bool:
    """Whether a tensor may be ignored: a relic of old checkpoints, or one of GPTQ's zero biases."""
    return name.endswith("rotary_emb.inv_freq") or (name.endswith(".bias") and stored.is_zero())


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_AN_ERROR])
    hidden = len(names) - _MAX_NAMES_IN_AN_ERROR
    return f"{shown} and {hidden} more" if hidden > 0 else shown
