"""Presents a GGUF file as a Hugging Face directory, so that one reader understands both.

It reverses llama.cpp's `convert_hf_to_gguf.py` for names and settings. `gguf_values` reads the
values.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from disagg.errors import ModelError
from disagg.kernels.packed_sizes import Packing
from disagg.models.checkpoint import Header, StoredTensor
from disagg.models.families import FAMILIES
from disagg.models.family import Family
from disagg.models.gguf_file import BY_NAME, read_gguf
from disagg.models.gguf_tokenizer import end_of_turn, token_of, tokenizer_json

_FAMILIES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
# llama.cpp calls it olmo2, with a window.
_OLMO3 = "Olmo3ForCausalLM"
# Numbers of layers of the models whose score scale does not follow from the head size; files do not
# say it.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
# llama.cpp calls these llama, one with a window and one with experts.
_WINDOWED, _WITH_EXPERTS = "MistralForCausalLM", "MixtralForCausalLM"
_SIZES: Mapping[str, str] = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
# Settings that change the computation if they are set and not 0.
_NOT_COMPUTED = (
    "expert_group_count",
    "expert_weights_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
)
# All experts of a layer are in one tensor, one after the other.
_OF_ALL_EXPERTS: Mapping[str, Literal["gate", "up", "down"]] = {
    "ffn_gate_exps": "gate",
    "ffn_up_exps": "up",
    "ffn_down_exps": "down",
}
_SHARED: Mapping[str, str] = {
    "ffn_gate_shexp": "gate_proj",
    "ffn_up_shexp": "up_proj",
    "ffn_down_shexp": "down_proj",
}
_SOFTMAX = 1  # of `expert_gating_func`
_ROPE_FACTORS = "rope_freqs.weight"
# Of every llama3 scaling that Meta published. The factor itself is the largest value in the file.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SAMPLING: Mapping[str, str] = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# The names of tensors: llama.cpp's, and those of transformers.
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_A__LAYER: Mapping[str, str] = {
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
_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True)
class GgufStored(StoredTensor):
    """A tensor in a GGUF file, as transformers would store it.

    Attributes:
        num_paired_heads: number of heads whose rows are in llama.cpp's order, in which the two rows
            of a RoPE pair are adjacent; 0: in transformers' order, one half after the other.
        is_plus_one: whether it is the weight of a norm, and transformers stores it minus one.
    """

    num_paired_heads: int = 0
    is_plus_one: bool = False

    @property
    def packing(self) -> Packing | None:
        return BY_NAME[self.dtype].packing


def gguf_families() -> frozenset[str]:
    """The families that are also supported as GGUF files."""
    return frozenset(_FAMILIES.values()) | {_WINDOWED, _WITH_EXPERTS, _OLMO3}


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file in a directory; None if there is none. Raises `ModelError` for several."""
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(
            f"{directory} holds {len(files)} GGUF files"
            f" ({', '.join(file.name for file in files[:8])}); give the path of one"
        )
    return files[0] if files else None


