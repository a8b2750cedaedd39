"""The parts of a checkpoint's tensors that one rank of a worker reads. Knows no torch.

A rank reads rows of the projections that begin attention and MLP, columns of the projections that
end them, and rows of the vocabulary tables. Biases that follow a sum over ranks belong to the first
rank. With expert parallelism a rank reads whole experts with their biases, and no other experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from disagg.models.latent_config import LatentConfig
from disagg.models.model_config import ModelConfig
from disagg.models.parts import Fields, Part, Range, Shape, layer_parts, outer_parts
from disagg.models.share import WHOLE, Share

_OF_EXPERTS = ("gate_up", "gate_up_bias", "down", "down_bias")


def rank_layer_parts(config: ModelConfig, layer: int, share: Share = WHOLE) -> Fields:
    """As `parts.layer_parts`, for one rank. Fields that it does not have are left out.

    Args:
        config: the settings of the whole model.
    """
    fields = layer_parts(config, layer)
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


def rank_outer_parts(config: ModelConfig, share: Share = WHOLE) -> Fields:
    """As `parts.outer_parts`, for one rank."""
    fields = outer_parts(config)
    if share.num_ranks == 1:
        return fields
    own = share.of(config.vocab_size)
    return {
        field: parts if field == "norm" else [_boxed(part, 0, own) for part in parts]
        for field, parts in fields.items()
    }


def rank_parts(config: ModelConfig, share: Share = WHOLE) -> Iterator[Part]:
    """All parts that one rank reads."""
    layers = (rank_layer_parts(config, layer, share) for layer in range(config.num_layers))
    for fields in (rank_outer_parts(config, share), *layers):
        for parts in fields.values():
            yield from parts


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
