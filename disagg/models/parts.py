"""Maps the weights of a decoder, or of one rank, to the tensors of a checkpoint. Knows no torch.

A rank reads rows of the projections that begin attention and MLP, columns of the projections that
end them, and rows of the vocabulary tables. Biases that follow a sum over ranks belong to the first
rank. With expert parallelism a rank reads whole experts with their biases, and no other experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

from disagg.errors import ModelError
from disagg.models.altup_config import AltUpConfig
from disagg.models.checkpoint import Range, StoredTensor
from disagg.models.description import ModelDescription
from disagg.models.experts_config import ExpertsConfig
from disagg.models.families import FAMILIES
from disagg.models.family import ExpertNames, Norms
from disagg.models.gguf_model import GgufStored
from disagg.models.model_config import IndexConfig, LatentConfig, ModelConfig
from disagg.models.quantized import QuantizedStored
from disagg.models.share import WHOLE, Share

Shape: TypeAlias = tuple[int, ...]
_MAX_NAMES_IN_AN_ERROR = 8


class Cut(NamedTuple):
    """How ranks divide a tensor.

    Attributes:
        of: what they divide; "once": the first rank has the tensor, and others do not.
        dimension: the stored dimension that is divided.
        unit: size of one head, or 2 if rows of gate and up alternate.
    """

    of: Literal[
        "heads", "KV heads", "inner", "inner of experts", "inner of shared", "vocab", "once"
    ]
    dimension: int = 0
    unit: int = 1


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
        cut: how ranks divide it; None: every rank has all of it.
        experts: the experts of the layer that it has; empty: it is no part of them.
    """

    name: str
    shape: Shape
    stored: Shape = ()
    box: tuple[Range, ...] = ()
    is_transposed: bool = False
    is_interleaved: bool = False
    is_exact: bool = False
    is_less_one: bool = False
    cut: Cut | None = None
    experts: range = range(0)

    @property
    def stored_shape(self) -> Shape:
        return self.stored or self.shape


Fields: TypeAlias = dict[str, list[Part]]
_OF_EXPERTS = Cut("inner of experts")


def layer_parts(config: ModelConfig, layer: int, share: Share = WHOLE) -> Fields:
    """The checkpoint tensors of each field of `LayerWeights`, or what a rank reads of them.

    Fields that the rank does not have are left out.

    Args:
        config: the settings of the whole model.
    """
    prefix = f"model.layers.{layer}"
    if layer in config.delta_layers:
        mixer = _delta_net(config, f"{prefix}.linear_attn")
    else:
        mixer = _attention(config, layer, f"{prefix}.self_attn")
    parts = {**_norms(config, prefix), **mixer}
    if config.altup is not None:
        parts |= _altup(config, config.altup, prefix)
    experts = config.experts_in(layer)
    if experts is None:
        mlp = f"{prefix}.mlp"
        parts |= _mlp(config, mlp, config.intermediate_size, "inner", has_bias=config.mlp_bias)
    else:
        parts |= _experts(config, experts, expert_names(config), prefix)
    return _of_rank(parts, config, share)


def expert_names(config: ModelConfig) -> ExpertNames:
    """The names of the experts in its checkpoint."""
    names = FAMILIES[config.family].experts
    if names is not None and config.stacks_experts:
        names = names.or_stacked
    assert names is not None
    return names


def outer_parts(config: ModelConfig, share: Share = WHOLE) -> Fields:
    """The checkpoint tensors outside the layers, or what a rank reads of them."""
    table, cut = (config.vocab_size, config.hidden_size), Cut("vocab")
    parts = {
        "embedding": [Part("model.embed_tokens.weight", table, cut=cut)],
        "norm": [_norm(config, "model.norm")],
    }
    if not config.tie_word_embeddings:
        parts["lm_head"] = [Part("lm_head.weight", table, cut=cut)]
    if config.altup is not None:
        parts |= _altup_tables(config, config.altup)
    return _of_rank(parts, config, share)


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
    ignored, stored = _further_layers(model) + _unused_kv(model.config), model.tensors
    if model.config.tie_word_embeddings:
        ignored = *ignored, "lm_head.weight"
    used = {name: each for name, each in stored.items() if not name.startswith(ignored)}
    wanted = {"": [*all_parts(model.config)]}
    place = f"the weights in {model.source}"
    check_parts(place, wanted, used, model.config.family, are_all=True)


