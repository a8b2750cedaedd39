"""The description of a model family: its differences from others, and the keys of its config.json.

Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from disagg.errors import ModelError

Json: TypeAlias = Mapping[str, Any]
Norms: TypeAlias = Literal["before", "after", "around", "around, GLM"]
MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names that a family with experts has for them in config.json and in its checkpoints.

    Attributes:
        num_experts: keys for the number of experts, of which a file has one.
        intermediate_size: key for the inner size of one expert.
        router: the router's tensor, without the prefix of the layer.
        gate, up, down: matrices of expert {}, without the prefix of the layer. If they are stacked,
            the tensors that have gate and up, and down, of all experts; `up` is not used.
        stacked: how one tensor has gate and up: their rows alternate, or those of gate come first;
            empty: each expert has its own tensors.
        or_stacked: the names in checkpoints whose experts are stacked, if the family also has such.
        shared: names of the expert that all tokens go through and of its gate, with the key for its
            size.
        is_normalized: whether weights are always normalised; if not, `norm_topk_prob` says it.
        has_dense_layers: whether `mlp_only_layers` and `decoder_sparse_step` may name dense layers.
        is_clamped: whether experts compute the clamped SwiGLU.
        scoring: scoring of DeepSeek's routers, which may choose from groups (`kernels.grouping`);
            empty: the experts with the largest logits are chosen.
        score_bias: tensor of the bias of scores, without the prefix of the layer.
        num_shared: key for the number of experts that all tokens go through; they have the same
            size and are stored as one.
        first_dense: key for the number of first layers, which have no experts.
        layer_kinds: key for a list that calls each layer dense or sparse; without the list,
            `first_dense` counts, or else only the first layer is dense.
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
    stacked: Literal["", "alternating", "gate first"] = ""
    or_stacked: ExpertNames | None = None
    is_clamped: bool = False
    scoring: Literal["", "softmax", "sigmoid"] = ""
    score_bias: str = ""
    num_shared: str = ""
    first_dense: str = ""
    layer_kinds: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        model_type: its model_type in `config.json`.
        also_called: model_types of other models that are the same.
        defaults: defaults of its configuration class (transformers 5), for keys that a file may
            leave out. Sizes that only the weights determine have no default, so a file without
            them is broken.
        qkv_bias, output_bias, mlp_bias: whether q, k and v, the output of attention, and MLPs have
            biases, or the key that says so.
        qk_norm: how q and k are normalised: each head; each head if the key `use_qk_norm` says so
            ("stated"); or all heads of q together, and all heads of k together.
        windows: which layers have a sliding window: the layers that the file names, if its
            `use_sliding_window` says so; all layers if a size is set; the layers that the file
            names, or else all but every `full_every`-th; or none, and a file with a window is
            refused.
        full_every: every `full_every`-th layer has no window. The key `sliding_window_pattern` may
            give another number, if it is one of the `defaults`.
        ropes_by_kind: whether layers with a window have their own RoPE settings.
        no_rope: which layers have no positions (NoPE): those that `no_rope_layers` or
            `no_rope_layer_interval` names; those without a window, if others have one; or none.
        rotates_pairs: whether RoPE rotates pairs of neighbouring values. If not, it rotates value i
            of the first half together with value i of the second half.
        fused: which of "qkv" and "gate_up" are one tensor of a checkpoint.
        rope_kinds: the supported kinds of RoPE scaling; empty: all kinds.
        sinks: whether each query head has a logit that takes part in its softmax and has no value.
        experts: the names of its experts; None: it has no experts.
        is_latent: whether it has multi-head latent attention.
        index_rotation: whether an index chooses the tokens that its queries attend to, and if so,
            whether RoPE rotates neighbouring values ("pairs") of the index's queries and keys, or
            value i of the first half together with value i of the second half ("halves").
        norms: where the norms of a layer are: before attention and MLP, after both, or around both,
            with Gemma's or with GLM's names.
        norms_less_one: whether a checkpoint has the weights of norms minus one. They are then kept
            in float32, as transformers computes them.
        scaled_embedding: whether embeddings are multiplied by the square root of their size.
        delta_nets: whether `layer_types`, or else `full_attention_interval`, names layers that have
            a gated delta net instead of attention; if so, how a checkpoint has its projections: one
            head of keys after the other, with all that belongs to it; or all queries first, then
            all keys and all values, with a tensor for each kind of gates ("by kind").
        has_altup: whether layers have several residual streams, and with them what Gemma 3n adds:
            embeddings of layers, LAuReL, sparse MLPs, values with a norm, and scores that are not
            divided by the root of the size of heads.
        gates_output: whether the output of attention is multiplied by a sigmoid, whose inputs are
            further rows of the queries' matrix, those of a head behind its query.
        activations: names in config.json of the activation of its MLPs; all mean the same one.
        fits_float16: whether its activations fit into float16.
    """

    model_type: str
    defaults: Json
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["none", "each head", "stated", "all heads"] = "none"
    windows: Literal["stated", "all", "alternating", "none"] = "none"
    full_every: int = 2
    ropes_by_kind: bool = False
    no_rope: Literal["stated", "full", "none"] = "none"
    rotates_pairs: bool = False
    fused: tuple[str, ...] = ()
    rope_kinds: tuple[str, ...] = ()
    sinks: bool = False
    experts: ExpertNames | None = None
    is_latent: bool = False
    index_rotation: Literal["", "pairs", "halves"] = ""
    also_called: tuple[str, ...] = ()
    norms: Norms = "before"
    norms_less_one: bool = False
    scaled_embedding: bool = False
    delta_nets: Literal["", "by key head", "by kind"] = ""
    has_altup: bool = False
    gates_output: bool = False
    activations: tuple[str, ...] = ("silu",)
    fits_float16: bool = True


class Fields:
    """The keys of a config.json with the defaults of its family."""

    def __init__(self, raw: Json, place: object) -> None:
        self.raw = raw
        self.place = place

    def wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.place} is wrong: {what}")

    def size(self, key: str, most: int = MOST) -> int:
        """A positive whole number. Raises `ModelError`."""
        if key not in self.raw:
            raise ModelError(f"{self.place} has no {key!r}")
        value = self.raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            limit = "" if most == MOST else f" of at most {most:,}"
            raise self.wrong(f"{key} must be a positive number{limit}, not {value!r}")
        return value

    def optional_size(self, key: str) -> int | None:
        """As `size`, or None for null."""
        return None if self.raw[key] is None else self.size(key)

    def flag(self, key: str) -> bool:
        """True or false. Raises `ModelError`, also for null, which transformers refuses."""
        value = self.raw[key]
        if not isinstance(value, bool):
            raise self.wrong(f"{key} must be true or false, not {json.dumps(value)}")
        return value

    def is_so(self, key: bool | str) -> bool:
        """What a family says, or the flag that it names. Raises `ModelError`."""
        return self.flag(key) if isinstance(key, str) else key

    def number(self, key: str) -> float:
        """A number above 0. Raises `ModelError`."""
        value = self.raw[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.wrong(f"{key} must be a number above 0, not {value!r}")
        return float(value)

    def first_of(self, *keys: str) -> str:
        """The first of several names of a key that the file has; if it has none, the first name."""
        return next((key for key in keys if key in self.raw), keys[0])
