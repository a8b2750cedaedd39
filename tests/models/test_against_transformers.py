"""Every key of config.json as transformers reads it: absent, null, odd; equal or refused in words.

transformers itself is asked: its configuration class, and the modules that it builds from it. Where
it refuses, so must we, but for what has one meaning only (`LENIENT`). We may refuse more.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import modeling_rope_utils
from transformers.initialization import no_init_weights

from disagg.errors import ModelError
from disagg.models.decoder import inverse_frequencies
from disagg.models.description import describe_model
from disagg.models.families import FAMILIES
from disagg.models.model_config import ModelConfig
from tests.grids import IS_WHOLE
from tests.models.config_changes import ABSENT, CHANGES, PLAIN

CLASSES: dict[str, Any] = {name: getattr(transformers, name) for name in FAMILIES}
_PADDED = {"pad_token_id": 0}  # the class's own is beyond the small vocabulary
_QWEN_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24}
_DELTA_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_INDEX = {
    **_LATENT,
    "q_lora_rank": 14,
    "index_topk": 3,
    "index_head_dim": 10,
    "index_n_heads": 2,
}
# Beside `PLAIN`, what a family cannot do without.
OWN: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": _PADDED,
    "SmolLM3ForCausalLM": _PADDED,
    "Ministral3ForCausalLM": _PADDED,
    "GlmForCausalLM": _PADDED,
    "Glm4ForCausalLM": _PADDED,
    "OlmoeForCausalLM": {"num_experts": 6, "num_experts_per_tok": 3},
    "GraniteMoeForCausalLM": {"num_local_experts": 6},
    # Without a head_dim, this transformers cannot scale Mixtral's rope.
    "MixtralForCausalLM": {"num_local_experts": 6, "head_dim": 16},
    "Qwen2MoeForCausalLM": {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": {**_QWEN_EXPERTS, "num_experts_per_tok": 3},
    "Qwen3NextForCausalLM": {
        **_QWEN_EXPERTS,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 40,
        **_DELTA_HEADS,
    },
    "Qwen3_5ForCausalLM": _DELTA_HEADS,
    "Qwen3_5MoeForCausalLM": {
        **_QWEN_EXPERTS,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 40,
        **_DELTA_HEADS,
    },
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _INDEX,
    "GlmMoeDsaForCausalLM": _INDEX,
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
    },
    "Glm4MoeLiteForCausalLM": _LATENT,
    "MiniMaxM2ForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {"num_local_experts": 6},
    "Gemma3nForCausalLM": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 32,
        "hidden_size_per_layer_input": 4,
        "laurel_rank": 4,
    },
}
SCALES = "embedding_multiplier", "residual_multiplier", "logits_scaling"
ROTATIONS = {
    "original_max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}

_LATENT_FAMILIES = [name for name, own in OWN.items() if "kv_lora_rank" in own]
_GROUPED_PRODUCTS = [
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
    *_LATENT_FAMILIES,
]
# What transformers refuses, and what only one thing can be meant by.
LENIENT: list[tuple[str, dict[str, Any]]] = [
    ("MistralForCausalLM", {"num_key_value_heads": None}),
    ("Qwen2ForCausalLM", {"head_dim": None}),
    ("MixtralForCausalLM", {"num_key_value_heads": None}),
    *(("Phi3ForCausalLM", {key: None}) for key in ("head_dim", "partial_rotary_factor")),
    *(
        (family, {key: None})
        for family in (
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Glm4MoeForCausalLM",
        )
        for key in ("num_key_value_heads", "head_dim")
    ),
    ("GptOssForCausalLM", {"num_key_value_heads": None}),
    *(
        (family, {"num_key_value_heads": None})
        for family in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
    ),
    ("MiniMaxM2ForCausalLM", {"num_key_value_heads": None}),
    ("GemmaForCausalLM", {"num_key_value_heads": None}),
    *(
        (f"{family}ForCausalLM", {"head_dim": None})
        for family in ("Olmo2", "Olmo3", "Olmoe", "SmolLM3", "Granite", "GraniteMoe", "Exaone4")
    ),
    *(
        (f"{family}ForCausalLM", {"num_key_value_heads": None})
        for family in ("Glm", "Glm4", "Exaone4", "Ministral3")
    ),
    *(
        (family, change)
        for family in ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM")
        for change in ({"num_key_value_heads": None}, {"hidden_size": 66})
    ),
    ("Gemma3nForCausalLM", {"final_logit_softcapping": None}),
    ("OlmoeForCausalLM", {"head_dim": 8}),  # their norms have the size that heads usually have
    # Only the kernel on a CPU of theirs cannot.
    *((family, {"hidden_size": 66}) for family in _GROUPED_PRODUCTS),
    ("GptOssForCausalLM", {"swiglu_limit": 1}),
    *(
        (family, {"routed_scaling_factor": 1})
        for family in ("Glm4MoeForCausalLM", *_LATENT_FAMILIES)
    ),
    *(
        ("Glm4MoeLiteForCausalLM", {key: None})
        for key in ("num_key_value_heads", "rope_interleave")
    ),
    # Families without this field: transformers checks it where a family has `layer_types`.
    *(
        (family, {"mlp_layer_types": value})
        for family in CLASSES
        if family != "Glm4MoeLiteForCausalLM"
        for value in (["dense"] * 3, ["x"] * 4)
    ),
    *((family, {"rms_norm_eps": 0}) for family in CLASSES),
    *((family, {"rope_scaling": []}) for family in CLASSES),
]


@dataclass(frozen=True)
class _Read:
    """What decides the answers of a model."""

    head_dim: int  # of what the cache keeps
    num_kv_heads: int
    scale: float
    rms_norm_eps: float
    biases: tuple[bool, bool, bool, bool]  # q, output, gate, q norm
    tied: bool
    windows: tuple[int | None, ...]  # of layers with attention, as `positions`
    delta_nets: tuple[tuple[int, ...] | None, ...]  # sizes of its heads; None: it has attention
    positions: tuple[bool, ...]
    scales: tuple[float, ...]
    eos: tuple[int, ...]
    frequencies: tuple[float, ...]  # of layers with a window behind those of full ones
    attention_factor: float
    caps: tuple[float | None, float | None]  # of scores, of logits
    # Experts of each layer: how many, how many a token goes through, whether normalised; or None.
    experts: tuple[tuple[int, int, bool] | None, ...]


def _raw(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    merged = {"architectures": [family], **PLAIN, **OWN.get(family, {}), **changes}
    return {key: value for key, value in merged.items() if value is not ABSENT}


@cache
def _words_of(family: str) -> set[str]:
    """All words of the code that reads a family's configuration: no other key changes anything."""
    classes = (*CLASSES[family].__mro__, *CLASSES[family].config_class.__mro__)
    names = {each.__module__ for each in classes if each.__module__.startswith("transformers.")}
    modules = [modeling_rope_utils, *(sys.modules[name] for name in names)]
    return {word for each in modules for word in re.findall(r"\w+", inspect.getsource(each))}