def check_parts(
    place: str,
    fields: Fields,
    stored: Mapping[str, StoredTensor],
    family: str = "",
    *,
    are_all: bool = False,
) -> None:
    """Compare tensors with those that are needed.

    Args:
        place: what has the tensors, for messages.
        are_all: whether there may be no others.

    Raises:
        ModelError: as `check_weights`.
    """
    wanted = {part.name: part for parts in fields.values() for part in parts}
    missing = [name for name in wanted if name not in stored]
    others = [name for name in stored if name not in wanted] if are_all else []
    unexpected = [name for name in others if not _says_nothing(name, stored[name])]
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
        f"{title}: {some(names)}"
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
            f"{place} do not fit its configuration{f' ({family})' if family else ''}. "
            + "; ".join(problems)
        )


def _of_rank(fields: Fields, config: ModelConfig, share: Share) -> Fields:
    if share.num_ranks == 1:
        return fields
    taken = {
        field: [own for part in parts for own in _own(part, config, share)]
        for field, parts in fields.items()
    }
    return {field: parts for field, parts in taken.items() if parts}


def _own(part: Part, config: ModelConfig, share: Share) -> list[Part]:
    """What a rank reads of a tensor."""
    cut, experts = part.cut, config.experts
    own_experts = None if experts is None else share.own_experts(experts)
    if part.experts and own_experts is not None:
        if len(part.experts) > 1:  # all experts are in one tensor, which is read at once
            return [_boxed(part, 0, (own_experts.start, own_experts.stop))]
        return [part] if part.experts.start in own_experts else []
    if cut is None:
        return [part]
    if cut.of == "once":
        return [part] if share.is_first else []
    if cut.of == "KV heads":
        own = share.kv_heads(config.num_kv_heads)
    elif experts is not None and cut.of == "inner of experts":
        own = share.of_experts(experts)
    else:
        totals = {
            "heads": config.num_heads,
            "inner": config.intermediate_size,
            "inner of shared": experts.shared_intermediate_size if experts else 0,
            "vocab": config.vocab_size,
        }
        own = share.of(totals[cut.of])
    begin = part.box[cut.dimension][0] if part.box else 0  # of several matrices in one tensor
    first, end = (begin + each * cut.unit for each in own)
    return [_boxed(part, cut.dimension, (first, end))]


# The norms of a layer, by their place: the field of `LayerWeights`, and the name in a checkpoint.
_NORMS: dict[Norms, dict[str, str]] = {
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
    "around, GLM": {
        "input_norm": "input_layernorm",
        "output_norm": "post_self_attn_layernorm",
        "post_norm": "post_attention_layernorm",
        "down_norm": "post_mlp_layernorm",
    },
}


def _norms(config: ModelConfig, prefix: str) -> Fields:
    names = _NORMS[config.norms]
    return {field: [_norm(config, f"{prefix}.{name}")] for field, name in names.items()}


def _norm(config: ModelConfig, name: str, size: int | None = None, cut: Cut | None = None) -> Part:
    shape, is_exact = (size or config.hidden_size,), config.norms_less_one
    return Part(f"{name}.weight", shape, is_exact=is_exact, is_less_one=is_exact, cut=cut)


