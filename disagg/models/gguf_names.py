"""Maps the tensor names of GGUF files to those of transformers. Knows no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from disagg.models.family import Family

LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_A_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_name(name: str, family: Family) -> str:
    """The transformers name of a tensor. An unknown tensor keeps its name, and is refused later."""
    outer, _, kind = name.rpartition(".")
    if outer in _OUTER:
        return f"{_OUTER[outer]}.{kind}"
    found = LAYER.fullmatch(name)
    if found is None:
        return name
    place = _OF_A_LAYER.get(found[2])
    if found[2] == "ffn_norm":  # the norm before the MLP, whose name depends on the family
        around = family.norms == "around"
        place = "pre_feedforward_layernorm" if around else "post_attention_layernorm"
    return name if place is None else f"model.layers.{found[1]}.{place}.{found[3]}"