_found: dict[tuple[str, str, bool], _Read] = {}  # of configurations that come out the same


def _theirs(family: str, changes: dict[str, Any]) -> _Read:
    changes = {key: value for key, value in changes.items() if key in _words_of(family)}
    raw = {key: value for key, value in _raw(family, changes).items() if key != "architectures"}
    config = CLASSES[family].config_class.from_dict(json.loads(json.dumps(raw)))
    key = family, json.dumps(config.to_dict(), default=str), bool(changes.keys() - ROTATIONS)
    if key not in _found:
        _found[key] = _theirs_of(family, config, changes)
    return _found[key]


def _theirs_of(family: str, config: Any, changes: dict[str, Any]) -> _Read:
    with no_init_weights():  # what they compute does not matter
        model = CLASSES[family](config)
    model.tie_weights()
    with torch.no_grad():
        _compute(model, changes)
    config, layers = model.config, model.model.layers
    attention = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    own, is_latent = attention[0], hasattr(config, "kv_lora_rank")
    is_mistral = family[:-11] in ("Mistral", "Ministral3", "Mixtral", "Phi3")
    qkv = getattr(own, "q_proj", None) or getattr(own, "qkv_proj", None) or own.q_a_proj
    slides_everywhere = config.sliding_window if is_mistral else None
    mlps = [getattr(each, "mlp", None) or each.block_sparse_moe for each in model.model.layers]
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    frequencies, factor = _their_rope(model.model.rotary_emb)
    has_cap = hasattr(type(config), "final_logit_softcapping")
    return _Read(
        head_dim=_their_latent_size(config) if is_latent else own.head_dim,
        num_kv_heads=1 if is_latent else config.num_key_value_heads,
        scale=own.scaling,
        rms_norm_eps=config.rms_norm_eps,
        biases=(
            qkv.bias is not None,
            own.o_proj.bias is not None,
            hasattr(mlps[0], "gate_proj") and mlps[0].gate_proj.bias is not None,
            hasattr(own, "q_norm"),
        ),
        tied=model.lm_head.weight is model.model.embed_tokens.weight,
        windows=tuple(
            (getattr(each, "is_sliding", True) and getattr(each, "sliding_window", None))
            or slides_everywhere
            for each in attention
        ),
        delta_nets=tuple(map(_their_delta_net, layers)),
        positions=tuple(map(_their_positions, attention)),
        scales=tuple(getattr(config, key, 1.0) for key in SCALES),
        # Families' own end tokens are beyond the small vocabularies here, and never chosen.
        eos=tuple(each for each in eos if each is not None and each < config.vocab_size),
        frequencies=tuple(each for part in frequencies for each in part.tolist()),
        attention_factor=factor,
        caps=(
            own.attn_logit_softcapping if family == "Gemma2ForCausalLM" else None,
            config.final_logit_softcapping if has_cap else None,
        ),
        experts=tuple(map(_their_experts, mlps)),
    )


