"""Maps the weights of a decoder to the tensors of a checkpoint. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from disagg.models.experts_config import ExpertsConfig
from disagg.models.families import FAMILIES
from disagg.models.family import ExpertNames
from disagg.models.latent_config import LatentConfig
from disagg.models.model_config import ModelConfig

Shape: TypeAlias = tuple[int, ...]
Range: TypeAlias = tuple[int, int]  # first, end


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


def layer_parts(config: ModelConfig, layer: int) -> Fields:
    """The checkpoint tensors that make up each field of `LayerWeights`."""
    prefix = f"model.layers.{layer}"
    parts = {**_norms(config, prefix), **_attention(config, f"{prefix}.self_attn")}
    experts = config.experts_in(layer)
    if experts is None:
        mlp = f"{prefix}.mlp"
        return parts | _mlp(config, mlp, config.intermediate_size, has_bias=config.mlp_bias)
    names = FAMILIES[config.family].experts
    assert names is not None
    return parts | _experts(config, experts, names, prefix)


def outer_parts(config: ModelConfig) -> Fields:
    """The checkpoint tensors outside the layers."""
    table = (config.vocab_size, config.hidden_size)
    parts = {
        "embedding": [Part("model.embed_tokens.weight", table)],
        "norm": [_norm(config, "model.norm")],
    }
    if not config.tie_word_embeddings:
        parts["lm_head"] = [Part("lm_head.weight", table)]
    return parts


def all_parts(config: ModelConfig) -> Iterator[Part]:
    """All tensors of a checkpoint."""
    layers = (layer_parts(config, layer) for layer in range(config.num_layers))
    for fields in (outer_parts(config), *layers):
        for parts in fields.values():
            yield from parts


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
