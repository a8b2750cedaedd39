"""What a model family is: the switches by which its layers differ from others. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a family with experts calls them in config.json and in its checkpoints.

    Attributes:
        num_experts: keys for their number, of which a file has one.
        intermediate_size: the key for the size of one.
        router: its tensor, under the layer.
        gate, up, down: tensors of expert {}, under the layer. Of `is_stacked` all experts lie in
            one tensor, gate and up in turn, and `up` is not used.
        shared: the expert that all tokens go through and its gate, with the key for its size.
        is_normalized: always; else as `norm_topk_prob` says.
        has_dense_layers: whether `mlp_only_layers` and `decoder_sparse_step` may name some.
        is_clamped: whether they compute the clamped SwiGLU.
        scoring: of DeepSeek's routers, which may choose from groups (`kernels.grouping`); empty:
            the largest logits are chosen.
        score_bias: its tensor, under the layer.
        num_shared: the key for how many experts of the same size all tokens go through; they are
            stored as one.
        first_dense: the key for how many layers have none, the first ones.
        layer_kinds: the key for a list that calls each layer dense or sparse; without it, only the
            first one is dense.
    """

    num_experts: tuple[str, ...]
    intermediate_size: str
    router: str
    gate: str
    up: str
    down: str
    shared: str = ""
    shared_gate: str = ""
    shared_size: str = ""
    is_normalized: bool = False
    has_dense_layers: bool = False
    has_bias: bool = False
    is_stacked: bool = False
    is_clamped: bool = False
    scoring: Literal["", "softmax", "sigmoid"] = ""
    score_bias: str = ""
    num_shared: str = ""
    first_dense: str = ""
    layer_kinds: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """
    Attributes:
        model_type: what `config.json` calls it.
        also_called: by files of models that are the same.
        defaults: of its configuration class (transformers 5), for keys that a file may leave out.
            Sizes that only the weights decide have none here: a file without them is broken.
        attention_bias: of q, k, v and the output, as the key `attention_bias` says; of q, k and v,
            always or as the key `qkv_bias` or `attention_bias` says; or none.
        mlp_bias: whether the class knows the key `mlp_bias`.
        qk_norm: whether q and k are normalised: each head, each head if the key `use_qk_norm` says
            so, or all heads of q, and all heads of k, together.
        windows: which layers have a sliding window: those that the file names if its
            `use_sliding_window` says so; all if a size is set; those that the file names, else all
            but every `full_every`-th; or none, and a file that wants one is refused.
        full_every: a layer without a window is the last of so many. The key
            `sliding_window_pattern` may say another number, if it is one of the `defaults`.
        ropes_by_kind: layers with a window have rope settings of their own.
        is_fused: whether q, k and v lie in one tensor, and gate and up in another.
        rope_kinds: how its positions may be scaled; empty: in all ways.
        sinks: whether each query head has a logit that takes part in its softmax and has no value.
        experts: what there is of experts in its layers.
        is_latent: whether it has multi-head latent attention.
        norms: where a layer has them: before attention and MLP, after both, or around both.
        norms_less_one: whether a checkpoint has their weights less one. They are then kept in
            float32, as transformers computes them.
        scaled_embedding: whether embeddings are multiplied by the square root of their size.
        activations: of its MLPs, as config.json may call them; all are computed alike.
        fits_float16: whether its activations do.
    """

    model_type: str
    defaults: Json
    attention_bias: Literal["stated", "qkv", "qkv_bias", "qkv attention_bias", "none"] = "none"
    mlp_bias: bool = False
    qk_norm: Literal["none", "each head", "stated", "all heads"] = "none"
    windows: Literal["stated", "all", "alternating", "none"] = "none"
    full_every: int = 2
    ropes_by_kind: bool = False
    is_fused: bool = False
    rope_kinds: tuple[str, ...] = ()
    sinks: bool = False
    experts: ExpertNames | None = None
    is_latent: bool = False
    also_called: tuple[str, ...] = ()
    norms: Literal["before", "after", "around"] = "before"
    norms_less_one: bool = False
    scaled_embedding: bool = False
    activations: tuple[str, ...] = ("silu",)
    fits_float16: bool = True
