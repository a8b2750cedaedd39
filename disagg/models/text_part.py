"""The text part of models that also read images: its settings and tensors. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from disagg.errors import ModelError
from disagg.models.family import Json

# Prefixes of names in such files, and in files of text-only models; newer files come first.
_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
_LEFT_OUT = (*_OF_IMAGES, *(f"model.{each}" for each in _OF_IMAGES))


@dataclass(frozen=True)
class TextPart:
    """The text part of a model.

    Attributes:
        architecture: the architecture of the text-only model.
        model_type: model_type of the whole model in config.json.
    """

    architecture: str
    model_type: str


TEXT_PARTS: Mapping[str, TextPart] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", "gemma3"),
        "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM", "mistral3"),
    }
)


def text_config(raw: Json, place: object) -> Json | None:
    """The settings of the text part, as a text-only model has them; None if `raw` is text-only.

    Raises:
        ModelError: the text part is missing, or the model_type is wrong.
    """
    architectures = raw.get("architectures")
    names = map(str, architectures if isinstance(architectures, list) else ())
    part = next((TEXT_PARTS[name] for name in names if name in TEXT_PARTS), None)
    if part is None:
        return None
    own = raw.get("text_config")
    if not isinstance(own, Mapping) or raw.get("model_type", part.model_type) != part.model_type:
        raise ModelError(f"{place} must have a text_config and model_type {part.model_type!r}")
    outer = ("eos_token_id", "dtype", "torch_dtype", "quantization_config")
    shared = {key: raw[key] for key in outer if key in raw}
    return {**shared, **own, "architectures": [part.architecture]}


def text_name(name: str) -> str | None:
    """The name of a tensor in a text-only model; None if it has no such tensor."""
    if name.startswith(_LEFT_OUT):
        return None
    for theirs, ours in _RENAMED:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