def _their_latent_size(config: Any) -> int:
    size = config.kv_lora_rank + config.qk_rope_head_dim + getattr(config, "index_head_dim", 0)
    return int(size)


def _their_delta_net(layer: Any) -> tuple[int, ...] | None:
    if not hasattr(layer, "linear_attn"):
        return None
    own = layer.linear_attn
    sizes = own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim
    return *sizes, own.conv_kernel_size


def _our_delta_net(config: ModelConfig, layer: int) -> tuple[int, ...] | None:
    heads = config.delta_heads
    if heads is None or layer not in config.delta_layers:
        return None
    sizes = heads.num_key_heads, heads.num_heads, heads.key_dim, heads.value_dim
    return *sizes, heads.taps


def _their_positions(attention: Any) -> bool:
    if hasattr(attention, "use_rope"):
        return bool(attention.use_rope)
    # EXAONE 4, whose layers decide it when they are computed
    is_hybrid = hasattr(attention, "sliding_window_pattern") and attention.sliding_window
    return not is_hybrid or bool(attention.is_sliding)


def _their_rope(rotary: Any) -> tuple[list[torch.Tensor], float]:
    """Of full layers and of layers with a window, where these have another one."""
    if hasattr(rotary, "inv_freq"):
        return [rotary.inv_freq], rotary.attention_scaling
    kinds = ("full_attention", "sliding_attention")
    frequencies = [getattr(rotary, f"{kind}_inv_freq", torch.empty(0)) for kind in kinds]
    return frequencies, getattr(rotary, "full_attention_attention_scaling", 1.0)


def _compute(model: Any, changes: dict[str, Any]) -> None:
    """Raises whatever the library raises for a model that it builds and cannot compute. What only
    its tables of rotations depend on needs no layers, which take most of the time."""
    ids = torch.arange(8)[None]
    rotary = model.model.rotary_emb
    if changes and changes.keys() <= ROTATIONS and hasattr(rotary, "inv_freq"):
        # at the longest context, by which LongRoPE's factors are chosen
        rotary(torch.zeros(1, 8, 1), ids + model.config.max_position_embeddings - 8)
    else:
        model(ids)


