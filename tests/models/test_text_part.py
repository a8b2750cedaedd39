"""The text part of a model that reads images, too, is served as a model of text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from disagg.errors import ModelError
from disagg.models.description import describe_model
from tests.models.checkpoints import Checkpoint, assert_logits_are_transformers, config_class
from tests.models.quantized_files import write_quantized

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}


DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "num_position_embeddings": 16,
}


def _gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**SHAPE, sliding_window=9, sliding_window_pattern=2)
    vision = {key: value for key, value in VISION.items() if key != "head_dim"}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**vision),
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        eos_token_id=[1, 93],
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _mistral3() -> Any:
    text = transformers.MistralConfig(**SHAPE, sliding_window=None)
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config=transformers.PixtralVisionConfig(**VISION),
        tie_word_embeddings=False,
        eos_token_id=[1, 93],
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _qwen3_5(kind: str = "", **own: Any) -> Any:
    """With states, which a chunk of the prompt leaves and the next one goes on from."""
    text = config_class(f"Qwen3_5{kind}")(
        **{**SHAPE, **DELTA_NETS, **own}, tie_word_embeddings=True, rms_norm_eps=1e-2
    )
    config = getattr(transformers, f"Qwen3_5{kind}Config")(
        text_config=text.to_dict(),
        vision_config={**QWEN_VISION, "out_hidden_size": SHAPE["hidden_size"]},
        tie_word_embeddings=False,
        eos_token_id=[1, 93],
    )
    return getattr(transformers, f"Qwen3_5{kind}ForConditionalGeneration")(config)


def _qwen3_5_moe() -> Any:
    experts = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return _qwen3_5("Moe", **experts, shared_expert_intermediate_size=40)


MODELS = {
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "qwen3.5": _qwen3_5,
    "qwen3.5-moe": _qwen3_5_moe,
}


def _write(directory: Path, name: str) -> Checkpoint:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.1)
    model.save_pretrained(directory)
    return Checkpoint(directory, lambda: model)


def test_a_template_may_lie_beside_that_of_the_processor(tmp_path: Path) -> None:
    _write(tmp_path, "mistral3")
    assert describe_model(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert describe_model(tmp_path).chat_template == "{{ messages }}"


def _rename(directory: Path, *pairs: tuple[str, str]) -> None:
    """Change how the names of tensors begin: the first of `pairs` that fits."""
    file = directory / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        begin, other = next(((a, b) for a, b in pairs if name.startswith(a)), ("", ""))
        renamed[other + name.removeprefix(begin)] = tensor
    save_file(renamed, file)


def _stack_experts(directory: Path) -> None:
    """As Qwen3.5's makers publish them, and transformers does not write them."""
    file = directory / "model.safetensors"
    tensors, experts = load_file(file), range(7)
    for prefix in sorted({name.split("experts.0.")[0] for name in tensors if "experts.0." in name}):
        matrices = {
            kind: torch.stack([tensors.pop(f"{prefix}experts.{e}.{kind}.weight") for e in experts])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        down = matrices.pop("down_proj")
        tensors[f"{prefix}experts.gate_up_proj"] = torch.cat([*matrices.values()], 1)
        tensors[f"{prefix}experts.down_proj"] = down
    save_file(tensors, file)


OLD = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
NEW = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))


@pytest.mark.parametrize("names", [OLD, NEW], ids=["old names", "new names"])
@pytest.mark.parametrize("name", MODELS)
def test_its_logits_are_those_of_the_whole(
    name: str, names: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    checkpoint = _write(tmp_path, name)
    _rename(tmp_path, *names, ("model.vision_tower.", "vision_tower."))
    if names is NEW:
        _stack_experts(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(each.startswith(names[0][1]) for each in stored)
    assert_logits_are_transformers(checkpoint)
    described = describe_model(tmp_path)
    assert not described.config.tie_word_embeddings or name == "gemma3"
    assert described.reads_images
    assert described.eos_token_ids == (1, 93)
    assert not any("vis" in tensor or "multi_modal" in tensor for tensor in described.tensors)


@pytest.mark.parametrize(
    ("name", "kind"), [("gemma3", "awq"), ("gemma3", "fp8 blocks"), ("gemma3n", "awq")]
)
def test_its_weights_may_be_quantised(name: str, kind: str, tmp_path: Path) -> None:
    """Also of a model that hears: its other parts are left out, too."""
    checkpoint = write_quantized(tmp_path, name, kind)
    directory = checkpoint.directory
    _rename(directory, ("model.", "model.language_model."))
    stored = load_file(directory / "model.safetensors")
    others = ("audio_tower.norm", "embed_audio.embedding", "embed_vision.embedding")
    stored |= {f"model.{other}.weight": torch.ones(3) for other in others}
    save_file(stored, directory / "model.safetensors")
    file = directory / "config.json"
    text = json.loads(file.read_text())
    whole = {
        "architectures": [f"{name.capitalize()}ForConditionalGeneration"],
        "model_type": name,
        "quantization_config": text.pop("quantization_config"),
        "text_config": text,
    }
    file.write_text(json.dumps(whole))
    assert describe_model(directory).is_quantized
    assert_logits_are_transformers(checkpoint)


def test_the_start_says_what_is_left_out(tmp_path: Path) -> None:
    _write(tmp_path / "both", "gemma3")
    said = describe_model(tmp_path / "both").remarks
    assert said == ["Only the text part of both is served: images in requests are refused."]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, "must have a text_config"),
        ({"model_type": "gemma3_text"}, "model_type 'gemma3'"),
        ({"text_config": {"model_type": "gemma2"}}, "model_type, by .* says 'gemma2'"),
    ],
)
def test_what_contradicts_itself_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _write(tmp_path, "gemma3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=words):
        describe_model(tmp_path)