class GgufFiles:
    """The files that a Hugging Face directory with the same model would have.

    Raises `ModelError` for a GGUF file that is not supported.
    """

    has_weights = True

    def __init__(self, file: Path) -> None:
        self.place = file
        self._header = read_gguf(file)
        self._settings = self._header.settings
        self._architecture = str(self._settings.get("general.architecture"))
        if self._architecture not in _FAMILIES:
            raise ModelError(
                f"{file} describes a model of architecture {self._architecture!r}; supported are"
                f" {', '.join(_FAMILIES)}"
            )
        if self._settings.get("split.count", 0) not in (0, 1):
            raise ModelError(
                f"{file} is one of {self._settings['split.count']} parts of a model; join them with"
                " llama.cpp's `llama-gguf-split --merge`"
            )

    @property
    def name(self) -> str:
        return self.place.stem

    def named(self, file: str) -> Path:
        return self.place

    def read(self, name: str) -> str | None:
        """The contents of the file with this name; None if the GGUF file has nothing for it."""
        with _reading_settings(self.place):
            contents = self._contents(name)
        return None if contents is None else json.dumps(contents, ensure_ascii=False)

    def _contents(self, name: str) -> Any:
        contents: Any = None
        if name == "config.json":
            contents = self._config
        elif name == "tokenizer.json":
            contents = tokenizer_json(self._settings, self.place)
        elif name == "tokenizer_config.json":
            roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
            contents = {"chat_template": self._settings.get("tokenizer.chat_template")}
            for role, gguf_role in roles.items():
                token = token_of(self._settings, gguf_role, self.place)
                if token is not None:
                    contents[f"{role}_token"] = token[1]
        elif name == "generation_config.json":
            contents = {key: self._settings.get(f"general.sampling.{_SAMPLING[key]}")
                        for key in _SAMPLING}  # fmt: skip
        return contents

    def headers(self) -> dict[Path, Header]:
        tensors: dict[str, StoredTensor] = {}
        with _reading_settings(self.place):
            for name, tensor in self._header.tensors.items():
                if name != _ROPE_FACTORS:
                    tensors.update(self._stored(name, tensor))
        return {self.place: Header(self._header.raw, tensors)}

    def _stored(self, name: str, tensor: StoredTensor) -> Iterator[tuple[str, GgufStored]]:
        """The tensors by transformers' names. An unknown name is kept, and refused later."""
        found = _LAYER.fullmatch(name)
        place, kind = (found[2], found[3]) if found is not None else ("", "")
        family, layer = FAMILIES[self._family], f"model.layers.{found[1]}" if found else ""
        experts = family.experts
        shape, begin, end = tensor.shape, tensor.begin, tensor.end
        if experts is not None and place in _OF_ALL_EXPERTS and len(shape) == 3:
            nbytes = (end - begin) // shape[0]
            pattern: str = getattr(experts, _OF_ALL_EXPERTS[place])
            for index in range(shape[0]):
                own = begin + index * nbytes
                expert = GgufStored(self.place, tensor.dtype, shape[1:], own, own + nbytes)
                yield f"{layer}.{pattern.format(index)}.{kind}", expert
            return
        paired, new_name = 0, _hf_name(name, family)
        if experts is not None and place == "ffn_gate_inp":
            new_name = f"{layer}.{experts.router}.{kind}"
        elif experts is not None and place == "ffn_gate_inp_shexp":
            new_name, shape = f"{layer}.{experts.shared_gate}.{kind}", (1, shape[-1])
        elif experts is not None and place in _SHARED:
            new_name = f"{layer}.{experts.shared}.{_SHARED[place]}.{kind}"
        elif self._architecture == "llama" and place == "attn_q":
            paired = self._config["num_attention_heads"]
        elif self._architecture == "llama" and place == "attn_k":
            paired = self._config["num_key_value_heads"]
        is_plus_one = family.norms_less_one and new_name.endswith("norm.weight")
        stored = GgufStored(self.place, tensor.dtype, shape, begin, end, paired, is_plus_one)
        yield new_name, stored

    def _setting(self, name: str, default: Any = None) -> Any:
        return self._settings.get(f"{self._architecture}.{name}", default)

    @cached_property
    def _config(self) -> dict[str, Any]:
        for name in _NOT_COMPUTED:
            if self._setting(name):
                raise self._unsupported(name)
        config = {key: self._setting(name) for key, name in _SIZES.items()}
        missing = [f"{self._architecture}.{_SIZES[key]}" for key in config if config[key] is None]
        tensors = self._header.tensors
        table = tensors.get("token_embd.weight")
        if missing or table is None:
            raise ModelError(f"{self.place} has no {', '.join(missing) or 'token_embd.weight'}")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        for key in ("num_attention_heads", "hidden_size"):
            if not isinstance(config[key], int) or config[key] < 1:
                raise self._unsupported(_SIZES[key])
        head_dim = self._setting("attention.key_length", hidden // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._setting(name, head_dim) != head_dim:
                raise self._unsupported(name)
        ends = [token_of(self._settings, role, self.place) for role in ("eos", "eot", "eom")]
        ends.append(end_of_turn(self._settings))
        return config | {
            "architectures": [self._family],
            **self._experts,
            **self._windows,
            **self._gemma(heads, hidden, head_dim),
            "num_key_value_heads": self._setting("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": table.shape[0],
            "dtype": _DTYPES.get(self._main_dtype, "bfloat16"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "qkv_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "rope_theta": self._setting("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "eos_token_id": list(dict.fromkeys(each[0] for each in ends if each is not None)),
        }

    @property
    def _windows(self) -> dict[str, Any]:
        """The keys of config.json for windows. Without a pattern, the family's default counts."""
        window = self._setting("attention.sliding_window") or None
        if FAMILIES[self._family].windows != "alternating":
            if window and self._architecture != "llama":
                raise self._unsupported("attention.sliding_window")
            return {"sliding_window": window}
        pattern = self._setting("attention.sliding_window_pattern")
        if type(pattern) is int:
            layers = range(1, self._setting(_SIZES["num_hidden_layers"]) + 1)
            pattern = [layer % pattern > 0 for layer in layers]
        names = ("full_attention", "sliding_attention")
        kinds = None if pattern is None else [names[bool(each)] for each in pattern]
        return {"sliding_window": window, "layer_types": kinds}

    def _gemma(self, heads: int, hidden: int, head_dim: int) -> dict[str, Any]:
        """The keys of config.json for Gemma 2 and later, with llama.cpp's defaults."""
        if "query_pre_attn_scalar" not in FAMILIES[self._family].defaults:
            return {}
        num_layers = self._setting(_SIZES["num_hidden_layers"])
        is_by_hidden = num_layers == _SCALED_BY_HIDDEN[self._architecture]
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        return {
            "query_pre_attn_scalar": hidden // heads if is_by_hidden else head_dim,
            "rope_local_base_freq": self._setting("rope.freq_base_swa", 10_000.0),
            **{key: self._setting(key) for key in caps if self._setting(key) is not None},
        }

    @property
    def _family(self) -> str:
        if self._architecture == "olmo2" and self._setting("attention.sliding_window"):
            return _OLMO3
        if self._architecture != "llama":
            return _FAMILIES[self._architecture]
        if self._setting("expert_count"):
            return _WITH_EXPERTS
        return _WINDOWED if self._setting("attention.sliding_window") else "LlamaForCausalLM"

    @property
    def _experts(self) -> dict[str, Any]:
        """The keys of config.json for families with experts, with the sizes of the first layer."""
        if FAMILIES[self._family].experts is None:
            return {}
        if self._setting("expert_gating_func", _SOFTMAX) != _SOFTMAX:
            raise self._unsupported("expert_gating_func")
        tensors = self._header.tensors
        gate, shared = (
            tensors.get(f"blk.0.{name}.weight") for name in ("ffn_gate_exps", "ffn_gate_shexp")
        )
        if gate is None or len(gate.shape) != 3:
            raise ModelError(
                f"{self.place} has no tensor blk.0.ffn_gate_exps.weight with all experts"
            )
        return {
            "num_experts": self._setting("expert_count"),
            "num_experts_per_tok": self._setting("expert_used_count"),
            "moe_intermediate_size": gate.shape[1],
            "shared_expert_intermediate_size": None if shared is None else shared.shape[0],
            # llama.cpp computes them so, whatever a file says.
            "norm_topk_prob": self._architecture == "qwen3moe",
        }

    @property
    def _main_dtype(self) -> str:
        """The type of the first layer's matrices. Norms are always F32."""
        found = self._header.tensors.get("blk.0.attn_q.weight")
        return found.dtype if found is not None else ""

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        kind = self._setting("rope.scaling.type", "none")
        factors = self._header.tensors.get(_ROPE_FACTORS)
        if kind == "longrope" or (factors is not None and kind != "none"):
            raise self._unsupported("rope.scaling.type")
        if factors is not None:
            return self._llama3(factors, head_dim)
        if kind == "none":
            return None
        if self._setting("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self._unsupported("rope.scaling.attn_factor")
        scaling = {"rope_type": kind, "factor": self._setting("rope.scaling.factor")}
        original = self._setting("rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _llama3(self, tensor: StoredTensor, head_dim: int) -> dict[str, Any] | None:
        """The llama3 scaling. A file has only the divisor of each frequency, so it is derived."""
        if tensor.dtype != "F32" or tensor.shape != (head_dim // 2,):
            raise ModelError(f"{self.place}: {_ROPE_FACTORS} is not {head_dim // 2} values of F32")
        with self.place.open("rb") as opened:
            opened.seek(tensor.begin)
            found = struct.unpack(f"<{head_dim // 2}f", opened.read(tensor.end - tensor.begin))
        if set(found) == {1.0}:
            return None
        factor = round(max(found), 3)  # the file has a quotient in float32
        scaling = {**_LLAMA3, "factor": factor}
        wanted = _llama3_factors(self._setting("rope.freq_base", 10_000.0), head_dim, factor)
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)):
            raise ModelError(
                f"{self.place}: the frequencies in {_ROPE_FACTORS} are not those of Llama 3.1"
                " (llama3 with 8,192 original positions), and no others are supported"
            )
        return scaling

    def _unsupported(self, name: str) -> ModelError:
        return ModelError(
            f"{self.place}: {self._architecture}.{name} is {self._setting(name)!r}, which is not"
            " supported"
        )


@contextmanager
def _reading_settings(file: Path) -> Iterator[None]:
    """Raise `ModelError` for a setting of the wrong type, which is found only when it is used."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(f"{file} is damaged: its settings do not fit together: {error}") from error


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    low, high = 1.0, 4.0
    divisors = []
    for index in range(0, head_dim, 2):
        turns = 8192 / (2 * math.pi * theta ** (index / head_dim))  # in the original positions
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


def _hf_name(name: str, family: Family) -> str:
    """The transformers name of a tensor. An unknown tensor keeps its name, and is refused later."""
    outer, _, kind = name.rpartition(".")
    if outer in _OUTER:
        return f"{_OUTER[outer]}.{kind}"
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    place = _OF_A__LAYER.get(found[2])
    if found[2] == "ffn_norm":  # the norm before the MLP, whose name depends on the family
        around = family.norms == "around"
        place = "pre_feedforward_layernorm" if around else "post_attention_layernorm"
    return name if place is None else f"model.layers.{found[1]}.{place}.{found[3]}"