def _rows(
    prefix: str, kind: str, sizes: Mapping[str, tuple[int, Cut]], fused: str, *columns: int
) -> list[Part]:
    """Projections of one field, by name, with their numbers of rows.

    Args:
        kind: "weight" or "bias".
        fused: the name of one tensor that has all of them, one after the other; empty: each is one.
    """
    parts, first, total = [], 0, sum(size for size, _ in sizes.values())
    for name, (size, cut) in sizes.items():
        part = Part(f"{prefix}.{fused or name}_proj.{kind}", (size, *columns), cut=cut)
        if fused:
            box = (first, first + size), *((0, each) for each in columns)
            part = replace(part, stored=(total, *columns), box=box)
        parts.append(part)
        first += size
    return parts


def _attention(config: ModelConfig, layer: int, prefix: str) -> Fields:
    if config.latent is not None:
        parts, index = _latent_attention(config, config.latent, prefix), config.latent.index
        if index is None or layer in index.sharing_layers:
            return parts
        return parts | _index(config, index, parts, prefix)
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    heads, kv_heads = (Cut(of, 0, config.head_dim) for of in ("heads", "KV heads"))
    sizes = {"q": (q_size, heads), "k": (kv_size, kv_heads), "v": (kv_size, kv_heads)}
    if config.shares_kv(layer):
        del sizes["k"], sizes["v"]
    output, fused = Cut("heads", 1, config.head_dim), "qkv" * ("qkv" in config.fused)
    parts = {
        "qkv": _rows(prefix, "weight", sizes, fused, hidden),
        "output": [Part(f"{prefix}.o_proj.weight", (hidden, q_size), cut=output)],
    }
    if config.qkv_bias:
        parts["qkv_bias"] = _rows(prefix, "bias", sizes, fused)
    if config.gates_output:
        for field in parts.keys() & {"qkv", "qkv_bias"}:
            parts[field] = _with_gates(parts[field], config)
    if config.output_bias:
        parts["output_bias"] = [Part(f"{prefix}.o_proj.bias", (hidden,), cut=Cut("once"))]
    if config.qk_norm:
        for name in sizes.keys() & {"q", "k"}:
            size, cut = sizes[name] if config.qk_norm_all_heads else (config.head_dim, None)
            parts[f"{name}_norm"] = [_norm(config, f"{prefix}.{name}_norm", size, cut)]
    if config.sinks:
        parts["sinks"] = [Part(f"{prefix}.sinks", (config.num_heads,), cut=Cut("heads"))]
    return parts


def _altup(config: ModelConfig, altup: AltUpConfig, prefix: str) -> Fields:
    """What a layer with several residual streams has besides."""
    hidden, count, size = config.hidden_size, altup.num_streams, altup.embedding_size
    shapes: dict[str, tuple[str, Shape]] = {
        "stream_scale": ("altup.correct_output_scale", (hidden,)),
        "stream_norm": ("altup.router_norm.weight", (hidden,)),
        "stream_router": ("altup.modality_router.weight", (count, hidden)),
        "prediction": ("altup.prediction_coefs.weight", (count * count, count)),
        "correction": ("altup.correction_coefs.weight", (count, count)),
        "laurel_left": ("laurel.linear_left.weight", (altup.laurel_rank, hidden)),
        "laurel_right": ("laurel.linear_right.weight", (hidden, altup.laurel_rank)),
        "laurel_norm": ("laurel.post_laurel_norm.weight", (hidden,)),
        "token_gate": ("per_layer_input_gate.weight", (size, hidden)),
        "token_output": ("per_layer_projection.weight", (hidden, size)),
        "token_norm": ("post_per_layer_input_norm.weight", (hidden,)),
    }
    return {
        f"altup.{field}": [Part(f"{prefix}.{name}", shape)]
        for field, (name, shape) in shapes.items()
    }


def _altup_tables(config: ModelConfig, altup: AltUpConfig) -> Fields:
    """What a decoder with several residual streams has outside its layers."""
    hidden, size = config.hidden_size, config.num_layers * altup.embedding_size
    square, others = (hidden, hidden), range(altup.num_streams - 1)
    return {
        "altup.table": [Part("model.embed_tokens_per_layer.weight", (altup.embedding_rows, size))],
        "altup.token_input": [Part("model.per_layer_model_projection.weight", (size, hidden))],
        "altup.token_input_norm": [
            Part("model.per_layer_projection_norm.weight", (altup.embedding_size,))
        ],
        "altup.spread": [Part(f"model.altup_projections.{i}.weight", square) for i in others],
        "altup.join": [Part(f"model.altup_unembed_projections.{i}.weight", square) for i in others],
    }


