"""A small random checkpoint with a real tokenizer and chat template.

Written without transformers and torch, whose imports take two seconds of each process of tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from disagg.config import ServeConfig, TierConfig
from disagg.kvtransfer.local_transport import LocalFleet
from disagg.time_model import StepTimeModel
from disagg.worker.parts import Parts, build_parts

_ATTENTION = (("q", 64), ("k", 32), ("v", 32))  # rows of its matrices
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Of a mixture, in which a token multiplies as much as in a dense MLP of 1536.
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_tiny_model(
    directory: Path,
    *,
    max_model_len: int = 512,
    seed: int = 10,
    inner: int = 1536,
    has_experts: bool = False,
    window: int | None = None,
) -> Path:
    """A Qwen3 in float32 whose vocabulary is the 256 bytes and three special tokens.

    Small, but with prompts that cost more than to hand their KV over: routers send them to prefill
    workers of `tiny_parts`. Hence few layers, as each has KV, and wide ones, which cost most.

    Args:
        inner: width of an MLP; a narrow one is enough where nothing is routed.
        window: what the second layer sees, so that its KV is a group of its own; None: all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end_id = write_tiny_tokenizer(directory)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": 260,
        "hidden_size": 128,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": True,
        "eos_token_id": end_id,
        **(EXPERTS if has_experts else {}),
        **(windowed(window) if window is not None else {}),
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end_id}))
    write_module(directory, "Pooling", pooling_mode_lasttoken=True)
    save_file(
        _tiny_weights(seed, inner, has_experts), directory / "model.safetensors", {"format": "pt"}
    )
    return directory


def windowed(window: int) -> dict[str, Any]:
    """Keys of config.json with which only the first of two layers sees all."""
    kinds = ["full_attention", "sliding_attention"]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def write_module(directory: Path, kind: str, **settings: Any) -> None:
    """Say what the model computes instead of answers, as Sentence Transformers saves it."""
    modules = [{"type": "m.Transformer", "path": ""}, {"type": f"m.{kind}", "path": f"1_{kind}"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / f"1_{kind}").mkdir(exist_ok=True)
    (directory / f"1_{kind}" / "config.json").write_text(json.dumps(settings))


def _tiny_weights(seed: int, inner: int, has_experts: bool) -> dict[str, NDArray[np.float32]]:
    """By Hugging Face's names; all norms are 1."""
    drawn = {"model.embed_tokens": (260, 128)}
    norms = {"model.norm": 128}
    for layer in ("model.layers.0", "model.layers.1"):
        drawn |= {f"{layer}.self_attn.{name}_proj": (rows, 128) for name, rows in _ATTENTION}
        places = {f"{layer}.mlp": inner}
        if has_experts:
            places = {f"{layer}.mlp.experts.{expert}": 768 for expert in range(3)}
            drawn |= {f"{layer}.mlp.gate": (3, 128)}
        for place, rows in places.items():
            drawn |= {f"{place}.{name}_proj": (rows, 128) for name in ("gate", "up")}
        drawn |= {f"{layer}.self_attn.o_proj": (128, 64)}
        drawn |= {f"{place}.down_proj": (128, rows) for place, rows in places.items()}
        norms |= {f"{layer}.{name}_layernorm": 128 for name in ("input", "post_attention")}
        norms |= {f"{layer}.self_attn.{name}_norm": 16 for name in ("q", "k")}
    rng = np.random.default_rng(seed)
    # Far from uniform, so that a wrong KV block changes the answer.
    weights = {name: rng.normal(0, 0.3, shape) for name, shape in drawn.items()}
    weights |= {name: np.ones(size) for name, size in norms.items()}
    return {f"{name}.weight": each.astype(np.float32) for name, each in weights.items()}


def write_tiny_adapter(
    adapter: Path, merged: Path, model: Path, *, seed: int, rank: int = 4
) -> None:
    """A LoRA adapter of a tiny model as PEFT saves one, and the model with its products added."""
    rng, scale = np.random.default_rng(seed), 2.0
    weights = load_file(model / "model.safetensors")
    matrices: dict[str, NDArray[np.float32]] = {}
    for name in [each for each in weights if "_proj" in each]:
        num_out, num_in = weights[name].shape
        a = rng.normal(0, 0.1, (rank, num_in)).astype(np.float32)
        b = rng.normal(0, 0.3, (num_out, rank)).astype(np.float32)
        place = f"base_model.model.{name.removesuffix('.weight')}"
        matrices |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
        product = scale * b.astype(np.float64) @ a.astype(np.float64)
        weights[name] = (weights[name] + product).astype(np.float32)
    adapter.mkdir(parents=True, exist_ok=True)
    save_file(matrices, adapter / "adapter_model.safetensors", {"format": "pt"})
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(model, merged, dirs_exist_ok=True)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})


def tiny_parts() -> Callable[..., Parts]:
    """Builds workers of one cluster in this process.

    They do not believe their first steps, whose times say how busy this machine was just then: one
    that seemed twice as slow as the others would get no prompt.
    """
    fleet = LocalFleet()

    def build(
        config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int, **options: Any
    ) -> Parts:
        built = build_parts(config, tier, worker_id, epoch, fleet, **options)
        return replace(built, first_times=StepTimeModel())

    return build


def write_tiny_adapters(place: Path, names: Iterable[str], window: int | None = None) -> Path:
    """A model `tiny`, adapters with these names, and the model with each of them merged."""
    write_tiny_model(place / "tiny", window=window)
    for seed, name in enumerate(names):
        write_tiny_adapter(place / name, place / f"merged-{name}", place / "tiny", seed=seed)
    return place


def write_tiny_tokenizer(directory: Path) -> int:
    """The model's tokenizer and chat template alone. Returns the token that ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return len(vocab) + 1
