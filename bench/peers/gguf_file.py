"""Writes a Llama checkpoint of transformers as GGUF. Runs in environments that have `gguf`."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write(checkpoint: Path, file: Path) -> Path:
    """Weights stay bf16, but for the norms, which llama.cpp wants in float32. No tokenizer."""
    from gguf import GGMLQuantizationType, GGUFWriter

    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, bits in _tensors(checkpoint / "model.safetensors"):
        new_name = _new_name(name)
        kind = new_name.split(".")[-2]
        if kind in num_heads:
            bits = _interleaved(bits, num_heads[kind])
        if bits.ndim == 1:
            writer.add_tensor(new_name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(new_name, bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Names and bf16 values as 16 bits each, which numpy has no type for."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    start = 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{name} is {entry['dtype']} and not BF16")
        first, end = entry["data_offsets"]
        bits = np.fromfile(file, np.uint16, (end - first) // 2, offset=start + first)
        yield name, bits.reshape(entry["shape"])


def _new_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    kind, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[kind]}.{suffix}"


def _interleaved(bits: Any, num_heads: int) -> Any:
    """Rows of a head in llama.cpp's order: the pairs that rotate together are neighbours."""
    rows, columns = bits.shape
    pairs = bits.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
