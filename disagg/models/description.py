"""The description of a model: the only reader of a model's directory. Reads no weights.

Workers, ingresses, the planner and the doctor get a `ModelDescription` and ask it for what they
need, so none of them knows file names. A new source of models would be a new case in
`describe_model`. Knows no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from disagg.errors import ModelError
from disagg.models.checkpoint import DirectoryFiles, Header, StoredTensor
from disagg.models.families import FAMILIES
from disagg.models.family import Json
from disagg.models.gguf_model import GgufFiles, gguf_in
from disagg.models.model_config import ModelConfig
from disagg.models.pooling import ModelPooling, read_pooling
from disagg.models.quantized import as_floats

_SAMPLE_NBYTES = 1024
_ADAPTER = "adapter_config.json"
_HEAD = "lm_head.weight"
_DECODER = "model."
MODELOPT_CONFIG = "hf_quant_config.json"  # older checkpoints have no quantization_config besides
# Prefixes of names in files of models that also read images and of text-only ones, newest files
# first.
_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OTHERS = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
)
_LEFT_OUT = (*_OTHERS, *(f"model.{each}" for each in _OTHERS))


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters that the model's authors recommend, for requests that do not set them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class TextPart:
    """The text part of a model.

    Attributes:
        architectures: of the text-only models; the first if its model_type says no other.
        model_type: model_type of the whole model in config.json.
    """

    architectures: tuple[str, ...]
    model_type: str


TEXT_PARTS: Mapping[str, TextPart] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": TextPart(("Gemma3ForCausalLM",), "gemma3"),
        "Gemma3nForConditionalGeneration": TextPart(("Gemma3nForCausalLM",), "gemma3n"),
        "Mistral3ForConditionalGeneration": TextPart(
            ("MistralForCausalLM", "Ministral3ForCausalLM"), "mistral3"
        ),
        "Qwen3_5ForConditionalGeneration": TextPart(("Qwen3_5ForCausalLM",), "qwen3_5"),
        "Qwen3_5MoeForConditionalGeneration": TextPart(("Qwen3_5MoeForCausalLM",), "qwen3_5_moe"),
    }
)


def describe_model(model: str | Path) -> ModelDescription:
    """Describe a Hugging Face model directory or a GGUF file.

    A directory with one GGUF file and no safetensors counts as that file.

    Raises:
        ModelError: the model does not exist, its configuration is missing or broken, or it is not
            supported.
    """
    files, file, whole = read_config(Path(model))
    of_text = _text_config(whole, file)
    raw = whole if of_text is None else of_text
    config = ModelConfig.from_hf(raw, file)
    return ModelDescription(files, raw, config, reads_images=of_text is not None)


def describe_foreign(
    model: str | Path, engine_args: Mapping[str, Any] = MappingProxyType({})
) -> ForeignModel:
    """Describe a model for vLLM, which knows families that our engine does not.

    Args:
        engine_args: of vLLM, of which some say what it computes.

    Raises:
        ModelError: the directory, its config.json or a number there is missing, or it is GGUF.
    """
    files, _, whole = read_config(Path(model))
    if isinstance(files, GgufFiles):
        raise ModelError(
            f"{files.place} is a GGUF file, which vLLM does not read; serve it with disagg's own"
            " engine, or give --engine vllm a directory with *.safetensors files"
        )
    part = whole.get("text_config")
    raw = {**whole, **(part if isinstance(part, Mapping) else {})}
    overrides = engine_args.get("hf_overrides")
    raw |= overrides if isinstance(overrides, Mapping) else {}
    return ForeignModel(files, raw, engine_args)


def read_config(place: Path) -> tuple[DirectoryFiles | GgufFiles, Path, Json]:
    """The files of a model, and its config.json: the path and what it says.

    Raises:
        ModelError: one of them is missing or broken.
    """
    files = _files(place)
    file, text = files.named("config.json"), files.read("config.json")
    if text is None and files.read(_ADAPTER) is not None:
        raise ModelError(
            f"{place} is a LoRA adapter, which cannot be served alone; serve its model with"
            f" --enable-lora --lora-modules NAME={place}"
        )
    if text is None:
        raise ModelError(
            f"{file} is missing; a model directory needs one. Is {place} a model directory?"
        )
    raw = _json(text, file)
    if "quantization_config" in raw or (said := files.read(MODELOPT_CONFIG)) is None:
        return files, file, raw
    of_weights = _json(said, files.named(MODELOPT_CONFIG))
    return files, file, {**raw, "quantization_config": {"quant_method": "modelopt", **of_weights}}


def _files(place: Path) -> DirectoryFiles | GgufFiles:
    if place.is_file():
        return GgufFiles(place)
    if not place.is_dir():
        raise ModelError(
            f"there is no model directory at {place}; give the path of a directory with "
            "config.json, tokenizer.json and *.safetensors files, or of a GGUF file"
        )
    directory = DirectoryFiles(place)
    file = None if directory.has_weights else gguf_in(place)
    return directory if file is None else GgufFiles(file)


class ModelDescription:
    """A supported model.

    Each file is read when it is first needed, and raises `ModelError` if it is missing or broken. A
    planner needs no weights, and a worker needs no chat template.

    Attributes:
        source: the model's path, for messages.
        reads_images: whether it is the text part of a model that also reads images, whose other
            parts are left out.
    """

    def __init__(
        self,
        files: DirectoryFiles | GgufFiles,
        raw: Json,
        config: ModelConfig,
        *,
        reads_images: bool = False,
    ) -> None:
        self.source = str(files.place)
        self._stated_config = config
        self.reads_images = reads_images
        self._files = files
        self._raw = raw

    @property
    def name(self) -> str:
        return self._files.name

    @cached_property
    def config(self) -> ModelConfig:
        """The numbers of its decoder."""
        stated = self._stated_config
        if self._has_own_head:
            stated = replace(stated, tie_word_embeddings=False)
        return replace(stated, stacks_experts=True) if self._stacks_experts else stated

    def within(self, max_model_len: int) -> ModelDescription:
        """The model for contexts of at most so many tokens.

        It has a fingerprint of its own if that changes what it computes (LongRoPE).
        """
        config = self.config.within(max_model_len)
        if config.rope == self.config.rope:
            return self
        model = copy(self)
        vars(model).update(config=config, fingerprint=f"{self.fingerprint}+short")
        return model

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest context that its authors state."""
        return self.config.max_model_len

    @property
    def remarks(self) -> list[str]:
        """Sentences on what is read otherwise than its files say, for whoever serves it."""
        remarks = []
        if self.reads_images:
            remarks.append(
                f"Only the text part of {self.name} is served: images in requests are refused."
            )
        if self._has_own_head:
            remarks.append(
                f"{self.name} has {_HEAD} that differs from its embeddings, so it is used, although"
                " tie_word_embeddings is true in its config.json."
            )
        beyond = [str(each) for each in self._stated_ends if each >= self.vocab_size]
        if beyond:
            remarks.append(
                f"The end token {', '.join(beyond)} of {self.name} is ignored, because it is not"
                f" below {self.vocab_size}, its vocabulary size."
            )
        return remarks

    @cached_property
    def _has_own_head(self) -> bool:
        """Whether the weights contradict `tie_word_embeddings`. They win, as in transformers."""
        if not self._stated_config.tie_word_embeddings or not self._files.has_weights:
            return False
        with suppress(ModelError):  # a damaged file is refused by who reads weights
            embedding, head = map(self.tensors.get, ("model.embed_tokens.weight", _HEAD))
            if isinstance(embedding, StoredTensor) and isinstance(head, StoredTensor):
                return not head.is_equal(embedding)
        return False

    @property
    def _stacks_experts(self) -> bool:
        """Whether experts are stacked, in a family that has checkpoints of both kinds."""
        experts = FAMILIES[self._stated_config.family].experts
        names = None if experts is None else experts.or_stacked
        if names is None or not self._files.has_weights:
            return False
        with suppress(ModelError):
            return any(name.endswith(names.gate) for name in self.tensors)
        return False

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The place of each tensor, by its name. Takes milliseconds, because only headers are read.

        The pieces of a quantised matrix count as one tensor. Raises `ModelError`.
        """
        tensors: dict[str, StoredTensor] = {}
        for file, header in self._headers.items():
            for name, tensor in self._of_text(header):
                if name in tensors:
                    raise ModelError(
                        f"{name} is in {tensors[name].file} and in {file}; a directory must hold"
                        " only one checkpoint"
                    )
                tensors[name] = tensor
        quantized = self._stated_config.quantized
        return tensors if quantized is None else as_floats(tensors, quantized)

    def _of_text(self, header: Header) -> Iterable[tuple[str, StoredTensor]]:
        """The tensors of a file that belong to the decoder."""
        if self._has_bare_names:
            return [
                (f"{_DECODER}{name}", replace(tensor, name=name))
                for name, tensor in header.tensors.items()
            ]
        if not self.reads_images:
            return header.tensors.items()
        named = ((text_name(name), name, tensor) for name, tensor in header.tensors.items())
        return [(own, replace(tensor, name=name)) for own, name, tensor in named if own is not None]

    @property
    def _has_bare_names(self) -> bool:
        """Whether the decoder was saved without its head, as embedding models are."""
        headers = self._headers.values()
        return any("norm.weight" in header.tensors for header in headers)

    @cached_property
    def pooling(self) -> ModelPooling:
        """What it computes instead of answers."""
        return read_pooling(self._files.read, self._raw)

    @property
    def stored_nbytes(self) -> int:
        """The size of the weights in their files, including scales."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_quantized(self) -> bool:
        """Whether some weights in the files are quantised."""
        return any(not tensor.is_float for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """The number of stored parameters; tied matrices count once. 0: there are no weights."""
        if not self._files.has_weights:
            return 0
        return sum(tensor.num_values for tensor in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the model, the same on every machine.

        It is equal only for equal weights, architecture and tokenizer. It covers the configuration,
        the tokenizer, and the name, type, shape, place and a sample from the middle of every
        tensor, so that two trainings of one architecture differ. Reading all weights would take
        minutes for large models. Without weights it covers the rest.
        """
        digest = hashlib.blake2b(digest_size=16, person=b"disagg-model")
        for name in ("config.json", "tokenizer.json"):
            raw = (self._files.read(name) or "").encode()
            digest.update(len(raw).to_bytes(8, "little") + raw)
        for file, header in self._headers.items() if self._files.has_weights else ():
            digest.update(file.name.encode() + header.raw)
            with file.open("rb") as weights:
                for tensor in header.tensors.values():
                    middle = (tensor.begin + tensor.end - _SAMPLE_NBYTES) // 2
                    weights.seek(max(tensor.begin, middle))
                    digest.update(weights.read(min(_SAMPLE_NBYTES, tensor.end - tensor.begin)))
        return digest.hexdigest()

    def read_tokenizer(self) -> str:
        """Read the JSON of Hugging Face's `tokenizers`. It has megabytes, so it is not cached."""
        text = self._files.read("tokenizer.json")
        if text is None:
            raise ModelError(
                f"{self.source} has no tokenizer.json. Save the tokenizer in the fast format, for"
                " example with transformers' AutoTokenizer(...).save_pretrained()."
            )
        return text

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template; None if there is none.

        It is in `chat_template.jinja`, or else in `tokenizer_config.json`, or else in
        `chat_template.json`, which older models that read images have. Further templates, for
        conversations with tools or documents, become parts of it.
        """
        named = {name: self._files.read(file) for name, file in TEMPLATE_FILES.items()}
        if named["default"] is None:
            named |= self._configured_templates()
        source = named["default"]
        for name, variable in (("rag", "documents"), ("tool_use", "tools")):
            other = named[name]
            if source is not None and other is not None:
                other, source = other.removesuffix("\n"), source.removesuffix("\n")
                source = f"{{% if {variable} +%}}{other}{{%+ else +%}}{source}{{%+ endif %}}"
        return source

    def _configured_templates(self) -> dict[str, str]:
        """The named templates of the configuration; a single one is named "default"."""
        found = self._tokenizer_config.get("chat_template")
        if found is None:
            found = self._optional_json("chat_template.json").get("chat_template")
        if not isinstance(found, list):  # [{"name": ..., "template": ...}]
            found = [{"name": "default", "template": found}]
        pairs = [(e.get("name"), e.get("template")) for e in found if isinstance(e, dict)]
        return {
            name: source
            for name, source in pairs
            if name in TEMPLATE_FILES and isinstance(source, str)
        }

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that templates use, such as `bos_token`."""
        tokens: dict[str, str] = {}
        for name, value in self._tokenizer_config.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
        return tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, without those that the model does not have."""
        return tuple(each for each in self._stated_ends if each < self.vocab_size)

    @property
    def _stated_ends(self) -> tuple[int, ...]:
        """The end tokens of generation_config.json, or else of config.json."""
        key, name = "eos_token_id", "generation_config.json"
        value = self._generation.get(key)
        if value is None:
            name = "config.json"
            value = self._raw.get(key, self._default_end)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise self._wrong(name, f"{key} must be a token id, or a list of them, not {value!r}")
        # In some files -1 means that there is none.
        return tuple(dict.fromkeys(each for each in ids if each >= 0))

    @property
    def _default_end(self) -> object:
        """The end token of a config.json that names none, as transformers has it."""
        return FAMILIES[self._stated_config.family].defaults["eos_token_id"]

    @property
    def defaults(self) -> GenerationDefaults:
        """The recommendations of generation_config.json. 0 is a recommendation, and null is not."""
        stated: dict[str, float] = {}
        for key, (range_text, fits) in _RANGES.items():
            value = self._generation.get(key)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or not fits(value):
                raise self._wrong(
                    "generation_config.json", f"{key} must be {range_text}, not {value!r}"
                )
            stated[key] = float(value)
        if self._generation.get("do_sample") is False:  # stated, not only left out
            stated["temperature"] = 0.0
        top_k = max(0, int(stated.pop("top_k", 0)))
        return GenerationDefaults(top_k=top_k, **stated)

    @cached_property
    def _headers(self) -> dict[Path, Header]:
        return self._files.headers()

    @cached_property
    def _generation(self) -> Json:
        return self._optional_json("generation_config.json")

    @cached_property
    def _tokenizer_config(self) -> Json:
        return self._optional_json("tokenizer_config.json")

    def _optional_json(self, name: str) -> Json:
        text = self._files.read(name)
        return {} if text is None else _json(text, self._files.named(name))

    def _wrong(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self._files.named(name)} is wrong: {what}")


_OF_ENCODERS = ("type_vocab_size", "sep_token_id")  # as BERT and its descendants
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")


class ForeignModel(ModelDescription):
    """A model of which only what an ingress needs is known: tokenizer, template, limits."""

    def __init__(self, files: DirectoryFiles, raw: Json, engine_args: Mapping[str, Any]) -> None:
        self.source = str(files.place)
        self.reads_images = False
        self._engine_args = engine_args
        self._files = files
        self._raw = raw

    @property
    def config(self) -> ModelConfig:
        raise ModelError(f"{self.source} is known to another engine only; its decoder is not read.")

    @property
    def vocab_size(self) -> int:
        return self._stated("vocab_size")

    @property
    def max_model_len(self) -> int:
        return self._stated("max_position_embeddings")

    @property
    def num_parameters(self) -> int:
        return 0

    @cached_property
    def pooling(self) -> ModelPooling:
        """With vLLM's pooling it scores pairs by a head, or computes embeddings by any pooling."""
        names = self._raw.get("architectures")
        classifies = str(names[0] if isinstance(names, list) and names else "").endswith(
            "ForSequenceClassification"
        )
        if classifies or self._engine_args.get("convert") == "classify":
            if any(self._raw.get(key) is not None for key in _OF_ENCODERS):
                return ModelPooling(
                    why_not="it is a cross-encoder, which separates a query and its document by"
                    " tokens of its own, and here they are one text."
                )
            return ModelPooling(has_head=True)
        if self._engine_args.get("runner") == "pooling":
            return ModelPooling(embedding_size=self._stated("hidden_size"))
        found = super().pooling
        if found.why_not:
            return ModelPooling(
                why_not="its vLLM was started for answers; start it with"
                ' --engine-args \'{"runner": "pooling"}\'.'
            )
        return found

    @property
    def image_token_id(self) -> int | None:
        """The token that becomes those of an image, if its config.json names it."""
        return next((self._raw[key] for key in _IMAGE_TOKENS if key in self._raw), None)

    @property
    def _has_own_head(self) -> bool:
        return False

    @property
    def _default_end(self) -> object:
        return None

    def _stated(self, key: str) -> int:
        value = self._raw.get(key)
        if not isinstance(value, int) or value < 1:
            raise self._wrong("config.json", f"{key} must be a number above 0, not {value!r}")
        return value


# Chat templates by transformers' names. "tool_use" is used if there are tools, otherwise "rag" if
# there are documents.
TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
    "rag": "additional_chat_templates/rag.jinja",
}

_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 or more", lambda value: value >= 0),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number; 0 or -1 for all", lambda value: value >= -1 and value % 1 == 0),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("above 0", lambda value: value > 0),
}


def _json(text: str, file: Path) -> Json:
    """Parse a JSON object. Raises `ModelError`."""
    try:
        parsed: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{file} must hold one JSON object")
    return parsed


def _text_config(raw: Json, place: object) -> Json | None:
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
    if "tie_word_embeddings" in raw:  # the head belongs to the whole model
        own = {**own, "tie_word_embeddings": raw["tie_word_embeddings"]}
    types = {FAMILIES[name].model_type: name for name in part.architectures}
    architecture = types.get(str(own.get("model_type")), part.architectures[0])
    return {**shared, **own, "architectures": [architecture]}


def text_name(name: str) -> str | None:
    """The name of a tensor in a text-only model; None if it has no such tensor."""
    if name.startswith(_LEFT_OUT):
        return None
    for theirs, ours in _RENAMED:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
