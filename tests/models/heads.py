"""Small random heads in the public layouts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

KEPT = [1, 0, 1]  # layers whose inputs the head reads, if it is as for a model of two layers


def write_eagle3(
    place: Path,
    model: Path,
    *,
    num_draft_tokens: int = 0,
    has_embedding: bool = False,
    tensors: dict[str, NDArray[Any]] | None = None,
    **changes: Any,
) -> Path:
    """An EAGLE-3 head of a model, as the authors of EAGLE save one.

    Args:
        num_draft_tokens: tokens that it knows, every second one of the model's; 0: all.
        tensors: more tensors, or others.
        changes: of its configuration.
    """
    of_model = json.loads((model / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": of_model["hidden_size"],
        "vocab_size": of_model["vocab_size"],
        "draft_vocab_size": num_draft_tokens or of_model["vocab_size"],
        "intermediate_size": 56,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": KEPT,
        **changes,
    }
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (
        config[f"num_{of}_heads"] * config["head_dim"] for of in ("attention", "key_value")
    )
    layer = "midlayer"
    shapes = {
        "fc": (hidden, 3 * config.get("target_hidden_size", hidden)),
        f"{layer}.self_attn.q_proj": (heads, 2 * hidden),
        f"{layer}.self_attn.k_proj": (kv_heads, 2 * hidden),
        f"{layer}.self_attn.v_proj": (kv_heads, 2 * hidden),
        f"{layer}.self_attn.o_proj": (hidden, heads),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
        f"{layer}.input_layernorm": (hidden,),
        f"{layer}.hidden_norm": (hidden,),
        f"{layer}.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
        "lm_head": (config["draft_vocab_size"], hidden),
    }
    if has_embedding:
        shapes["embed_tokens"] = config["vocab_size"], hidden
    weights: dict[str, NDArray[Any]] = {
        f"{name}.weight": each for name, each in _drawn(shapes, 3).items()
    }
    if num_draft_tokens:
        known = np.zeros(config["vocab_size"], bool)
        known[: 2 * num_draft_tokens : 2] = True
        weights |= {"d2t": np.arange(num_draft_tokens), "t2d": known}
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    save_file({**weights, **(tensors or {})}, place / "model.safetensors", {"format": "pt"})
    return place


def write_medusa(
    place: Path,
    model: Path,
    *,
    num_heads: int = 3,
    num_known: int = 0,
    is_authors: bool = False,
    tensors: dict[str, NDArray[Any]] | None = None,
    **changes: Any,
) -> Path:
    """Medusa heads of two blocks each for a model, as vLLM reads them.

    Args:
        num_known: tokens that they know, every second one of the model's; 0: all.
        is_authors: as the authors of Medusa save them, with biases.
        tensors, changes: as of `write_eagle3`.
    """
    of_model = json.loads((model / "config.json").read_text())
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": of_model["hidden_size"],
        "vocab_size": of_model["vocab_size"],
        "num_heads": num_heads,
        "num_hidden_layers": 2,
        **changes,
    }
    if is_authors:
        config = {"medusa_num_heads": num_heads, "medusa_num_layers": 2, **changes}
    hidden, num_rows = of_model["hidden_size"], num_known or of_model["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for i, j in itertools.product(range(num_heads), range(2)):
        block = f"{i}.{j}.linear" if is_authors else f"blocks.{i}.layers.{j}"
        shapes |= {f"{block}.weight": (hidden, hidden)}
        shapes |= {f"{block}.bias": (hidden,)} if is_authors else {}
        shapes[f"{i}.2.weight" if is_authors else f"lm_heads.{i}.weight"] = num_rows, hidden
    weights: dict[str, NDArray[Any]] = {**_drawn(shapes, 7)}
    if num_known:
        weights["token_map"] = np.arange(0, 2 * num_known, 2)
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    file = "medusa_lm_head.safetensors" if is_authors else "model.safetensors"
    save_file({**weights, **(tensors or {})}, place / file, {"format": "pt"})
    return place


def add_mtp_layer(model: Path) -> Path:
    """Give a model of three layers another one for the token after the next, as GLM-4.5 and
    DeepSeek-V3 have it. Its block is that of the third layer."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    weights, hidden = load_file(model / "model.safetensors"), config["hidden_size"]
    block = {name: each for name, each in weights.items() if name.startswith("model.layers.2.")}
    weights |= {name.replace("layers.2.", "layers.3."): each for name, each in block.items()}
    shapes = {
        "eh_proj": (hidden, 2 * hidden),
        **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,)),
    }
    for name, each in _drawn(shapes, 5).items():
        weights[f"model.layers.3.{name}.weight"] = each
    for name in ("embed_tokens", "shared_head.head"):
        weights[f"model.layers.3.{name}.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def _drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, NDArray[np.float32]]:
    """Matrices with values around 0, and norms around 1."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.normal(0, 0.3, shape) + (len(shape) == 1) for name, shape in shapes.items()}
    return {name: each.astype(np.float32) for name, each in drawn.items()}
