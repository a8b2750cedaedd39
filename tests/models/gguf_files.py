"""GGUF files of small models, written by the `gguf` library as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from disagg.models.families import FAMILIES

ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Mixtral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen2Moe": "qwen2moe",
    "Qwen3Moe": "qwen3moe",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Olmo2": "olmo2",
    "Olmo3": "olmo2",
}
# Norms that several families call post_attention_layernorm, before the MLP or after attention.
OTHER_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
WITH_PLAIN_NORMS = {name for name, each in FAMILIES.items() if each.norms == "before"}
BYTES = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
BYTES += [chr(256 + number) for number in range(256 - len(BYTES))]
MERGES = ["1 2", "12 3", "123 4", "Ġ t", "Ġt h", "e Ì", "o u", "Ġ Ġ"]
END, ROLE, TOOL = "<|end|>", "<|role|>", "<tool>"


def vocabulary() -> dict[str, Any]:
    """Settings of a byte-level tokenizer: bytes, merges, two control tokens and a plain one."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), END, ROLE, TOOL, "[PAD0]"]
    kinds = [1] * (len(tokens) - 4) + [3, 3, 4, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": tokens.index(END),
        "tokenizer.ggml.bos_token_id": tokens.index(ROLE),
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


def write_gguf(
    file: Path,
    model: Any,
    *,
    settings: Mapping[str, Any] | None = None,
    kind: Type = Type.F32,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a model of transformers.

    Args:
        settings: more of them, with their full names; None as a value leaves one out.
        kind: of all matrices; vectors are F32.
        extra: more tensors, as float32.
    """
    family = type(model).__name__.removesuffix("ForCausalLM")
    writer = gguf.GGUFWriter(file, ARCHITECTURES[family])
    for name, value in {**_settings(model, family), **(settings or {})}.items():
        if value is not None:
            _add(writer, name, value)
    for name, tensor in _apart(model.state_dict()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        outer, _, end = name.rpartition(".")
        if outer.startswith("model.layers."):
            layer, outer = outer.removeprefix("model.layers.").split(".", 1)
            names = NAMES if f"{family}ForCausalLM" in WITH_PLAIN_NORMS else NAMES | OTHER_NORMS
            theirs = f"blk.{layer}.{names.get(outer, outer)}.{end}"
        else:
            theirs = f"{NAMES[outer]}.{end}"
        if ARCHITECTURES[family] == "llama" and outer in ("self_attn.q_proj", "self_attn.k_proj"):
            values = _paired(values, values.shape[0] // _head_dim(model.config))
        if theirs.endswith("ffn_gate_inp_shexp.weight"):
            values = values[0]
        if family.startswith("Gemma") and name.endswith("norm.weight"):
            values = values + 1.0
        stored = kind if values.ndim > 1 else Type.F32
        raw = gguf.quants.quantize(np.ascontiguousarray(values), stored)
        writer.add_tensor(theirs, raw, raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _apart(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Gate and up of all experts, which transformers keeps in one tensor, in one each."""
    for name, tensor in state.items():
        place = name.rpartition(".mlp.experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            for their, half in zip(
                ("ffn_gate_exps", "ffn_up_exps"), tensor.chunk(2, 1), strict=True
            ):
                yield f"{place}.{their}.weight", half
        elif name.endswith("experts.down_proj"):
            yield f"{place}.ffn_down_exps.weight", tensor
        else:
            yield name, tensor


def _settings(model: Any, family: str) -> dict[str, Any]:
    config, prefix = model.config, ARCHITECTURES[family]
    rope = config.rope_parameters
    windowed = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    head_dim = _head_dim(config)
    said = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope["rope_theta"],
    }
    is_mixed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if family == "Mistral" or is_mixed:
        said["attention.sliding_window"] = config.sliding_window
    if is_mixed:
        said["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config.layer_types
        ]
    if windowed is not None and windowed["rope_theta"] != rope["rope_theta"]:
        said["rope.freq_base_swa"] = windowed["rope_theta"]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None) is not None:
            said[cap] = getattr(config, cap)
    if (num_experts := getattr(config, "num_experts", None)) is not None:
        said["expert_count"] = num_experts
        said["expert_used_count"] = config.num_experts_per_tok
    if rope["rope_type"] in ("linear", "yarn"):
        said["rope.scaling.type"] = rope["rope_type"]
        said["rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        said["rope.scaling.original_context_length"] = original
    return {**{f"{prefix}.{key}": value for key, value in said.items()}, **vocabulary()}


def _head_dim(config: Any) -> int:
    stated: int | None = getattr(config, "head_dim", None)
    return stated or config.hidden_size // config.num_attention_heads


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        assert isinstance(value, Sequence)
        writer.add_array(name, value)


def _paired(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter turns the rows of q and k: each beside its partner."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
