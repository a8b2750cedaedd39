"""What the API must know of a model: tokenizer, chat template, limits, defaults, identity.

Read from the model's directory without torch; weights are only looked at to name them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ModelError
from disagg.models.checkpoint import checkpoint_files, read_header
from disagg.models.hf_config import HFConfig
from disagg.text.chat_template import ChatTemplate, load_chat_template
from disagg.text.tokenizer import Tokenizer

_SAMPLE_NBYTES = 1024


@dataclass(frozen=True)
class GenerationDefaults:
    """Used where a request says nothing, as the model's authors advise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ServedModel:
    """One entry of the models table.

    Attributes:
        name: what clients call it.
        fingerprint: equal only for equal weights and tokenizer; root of all block names.
        vocab_size: ids a prompt may hold are below it.
        num_parameters: as stored; a matrix that is tied to another one counts once.
        max_model_len: tokens of prompt and answer together.
        block_size: positions of a KV block, as its workers have it.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: GenerationDefaults = GenerationDefaults()
    created_unix_s: int = 0
    num_parameters: int = 0  # 0: not known

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        name: str,
        block_size: int,
        max_model_len: int | None = None,
        chat_template: str | None = None,
        created_unix_s: int = 0,
    ) -> ServedModel:
        """Raises `ModelError` naming the file that is absent or wrong."""
        directory = Path(path)
        config = HFConfig.from_directory(directory)
        tokenizer = Tokenizer.from_directory(directory)
        limit = config.max_model_len
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=load_chat_template(directory, chat_template),
            fingerprint=model_fingerprint(directory),
            vocab_size=min(tokenizer.num_ids, config.size("vocab_size")),
            max_model_len=min(limit, max_model_len or limit),
            block_size=block_size,
            eos_token_ids=config.eos_token_ids,
            defaults=_defaults(config),
            created_unix_s=created_unix_s,
            num_parameters=_num_parameters(directory),
        )


def model_fingerprint(directory: Path) -> str:
    """A name for the contents of a model directory, the same on every machine.

    Covers the configuration, the tokenizer and of every tensor its name, type, shape, place and a
    sample from its middle, so that two trainings of one architecture differ. Reading all weights
    would take minutes for large models.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"disagg-model")
    for name in ("config.json", "tokenizer.json"):
        raw = (directory / name).read_bytes()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    for file in _weight_files(directory):
        header = read_header(file)
        digest.update(file.name.encode() + header.raw)
        with file.open("rb") as weights:
            for tensor in header.tensors.values():
                weights.seek(max(tensor.begin, (tensor.begin + tensor.end - _SAMPLE_NBYTES) // 2))
                digest.update(weights.read(min(_SAMPLE_NBYTES, tensor.end - tensor.begin)))
    return digest.hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    """None are needed where no worker runs."""
    return checkpoint_files(directory) if any(directory.glob("*.safetensors*")) else []


def _num_parameters(directory: Path) -> int:
    headers = map(read_header, _weight_files(directory))
    return sum(tensor.num_values for header in headers for tensor in header.tensors.values())


_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 or more", lambda value: value >= 0),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number; 0 or -1 for all", lambda value: value >= -1 and value % 1 == 0),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("above 0", lambda value: value > 0),
}


def _defaults(config: HFConfig) -> GenerationDefaults:
    """What generation_config.json recommends; 0 is a recommendation, null is none."""
    said: dict[str, float] = {}
    for key, (range_text, fits) in _RANGES.items():
        value = config.recommended(key)
        if value is None:
            continue
        if not fits(value):
            raise ModelError(
                f"{config.directory / 'generation_config.json'} is wrong: {key} must be"
                f" {range_text}, not {value:g}"
            )
        said[key] = value
    if config.generation.get("do_sample") is False:  # said, not just left out
        said["temperature"] = 0.0
    top_k = max(0, int(said.pop("top_k", 0)))
    return GenerationDefaults(top_k=top_k, **said)
