"""What config.json says about a mixture of experts. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.errors import ModelError
from disagg.models.config_fields import Fields
from disagg.models.families import ExpertNames

MXFP4 = "mxfp4"
MXFP4_GROUP = 32  # values that share a scale
MXFP4_NBYTES = (MXFP4_GROUP / 2 + 1) / MXFP4_GROUP  # of a value
_MOST = 10_000  # experts of a layer; there are models with hundreds


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The MLP of a layer that has experts: each token goes through a few of them.

    Attributes:
        num_experts_per_tok: how many a token goes through.
        intermediate_size: of one expert.
        shared_intermediate_size: of the expert that all tokens go through; 0: there is none.
        is_normalized: the weights of a token's experts add up to 1. Otherwise they are what a
            softmax over all experts gives them.
        has_bias: the router and the experts have biases.
        swiglu_limit: of the clamped SwiGLU of gpt-oss, whose sigmoid is steeper by `swiglu_alpha`;
            None: plain SwiGLU.
        is_mxfp4: the experts are stored as MXFP4: 4-bit floats, 32 of which share a power of two.
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


def experts_config(fields: Fields, names: ExpertNames) -> ExpertsConfig:
    """Raises `ModelError`: a number is missing or wrong."""
    num_experts = fields.size(fields.first_of(*names.num_experts), _MOST)
    num_chosen = fields.size("num_experts_per_tok")
    if num_chosen > num_experts:
        raise fields.wrong(
            f"num_experts_per_tok is {num_chosen}, and there are {num_experts} experts"
        )
    clamp = {}
    if names.is_clamped:
        clamp["swiglu_limit"] = fields.number("swiglu_limit")
        clamp["swiglu_alpha"] = fields.number("swiglu_alpha")
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        intermediate_size=fields.size(names.intermediate_size),
        shared_intermediate_size=fields.size(names.shared_size) if names.shared_size else 0,
        is_normalized=names.is_normalized or fields.flag("norm_topk_prob"),
        has_bias=names.has_bias,
        is_mxfp4=_is_mxfp4(fields, names),
        **clamp,
    )


def dense_layers(fields: Fields, names: ExpertNames) -> frozenset[int]:
    """The layers without experts. Raises `ModelError`."""
    if not names.has_dense_layers:
        return frozenset()
    stated = fields.raw["mlp_only_layers"] or []
    if not isinstance(stated, list) or not all(type(each) is int for each in stated):
        raise fields.wrong(f"mlp_only_layers must be a list of layers, not {stated!r}")
    step = fields.size("decoder_sparse_step")
    layers = range(fields.size("num_hidden_layers"))
    return frozenset(each for each in layers if each in stated or (each + 1) % step)


def _is_mxfp4(fields: Fields, names: ExpertNames) -> bool:
    """Of a family whose experts are stacked; others are as `quantized_config` says."""
    quantization = fields.raw.get("quantization_config")
    if not quantization or not names.is_stacked:
        return False
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != MXFP4:
        raise ModelError(
            f"{fields.place}: the weights are quantised ({method}); only float and MXFP4"
            " checkpoints of this family are loaded"
        )
    return True
