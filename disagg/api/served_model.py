"""What the API must know of a model: tokenizer, chat template, limits, defaults, identity.

Read from the model's directory without torch; weights are only looked at to name them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from disagg.api.chat_template import ChatTemplate, load_chat_template
from disagg.api.tokenizer import Tokenizer
from disagg.errors import ModelError

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
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json", optional=True)
        tokenizer = Tokenizer.from_directory(directory)
        limit = config.get("max_position_embeddings")
        if not isinstance(limit, int):
            raise ModelError(f"{directory}/config.json has no max_position_embeddings.")
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=load_chat_template(directory, chat_template),
            fingerprint=model_fingerprint(directory),
            vocab_size=min(tokenizer.num_ids, int(config.get("vocab_size", tokenizer.num_ids))),
            max_model_len=min(limit, max_model_len or limit),
            block_size=block_size,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            defaults=_defaults(generation),
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
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as weights:
            header = _header(weights)
            digest.update(file.name.encode() + header)
            start = 8 + len(header)
            for begin, end, _ in _tensors(header, file):
                weights.seek(start + max(begin, (begin + end - _SAMPLE_NBYTES) // 2))
                digest.update(weights.read(min(_SAMPLE_NBYTES, end - begin)))
    return digest.hexdigest()


def _num_parameters(directory: Path) -> int:
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as weights:
            total += sum(num for _, _, num in _tensors(_header(weights), file))
    return total


def _header(weights: BinaryIO) -> bytes:
    return weights.read(int.from_bytes(weights.read(8), "little"))


def _tensors(header: bytes, file: Path) -> list[tuple[int, int, int]]:
    """Where each tensor of a safetensors file begins and ends, relative to the end of its header,
    and how many elements it has."""
    try:
        entries = json.loads(header)
        return [
            (int(begin), int(end), math.prod(map(int, entry["shape"])))
            for name, entry in entries.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{file} is not a safetensors file: {error}.") from error


def _read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    if not file.is_file():
        if optional:
            return {}
        raise ModelError(f"{file} does not exist; is {file.parent} a model directory?")
    try:
        raw = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} must hold a JSON object.")
    return raw


def _defaults(generation: dict[str, Any]) -> GenerationDefaults:
    plain = GenerationDefaults()
    greedy = generation.get("do_sample") is False  # said, not just left out
    return GenerationDefaults(
        temperature=0.0 if greedy else float(generation.get("temperature") or plain.temperature),
        top_p=float(generation.get("top_p") or plain.top_p),
        top_k=int(generation.get("top_k") or plain.top_k),
        min_p=float(generation.get("min_p") or plain.min_p),
        repetition_penalty=float(generation.get("repetition_penalty") or plain.repetition_penalty),
    )