def _their_experts(mlp: Any) -> tuple[int, int, bool] | None:
    if not hasattr(mlp, "experts"):
        return None
    router = mlp.router if hasattr(mlp, "router") else mlp.gate
    never = hasattr(router, "topk_method")  # DeepSeek-V2
    is_normalized = getattr(router, "norm_topk_prob", not never)
    return router.num_experts, router.top_k, is_normalized


def _ours(directory: Path, family: str, changes: dict[str, Any]) -> _Read:
    config_file = directory / "config.json"
    config_file.unlink(missing_ok=True)  # to write over it, ext4 first waits for the disk
    config_file.write_text(json.dumps(_raw(family, changes)))
    model = describe_model(directory)
    config = model.config
    attending = [layer for layer in range(config.num_layers) if layer not in config.delta_layers]
    has_no_full = config.window_rope is not None and None not in config.sliding_windows
    return _Read(
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        scale=(config.score_scale or config.head_dim**-0.5)
        if config.latent is None
        else config.latent.scale,
        rms_norm_eps=config.rms_norm_eps,
        biases=(config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm),
        tied=config.tie_word_embeddings,
        windows=tuple(config.sliding_windows[layer] for layer in attending),
        delta_nets=tuple(_our_delta_net(config, layer) for layer in range(config.num_layers)),
        positions=tuple(layer not in config.no_rope_layers for layer in attending),
        scales=(config.embedding_scale, config.residual_scale, config.logit_divisor),
        eos=model.eos_token_ids,
        frequencies=_our_frequencies(config),
        attention_factor=1.0 if has_no_full else config.rope.attention_factor,
        caps=(config.score_cap, config.logit_cap),
        experts=tuple(
            None
            if each is None
            else (each.num_experts, each.num_experts_per_tok, each.is_normalized)
            for each in map(config.experts_in, range(config.num_layers))
        ),
    )


def _our_frequencies(config: ModelConfig) -> tuple[float, ...]:
    ropes = [config.rope]
    if config.window_rope is not None:  # those that a layer has
        is_windowed = {window is not None for window in config.sliding_windows}
        both = ((False, config.rope), (True, config.window_rope))
        ropes = [rope for kind, rope in both if kind in is_windowed]
    found = [inverse_frequencies(rope, config.rope_dim).tolist() for rope in ropes]
    return tuple(each for own in found for each in own)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", CLASSES)
def test_equal_or_refused(tmp_path: Path, family: str) -> None:
    save_file({"x": torch.arange(8.0)}, tmp_path / "model.safetensors")
    wrong, num_equal = [], 0
    # A change is of one key, and who reads it is one function for all families: each third of them
    # has a third of the changes.
    for changes in CHANGES if IS_WHOLE else CHANGES[[*CLASSES].index(family) % 3 :: 3]:
        ours: _Read | ModelError
        try:
            ours = _ours(tmp_path, family, changes)
        except ModelError as refused:
            ours = refused
        if isinstance(ours, ModelError):
            if not _says_what(ours, changes):
                wrong.append((changes, f"does not name it: {ours}"))
            continue
        if (family, changes) in LENIENT:
            continue
        try:
            theirs = _theirs(family, changes)
        except Exception as refused:  # anything that the library or torch raises
            wrong.append((changes, f"transformers refuses: {refused!r}"[:200]))
            continue
        num_equal += 1
        wrong += [
            (changes, f"{field}: ours {one}, theirs {other}")
            for field in _Read.__dataclass_fields__
            if not _equal(field, one := getattr(ours, field), other := getattr(theirs, field))
        ]
    assert not wrong, "\n".join(f"{changes}: {what}" for changes, what in wrong)
    assert num_equal > 20


def _equal(field: str, ours: Any, theirs: Any) -> bool:
    if field in ("frequencies", "attention_factor", "scale"):
        # float32, in another order of operations
        return bool(ours == pytest.approx(theirs, rel=1e-5, abs=0))
    return bool(ours == theirs)


def _says_what(refused: ModelError, changes: dict[str, Any]) -> bool:
    inner = [key for value in changes.values() if isinstance(value, dict) for key in value]
    return any(key in refused.message for key in (*changes, *inner, "heads", "rope"))
