"""config.json and generation_config.json as transformers reads them, for workers and ingresses.

A key that is absent has the value that the family's configuration class of transformers gives it.
What transformers refuses or would ignore is refused here in words. Knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from disagg.errors import ModelError
from disagg.models.checkpoint import refuse_lfs_pointer
from disagg.models.rope import RopeConfig

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """What the classes of one architecture in transformers have in common.

    Attributes:
        model_type: what `config.json` calls it.
        defaults: of its configuration class (transformers 5), for keys that a file may leave out.
            Sizes that only the weights decide have none here: a file without them is broken.
    """

    model_type: str
    defaults: Json


_EVERY: Json = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "sliding_window": None,
    "eos_token_id": None,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN: Json = {
    **_EVERY,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            "llama",
            {
                **_EVERY,
                "num_key_value_heads": None,
                "max_position_embeddings": 2048,
                "eos_token_id": 2,
            },
        ),
        "MistralForCausalLM": Family(
            "mistral",
            {
                **_EVERY,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
                "eos_token_id": 2,
            },
        ),
        "Qwen2ForCausalLM": Family("qwen2", _QWEN),
        "Qwen3ForCausalLM": Family("qwen3", {**_QWEN, "head_dim": 128}),
    }
)


@dataclass(frozen=True)
class HFConfig:
    """Both files of one checkpoint directory, of a family that is supported."""

    directory: Path
    family: str
    raw: Json
    generation: Json

    @classmethod
    def from_directory(cls, directory: str | Path) -> HFConfig:
        """Raises `ModelError`: the directory or a file is missing, broken, or not supported."""
        directory = Path(directory)
        if not directory.is_dir():
            raise ModelError(
                f"there is no model directory at {directory}; give the path of a directory with "
                "config.json, tokenizer.json and *.safetensors files"
            )
        raw = read_json(directory / "config.json", required=True)
        generation = read_json(directory / "generation_config.json", required=False)
        family = _family(raw, directory)
        return cls(directory, family, {**FAMILIES[family].defaults, **raw}, generation)

    @property
    def is_qwen(self) -> bool:
        return self.family in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")

    def wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.directory / 'config.json'} is wrong: {what}")

    def size(self, key: str) -> int:
        """A positive whole number. Raises `ModelError`."""
        if key not in self.raw:
            raise ModelError(f"{self.directory / 'config.json'} has no {key!r}")
        value = self.raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.wrong(f"{key} must be a positive number, not {value!r}")
        return value

    def optional_size(self, key: str) -> int | None:
        """As `size`, or None for null."""
        return None if self.raw[key] is None else self.size(key)

    def flag(self, key: str) -> bool:
        """True or false. Raises `ModelError`: also for null, which transformers refuses."""
        value = self.raw[key]
        if not isinstance(value, bool):
            raise self.wrong(f"{key} must be true or false, not {json.dumps(value)}")
        return value

    @property
    def rms_norm_eps(self) -> float:
        value = self.raw["rms_norm_eps"]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise self.wrong(f"rms_norm_eps must lie between 0 and 1, not {value!r}")
        return float(value)

    @cached_property
    def rope(self) -> RopeConfig:
        try:
            return RopeConfig.from_hf(self.raw, self.size("max_position_embeddings"))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self.wrong(f"the rope settings cannot be read: {error}") from error
        except ModelError as error:
            raise self.wrong(error.message) from error

    @property
    def max_model_len(self) -> int:
        """Positions that the model was made for."""
        return self.rope.max_model_len(self.size("max_position_embeddings"))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an answer: as generation_config.json says, else as config.json does."""
        value = self.generation.get("eos_token_id")
        source = "generation_config.json"
        if value is None:
            value, source = self.raw["eos_token_id"], "config.json"
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise ModelError(
                f"{self.directory / source} is wrong: eos_token_id must be a token id, or a list"
                f" of them, not {value!r}"
            )
        # Some files mean "none" by -1.
        return tuple(dict.fromkeys(each for each in ids if each >= 0))

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """One entry per layer: how many positions a token sees, itself included; None: all."""
        num_layers = self.size("num_hidden_layers")
        window = self.optional_size("sliding_window")
        if self.family == "LlamaForCausalLM" or (
            self.is_qwen and not self.flag("use_sliding_window")
        ):
            window = None
        first = self.raw["max_window_layers"] if self.is_qwen else 0
        if not isinstance(first, int) or isinstance(first, bool):
            raise self.wrong(f"max_window_layers must be a number, not {first!r}")
        usual = tuple(window if layer >= first else None for layer in range(num_layers))
        kinds = self.raw.get("layer_types")
        if kinds is None:
            return usual
        stated = self._windows_of(kinds, window, num_layers)
        if not self.is_qwen and stated != usual:
            raise self.wrong(f"layer_types is not supported for {self.family}; take it away")
        return stated

    def _windows_of(
        self, kinds: Any, window: int | None, num_layers: int
    ) -> tuple[int | None, ...]:
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list):
            raise self.wrong(f"layer_types must be a list, not {kinds!r}")
        unknown = sorted({str(kind) for kind in kinds if kind not in known})
        if unknown or len(kinds) != num_layers:
            raise self.wrong(
                f"layer_types must name {num_layers} layers as {' or '.join(known)}; found "
                f"{len(kinds)} with {', '.join(unknown) or 'nothing else'}"
            )
        if window is None and "sliding_attention" in kinds:
            raise self.wrong(
                "layer_types names sliding_attention, but no window is set; set sliding_window (and"
                " for Qwen use_sliding_window), or call the layers full_attention"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def recommended(self, key: str) -> float | None:
        """A number of generation_config.json; None where it says nothing."""
        value = self.generation.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            raise ModelError(
                f"{self.directory / 'generation_config.json'} is wrong: {key} must be a number, "
                f"not {value!r}"
            )
        return float(value)


def read_json(path: Path, *, required: bool) -> Json:
    """A JSON object; empty where the file is missing and not required. Raises `ModelError`."""
    if not path.is_file():
        if not required:
            return {}
        raise ModelError(
            f"{path} is missing; a model directory needs one. Is {path.parent} a model directory?"
        )
    refuse_lfs_pointer(path)
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} must hold one JSON object")
    return parsed


def _family(raw: Json, directory: Path) -> str:
    architectures = raw.get("architectures") or []
    known = [str(name) for name in architectures if name in FAMILIES]
    if not known:
        said = ", ".join(map(str, architectures))
        raise ModelError(
            f"{directory} is a {said or 'model without architectures'}; supported are"
            f" {', '.join(FAMILIES)}"
        )
    model_type = raw.get("model_type", FAMILIES[known[0]].model_type)
    if model_type != FAMILIES[known[0]].model_type:
        raise ModelError(
            f"{directory / 'config.json'} contradicts itself: architectures says {known[0]} and "
            f"model_type says {model_type!r}, by which transformers chooses; make them agree"
        )
    return known[0]
