"""Reads the settings of a mixture of experts from config.json. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disagg.kernels.grouping import Grouping
from disagg.models.family import ExpertNames, Fields

_MOST = 10_000  # most experts of a layer; real models have hundreds


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The settings of layers with experts: each token goes through a few of them.

    Attributes:
        num_experts_per_tok: number of experts that a token goes through.
        intermediate_size: inner size of one expert.
        shared_intermediate_size: inner size of the expert that all tokens go through; 0: there is
            none.
        is_normalized: whether the weights of a token's experts add up to 1. If not, they are taken
            from the softmax over all experts.
        has_bias: whether the router and the experts have biases.
        swiglu_limit: limit of gpt-oss's clamped SwiGLU, whose sigmoid is steeper by `swiglu_alpha`;
            None: plain SwiGLU.
        is_mxfp4: whether experts are stored as MXFP4: 4-bit floats, 32 of which share a power of
            two.
        grouping: how experts are chosen; None: those with the largest logits.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    is_normalized: bool = True
    has_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    is_mxfp4: bool = False
    grouping: Grouping | None = None


def experts_config(fields: Fields, names: ExpertNames) -> ExpertsConfig:
    """Read the settings. Raises `ModelError` if a number is missing or wrong."""
    num_experts = fields.size(fields.first_of(*names.num_experts), _MOST)
    num_chosen = fields.size("num_experts_per_tok")
    if num_chosen > num_experts:
        raise fields.wrong(
            f"num_experts_per_tok is {num_chosen}, but there are only {num_experts} experts"
        )
    clamp = {}
    if names.is_clamped:
        clamp["swiglu_limit"] = fields.number("swiglu_limit")
        clamp["swiglu_alpha"] = fields.number("swiglu_alpha")
    inner, shared = fields.size(names.intermediate_size), 0
    if names.shared_size:
        shared = fields.size(names.shared_size)
    elif names.num_shared:
        shared = inner * fields.size(names.num_shared, _MOST)
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        intermediate_size=inner,
        shared_intermediate_size=shared,
        is_normalized=names.is_normalized or fields.flag("norm_topk_prob"),
        has_bias=names.has_bias,
        is_mxfp4=names.stacked == "alternating" and bool(fields.raw.get("quantization_config")),
        grouping=_grouping(fields, names, num_experts, num_chosen) if names.scoring else None,
        **clamp,
    )


def dense_layers(fields: Fields, names: ExpertNames) -> frozenset[int]:
    """The layers without experts. Raises `ModelError`."""
    is_named = fields.raw.get(names.layer_kinds) is not None or not names.first_dense
    if names.layer_kinds and is_named:
        return _dense_of(fields, names.layer_kinds)
    if names.first_dense:
        num_layers, first = fields.size("num_hidden_layers"), fields.raw[names.first_dense]
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise fields.wrong(f"{names.first_dense} must be a number of layers, not {first!r}")
        return frozenset(range(min(first, num_layers)))
    if not names.has_dense_layers:
        return frozenset()
    stated = fields.raw["mlp_only_layers"] or []
    if not isinstance(stated, list) or not all(type(each) is int for each in stated):
        raise fields.wrong(f"mlp_only_layers must be a list of layers, not {stated!r}")
    step = fields.size("decoder_sparse_step")
    layers = range(fields.size("num_hidden_layers"))
    return frozenset(each for each in layers if each in stated or (each + 1) % step)


def _dense_of(fields: Fields, key: str) -> frozenset[int]:
    """The layers that a list calls dense; without a list, the first layer."""
    num_layers, kinds = fields.size("num_hidden_layers"), fields.raw.get(key)
    if kinds is None:
        if fields.raw.get("first_k_dense_replace", 1) != 1:
            raise fields.wrong(
                f"first_k_dense_replace {fields.raw['first_k_dense_replace']!r} is not supported"
                f" here, only 1; name the layers in {key}"
            )
        return frozenset((0,))
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in ("dense", "sparse") for kind in kinds):
        raise fields.wrong(f"{key} must call {num_layers} layers dense or sparse, not {kinds!r}")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def _grouping(fields: Fields, names: ExpertNames, num_experts: int, num_chosen: int) -> Grouping:
    is_sigmoid = names.scoring == "sigmoid"
    methods = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    only: dict[str, tuple[Any, ...]] = {
        "topk_method": methods,
        "scoring_func": (names.scoring,),
        "moe_layer_freq": (1,),
    }
    if not is_sigmoid:  # transformers ignores it in this case, but the model's own code reads it
        only["norm_topk_prob"] = (False,)
    for key, possible in only.items():
        if fields.raw.get(key, possible[0]) not in possible:
            known = " or ".join(map(str, possible))
            raise fields.wrong(f"{key} {fields.raw[key]!r} is not supported here, only {known}")
    if fields.raw.get("topk_method", methods[0]) == "greedy":
        num_groups = num_chosen_groups = 1
    else:
        num_groups, num_chosen_groups = fields.size("n_group"), fields.size("topk_group")
    size = num_experts // num_groups
    if num_experts % num_groups or num_chosen_groups > num_groups or size < 1 + is_sigmoid:
        raise fields.wrong(
            f"{num_experts} experts in {num_groups} groups (n_group), of which {num_chosen_groups}"
            " are chosen (topk_group), do not fit"
        )
    if num_chosen > size * num_chosen_groups:
        raise fields.wrong(
            f"num_experts_per_tok is {num_chosen}, but {num_chosen_groups} groups (topk_group) have"
            f" only {size * num_chosen_groups} experts"
        )
    return Grouping(
        num_groups, num_chosen_groups, is_sigmoid, fields.number("routed_scaling_factor")
    )