def _unused_kv(config: ModelConfig) -> tuple[str, ...]:
    """Names of keys and values that checkpoints have for layers that read those of others."""
    return tuple(
        f"model.layers.{layer}.self_attn.{name}."
        for layer in range(config.num_layers - config.num_shared_layers, config.num_layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


def _with_gates(qkv: list[Part], config: ModelConfig) -> list[Part]:
    """The rows of q, k and v, and those of the gates, which follow each head's query in q's."""
    q, *kv = qkv
    size, num_heads = config.head_dim, config.num_heads
    of_heads = _blocks_of(replace(q, shape=(2 * q.shape[0], *q.shape[1:])), (size, size), num_heads)
    return [*of_heads[0], *kv, *of_heads[1]]


def _blocks_of(whole: Part, sizes: tuple[int, ...], count: int) -> list[list[Part]]:
    """The rows of a tensor that has `count` times a block of each of these sizes, by block."""
    found, first = [], 0
    for size in sizes:
        firsts = range(first, whole.shape[0], sum(sizes))
        found.append([_boxed(whole, 0, (begin, begin + size)) for begin in firsts])
        first += size
    return found


def _delta_net(config: ModelConfig, prefix: str) -> Fields:
    """A gated delta net: `qkv` makes queries, keys, values, and gates of the output."""
    heads, hidden = config.delta_heads, config.hidden_size
    assert heads is not None
    num_keys, per_key = heads.num_key_heads, heads.num_heads // heads.num_key_heads
    channels, values = heads.num_channels, heads.num_heads * heads.value_dim

    def projection(name: str, num_rows: int) -> Part:
        return Part(f"{prefix}.in_proj_{name}.weight", (num_rows, hidden))

    if FAMILIES[config.family].delta_nets == "by kind":
        qkvz = [projection("qkv", channels), projection("z", values)]
        gates = [projection(name, heads.num_heads) for name in ("b", "a")]
    else:
        key, value = heads.key_dim, per_key * heads.value_dim
        whole = projection("qkvz", channels + values)
        qkvz = [*chain(*_blocks_of(whole, (key, key, value, value), num_keys))]
        both = projection("ba", 2 * heads.num_heads)
        gates = [*chain(*_blocks_of(both, (per_key, per_key), num_keys))]
    return {
        "qkv": qkvz,
        "delta_gates": gates,
        "taps": [
            Part(f"{prefix}.conv1d.weight", (channels, heads.taps), (channels, 1, heads.taps))
        ],
        "decay_rate": [Part(f"{prefix}.A_log", (heads.num_heads,), is_exact=True)],
        "decay_bias": [Part(f"{prefix}.dt_bias", (heads.num_heads,), is_exact=True)],
        "delta_norm": [Part(f"{prefix}.norm.weight", (heads.value_dim,))],
        "output": [Part(f"{prefix}.out_proj.weight", (hidden, values))],
    }


def _latent_attention(config: ModelConfig, latent: LatentConfig, prefix: str) -> Fields:
    """Latent attention: `qkv` makes the latents of queries (or queries), and the cached vector."""
    hidden, num_heads = config.hidden_size, config.num_heads
    of_head, query = latent.nope_dim + latent.value_dim, Cut("heads", 0, latent.query_dim)
    q_size, output_size = num_heads * latent.query_dim, num_heads * latent.value_dim
    output = Cut("heads", 1, latent.value_dim)
    kv_b = Part(f"{prefix}.kv_b_proj.weight", (num_heads * of_head, latent.rank))
    cached = Part(f"{prefix}.kv_a_proj_with_mqa.weight", (latent.key_dim, hidden))
    parts = {
        "kv_a_norm": [Part(f"{prefix}.kv_a_layernorm.weight", (latent.rank,))],
        "kv_b": [replace(kv_b, cut=Cut("heads", 0, of_head))],
        "output": [Part(f"{prefix}.o_proj.weight", (hidden, output_size), cut=output)],
    }
    if latent.query_rank is None:
        q = Part(f"{prefix}.q_proj.weight", (q_size, hidden), cut=query)
        return parts | {"qkv": [q, cached]}
    q_a = Part(f"{prefix}.q_a_proj.weight", (latent.query_rank, hidden))
    return parts | {
        "qkv": [q_a, cached],
        "q_a_norm": [Part(f"{prefix}.q_a_layernorm.weight", (latent.query_rank,))],
        "q_b": [Part(f"{prefix}.q_b_proj.weight", (q_size, latent.query_rank), cut=query)],
    }


def _index(config: ModelConfig, index: IndexConfig, parts: Fields, prefix: str) -> Fields:
    """The index of a layer with latents `parts`. Its keys and queries are made together with those
    of the heads. Every rank has the whole index, since all heads attend to the same tokens."""
    query_rank, own = parts["q_b"][0].shape[1], f"{prefix}.indexer"
    q_size, hidden = index.num_heads * index.head_dim, config.hidden_size
    norm = (index.head_dim,)
    return {
        "qkv": [*parts["qkv"], Part(f"{own}.wk.weight", (index.head_dim, hidden))],
        "q_b": [*parts["q_b"], Part(f"{own}.wq_b.weight", (q_size, query_rank))],
        "index_norm": [Part(f"{own}.k_norm.weight", norm)],
        "index_norm_bias": [Part(f"{own}.k_norm.bias", norm)],
        "index_weights": [
            Part(f"{own}.weights_proj.weight", (index.num_heads, hidden), is_exact=True)
        ],
    }


def _mlp(
    config: ModelConfig,
    prefix: str,
    inner: int,
    of: Literal["inner", "inner of shared"],
    *,
    has_bias: bool = False,
) -> Fields:
    hidden, fused = config.hidden_size, "gate_up" * ("gate_up" in config.fused)
    sizes = {"gate": (inner, Cut(of)), "up": (inner, Cut(of))}
    parts = {
        "gate_up": _rows(prefix, "weight", sizes, fused, hidden),
        "down": [Part(f"{prefix}.down_proj.weight", (hidden, inner), cut=Cut(of, 1))],
    }
    if has_bias:
        parts["gate_up_bias"] = _rows(prefix, "bias", sizes, fused)
        parts["down_bias"] = [Part(f"{prefix}.down_proj.bias", (hidden,), cut=Cut("once"))]
    return parts


def _experts(
    config: ModelConfig, experts: ExpertsConfig, names: ExpertNames, prefix: str
) -> Fields:
    count, hidden = experts.num_experts, config.hidden_size
    parts = {"router": [Part(f"{prefix}.{names.router}.weight", (count, hidden))]}
    if experts.has_bias:
        parts["router_bias"] = [Part(f"{prefix}.{names.router}.bias", (count,))]
    if experts.shared_intermediate_size:
        size = experts.shared_intermediate_size
        shared = _mlp(config, f"{prefix}.{names.shared}", size, "inner of shared")
        parts |= {f"shared_{field}": its for field, its in shared.items()}
        if names.shared_gate:
            parts["shared_gate"] = [Part(f"{prefix}.{names.shared_gate}.weight", (1, hidden))]
    if names.score_bias:
        parts["score_bias"] = [Part(f"{prefix}.{names.score_bias}", (count,), is_exact=True)]
    if names.stacked == "alternating":
        return parts | _stacked_experts(experts, names, prefix, hidden)
    inner = experts.intermediate_size

    def matrix(name: str, expert: int, shape: Shape, cut: int, rows: Range) -> Part:
        """Of one expert. rows: where it is in a tensor of all of them, if there is one."""
        own, place = range(expert, expert + 1), f"{prefix}.{name.format(expert)}"
        part = Part(place, shape, cut=_OF_EXPERTS._replace(dimension=cut), experts=own)
        if not names.stacked:
            return replace(part, name=f"{place}.weight")
        stored = count, shape[0] * (2 if name == names.gate else 1), shape[1]
        box = (expert, expert + 1), rows, (0, shape[1])
        return replace(part, stored=stored, box=box, cut=_OF_EXPERTS._replace(dimension=cut + 1))

    up = names.gate if names.stacked else names.up
    halves = (names.gate, (0, inner)), (up, (inner, 2 * inner))
    return parts | {
        "gate_up": [
            matrix(name, expert, (inner, hidden), 0, rows)
            for expert in range(count)
            for name, rows in halves
        ],
        "down": [
            matrix(names.down, expert, (hidden, inner), 1, (0, hidden)) for expert in range(count)
        ],
    }


def _stacked_experts(
    experts: ExpertsConfig, names: ExpertNames, prefix: str, hidden: int
) -> Fields:
    """All experts of a layer in one tensor, where rows of gate and up alternate (gpt-oss)."""
    count, inner, cut = experts.num_experts, experts.intermediate_size, _OF_EXPERTS
    # Floats are stored as [in, out], and MXFP4 as [out, in].
    turned = not experts.is_mxfp4
    rows_at, columns_at = (2, 1) if turned else (1, 2)
    parts: Fields = {}
    for field, name, num_rows, size, own, bias_cut in (
        (
            "gate_up",
            names.gate,
            2 * inner,
            hidden,
            cut._replace(dimension=rows_at, unit=2),
            cut._replace(dimension=1, unit=2),
        ),
        ("down", names.down, hidden, inner, cut._replace(dimension=columns_at), Cut("once")),
    ):
        alike: dict[str, Any] = {"is_interleaved": field == "gate_up", "experts": range(count)}
        place, rows = f"{prefix}.{name}", count * num_rows
        stored = (count, size, num_rows) if turned else (count, num_rows, size)
        bias = Part(f"{place}_bias", (rows,), (count, num_rows), cut=bias_cut, **alike)
        matrix = Part(place, (rows, size), stored, is_transposed=turned, cut=own, **alike)
        parts |= {field: [matrix], f"{field}_bias": [bias]}
    return parts


def _boxed(part: Part, dimension: int, own: Range) -> Part:
    """The part's range `own` of one stored dimension."""
    stored = part.stored_shape
    box = [*part.box] or [(0, size) for size in stored]
    box[dimension] = own
    sizes = [end - first for first, end in box]
    shape: Shape
    if len(stored) > len(part.shape):
        num_rows = sizes[0] * (sizes[2] if part.is_transposed else sizes[1])  # of all experts
        width = math.prod(sizes) // num_rows
        shape = (num_rows,) if len(part.shape) == 1 else (num_rows, width)
    else:
        shape = tuple(sizes)
    return replace(part, shape=shape, stored=stored, box=tuple(box))


def _further_layers(model: ModelDescription) -> tuple[str, ...]:
    """Prefixes of the names of layers that predict further tokens, which are not used."""
    config = model.config
    if config.states is not None:
        return ("mtp.",)
    last = config.num_layers + config.num_nextn_layers
    return tuple(f"model.layers.{layer}." for layer in range(config.num_layers, last))


def _says_nothing(name: str, stored: StoredTensor) -> bool:
    """Whether a tensor may be ignored: a relic of old checkpoints, or one of GPTQ's zero biases."""
    return name.endswith("rotary_emb.inv_freq") or (name.endswith(".bias") and stored.is_zero())


def some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_AN_ERROR])
    hidden = len(names) - _MAX_NAMES_IN_AN_ERROR
    return f"{shown} and {hidden} more" if hidden > 0 else shown
