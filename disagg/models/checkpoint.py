"""The safetensors files of a checkpoint directory: which tensor lies where, and their identity.

Only safetensors is read; formats that can run code while loading never are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from disagg.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SAMPLE_NBYTES = 4096
_NUM_SAMPLES = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and its shape."""

    file: Path
    shape: tuple[int, ...]


def checkpoint_files(directory: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, in a fixed order.

    Raises:
        ModelError: there is none, the index is broken, or a file it names is missing.
    """
    index = directory / _INDEX
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{directory} has no *.safetensors file, so there are no weights")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is broken: {error!r}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names files outside its directory: {', '.join(outside)}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{index} names files that are missing: {', '.join(missing)}")
    return [directory / name for name in names]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers: tensor name to file and shape."""
    tensors = {}
    for file in checkpoint_files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    shape = tuple(opened.get_slice(name).get_shape())
                    tensors[name] = StoredTensor(file, shape)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    return tensors


def checkpoint_fingerprint(directory: Path) -> str:
    """Return a name for these weights: cheap, and equal on every machine holding the same files.

    Digests config.json and, per weight file, its length, its header and a few evenly spaced
    samples. An edit that misses every sample and keeps every length is not seen.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"disagg-weights")
    digest.update((directory / "config.json").read_bytes())
    for file in checkpoint_files(directory):
        try:
            with file.open("rb") as opened:
                _digest_file(digest, opened, file.stat().st_size)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    return digest.hexdigest()


def _digest_file(digest: hashlib.blake2b, opened: BinaryIO, num_bytes: int) -> None:
    digest.update(num_bytes.to_bytes(8, "little"))
    prefix = opened.read(8)
    header_nbytes = min(int.from_bytes(prefix, "little"), num_bytes)
    digest.update(prefix + opened.read(header_nbytes))
    start = 8 + header_nbytes
    step = max((num_bytes - start) // _NUM_SAMPLES, 1)
    for offset in range(start, num_bytes, step):
        opened.seek(offset)
        digest.update(opened.read(_SAMPLE_NBYTES))
