"""A GGUF file is the model that it was made from: numbers, values, tokens, template, ends."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from disagg.api.served_model import ServedModel
from disagg.config import TierConfig
from disagg.errors import ModelError
from disagg.models.description import describe_model
from disagg.models.gguf_file import BLOCKS
from disagg.models.parts import check_weights
from disagg.models.rope import RopeConfig
from disagg.models.weights import load_weights
from disagg.text.tokenizer import Tokenizer
from tests.models.checkpoints import write_checkpoint
from tests.models.gguf_files import END, ROLE, TOOL, vocabulary, write_gguf

CPU = torch.device("cpu")


def small_model(**changes: Any) -> Any:
    """A Llama whose rows are whole blocks of every type."""
    shape = {
        "vocab_size": 267,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(
        **{**shape, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config)


# Each family that GGUF has; `test_popular` writes them into docs/reference/models.md.
OF_FAMILIES = [
    "llama",
    "llama-yarn",
    "llama-linear-no-groups",
    "mistral-sliding",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "gemma",
    "gemma2-windows-named",
    "gemma3-odd",
    "olmo2-yarn",
    "olmo3",
]


@pytest.mark.parametrize("variant", OF_FAMILIES)
def test_numbers_and_values_are_those_of_the_directory(variant: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "there", variant)
    theirs = describe_model(checkpoint.directory)
    ours = describe_model(write_gguf(tmp_path / "model.gguf", checkpoint.model))
    for field in theirs.config.__dataclass_fields__:
        wanted = getattr(theirs.config, field)
        if field == "rms_norm_eps":  # the file has 32 bits of it
            assert math.isclose(ours.config.rms_norm_eps, wanted, rel_tol=1e-7)
        else:
            assert getattr(ours.config, field) == wanted, field
    assert ours.num_parameters == theirs.num_parameters
    check_weights(ours)
    mine, wanted = (load_weights(each, torch.float32, CPU) for each in (ours, theirs))
    assert torch.equal(mine.embedding, wanted.embedding)
    assert torch.equal(mine.lm_head, wanted.lm_head)
    for layer, other in zip(mine.layers, wanted.layers, strict=True):
        for field in layer.__dataclass_fields__:
            one, two = getattr(layer, field), getattr(other, field)
            assert one is two is None or torch.equal(one, two), field
    assert torch.equal(mine.norm, wanted.norm)


def test_biases_and_tied_tables(tmp_path: Path) -> None:
    model = small_model(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0)
    described = describe_model(write_gguf(tmp_path / "model.gguf", model))
    assert described.config.output_bias and described.config.mlp_bias
    weights = load_weights(described, torch.float32, CPU)
    assert weights.lm_head is weights.embedding
    [layer] = weights.layers
    state = model.state_dict()
    biases = [state[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]
    assert layer.qkv_bias is not None and torch.equal(layer.qkv_bias, torch.cat(biases))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Type.F16, torch.float16), (Type.BF16, torch.bfloat16)]
)
def test_matrices_of_16_bits(kind: Type, dtype: torch.dtype, tmp_path: Path) -> None:
    """Those of fewer are in `test_quantized_weights`."""
    model = small_model()
    described = describe_model(write_gguf(tmp_path / "model.gguf", model, kind=kind))
    assert described.config.dtype == str(dtype).removeprefix("torch.")
    [layer] = load_weights(described, torch.float32, CPU).layers
    for name, found in (("self_attn.o_proj", layer.output), ("mlp.down_proj", layer.down)):
        wanted = model.state_dict()[f"model.layers.0.{name}.weight"]
        assert torch.equal(found, wanted.to(dtype).float())


def test_blocks_are_as_long_as_the_library_says() -> None:
    for number, block in BLOCKS.items():
        assert Type(number).name == block.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (block.num_values, block.nbytes)


def test_llama_3_1_is_known_by_its_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = small_model(rope_parameters=rope, max_position_embeddings=16384)
    turns = model.model.rotary_emb.inv_freq.numpy()
    plain = 5e5 ** (-np.arange(0, 64, 2, dtype=np.float32) / 64)
    factors = (plain / turns).astype(np.float32)
    file = write_gguf(tmp_path / "model.gguf", model, extra={"rope_freqs.weight": factors})
    described = describe_model(file)
    assert described.config.rope == RopeConfig.from_hf({"rope_scaling": rope}, 16384)
    check_weights(described)
    factors[20] *= 1.1
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not those of Llama 3\.1"):
        describe_model(write_gguf(file, model, extra={"rope_freqs.weight": factors}))


TEXTS = {  # how "1234 the" is cut: by the rule's digits
    "gpt-2": ["1234", "Ġth", "e"],
    "smollm": ["1", "2", "3", "4", "Ġth", "e"],
    "qwen2": ["1", "2", "3", "4", "Ġth", "e"],
    "llama-bpe": ["123", "4", "Ġth", "e"],
}


@pytest.mark.parametrize("rule", TEXTS)
def test_text_is_cut_by_the_rule_of_the_file(rule: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", small_model(), settings={"tokenizer.ggml.pre": rule})
    tokenizer = Tokenizer.from_json(describe_model(file).read_tokenizer(), "m")
    ids = tokenizer.encode("1234 the", add_special_tokens=True)
    begins_with = [ROLE] if rule == "llama-bpe" else []
    assert [tokenizer.core.id_to_token(each) for each in ids] == begins_with + TEXTS[rule]
    mixed = f"été\n\n  ou 🙂{TOOL}{END}"
    ids = tokenizer.encode(mixed, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == mixed
    assert tokenizer.decode(ids) == mixed.removesuffix(END)
    # A decomposed letter is composed first where the model's own tokenizer does so.
    composed = tokenizer.encode("e\u0301", add_special_tokens=False)
    assert (composed == tokenizer.encode("é", add_special_tokens=False)) == (rule == "qwen2")


def test_template_ends_and_name(tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.eot_token_id": 7, "general.sampling.temp": 0.5}
    file = write_gguf(tmp_path / "my-model.gguf", small_model(), settings=settings)
    for place in (file, tmp_path):
        described = describe_model(TierConfig(model=str(place)).directory)
        assert described.name == "my-model"
    assert TierConfig(model=str(file)).name == "my-model"
    assert described.eos_token_ids == (vocabulary()["tokenizer.ggml.eos_token_id"], 7)
    assert described.defaults.temperature == 0.5
    served = ServedModel.from_description(described, name="m", block_size=16)
    assert served.template is not None
    assert served.template.render([{"role": "user", "content": "hello"}]) == f"{ROLE}hello"


def test_an_end_of_turn_is_found_by_its_text(tmp_path: Path) -> None:
    """As Gemma's files have it, of which some name only another end."""
    tokens = vocabulary()["tokenizer.ggml.tokens"]
    tokens[9] = "<end_of_turn>"
    settings = {"tokenizer.ggml.tokens": tokens}
    described = describe_model(write_gguf(tmp_path / "m.gguf", small_model(), settings=settings))
    assert described.eos_token_ids == (vocabulary()["tokenizer.ggml.eos_token_id"], 9)


def test_contents_have_one_fingerprint(tmp_path: Path) -> None:
    model = small_model()
    first = describe_model(write_gguf(tmp_path / "m.gguf", model)).fingerprint
    assert describe_model(tmp_path / "m.gguf").fingerprint == first
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert describe_model(write_gguf(tmp_path / "m.gguf", model)).fingerprint != first


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, r"has no tensor blk\.0\.ffn_gate_exps\.weight with"),
    "groups": ({"llama.expert_group_count": 4}, r"llama\.expert_group_count is 4"),
    "part of a head": ({"llama.rope.dimension_count": 32}, r"rope\.dimension_count is 32"),
    "no layers": ({"llama.block_count": None}, r"has no llama\.block_count"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type is 'longrope'"),
    "architecture": ({"general.architecture": "phi3"}, "'phi3'; supported are llama, qwen2"),
    "parts": ({"split.count": 3}, "one of 3 parts"),
    "a token": ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str, tmp_path: Path) -> None:
    settings, words = REFUSED[case]
    file = write_gguf(tmp_path / "m.gguf", small_model(), settings=settings)
    with pytest.raises(ModelError, match=words):
        describe_model(file)


@pytest.mark.parametrize("key", ["model", "pre"])
def test_another_tokenizer_is_refused_by_name(key: str, tmp_path: Path) -> None:
    settings = {f"tokenizer.ggml.{key}": "strange"}
    file = write_gguf(tmp_path / "m.gguf", small_model(), settings=settings)
    with pytest.raises(ModelError, match=r"'strange'.*supported are.*gpt-2, smollm, llama-bpe"):
        describe_model(file).read_tokenizer()


def _another_type(raw: bytes) -> bytes:
    at = raw.index(b"blk.0.attn_v.weight") + len(b"blk.0.attn_v.weight") + 4 + 2 * 8
    return raw[:at] + struct.pack("<I", 39) + raw[at + 4 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no GGUF": (lambda raw: b"PK" + raw, "is not a GGUF file; a model is"),
    "empty": (lambda raw: b"", "is not a GGUF file"),
    "version": (lambda raw: raw[:4] + b"\x00\x00\x00\x03" + raw[8:], "byte order"),
    "header": (lambda raw: raw[:3000], "cut off in its header"),
    "values": (lambda raw: raw[:-100], r"is cut off: it has [0-9,]+ of [0-9,]+ bytes"),
    "type": (_another_type, r"blk\.0\.attn_v\.weight has type MXFP4.*choose.*Q4_K"),
    "text": (lambda raw: raw.replace(b"general.arch", b"general\xff\xffrch"), "is damaged: 'utf-8"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    change, words = DAMAGES[damage]
    file = write_gguf(tmp_path / "m.gguf", small_model())
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=words):
        describe_model(file)


def test_two_files_are_no_model_and_safetensors_win(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama")
    file = write_gguf(tmp_path / "a.gguf", checkpoint.model)
    assert describe_model(tmp_path).name == tmp_path.name
    (tmp_path / "model.safetensors").unlink()
    assert describe_model(tmp_path).name == "a"
    (tmp_path / "b.gguf").write_bytes(file.read_bytes())
    with pytest.raises(
        ModelError, match=r"2 GGUF files \(a\.gguf, b\.gguf\); give the path of one"
    ):
        describe_model(tmp_path)
