"""The safetensors files of a checkpoint directory: which tensor lies where, and their identity.

Only safetensors is read; formats that can run code while loading never are. Knows no torch: headers
are checked here before anything is started, so a file that is damaged is found in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from disagg.errors import ModelError

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SAMPLE_NBYTES = 4096
_NUM_SAMPLES = 8
_MAX_HEADER_NBYTES = 100_000_000  # as the format's own library
_LFS_POINTER = b"version https://git-lfs"

DTYPE_NBYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and what it is.

    Attributes:
        dtype: as safetensors writes it: "F32", "BF16", ...
        begin, end: bytes of `file` that hold it.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The first part of a safetensors file, and the tensors that it describes."""

    raw: bytes
    tensors: Mapping[str, StoredTensor]


def checkpoint_files(directory: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, in a fixed order.

    As transformers chooses: `model.safetensors`; else what the index names; other files that lie
    beside them (adapters, the same weights in another layout) are no part of the model.

    Raises:
        ModelError: there is none, the index is broken, or a file it names is missing.
    """
    if (directory / _WHOLE).is_file():
        return [directory / _WHOLE]
    index = directory / _INDEX
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{directory} has no *.safetensors file, so there are no weights; download them, or"
                " convert others with transformers' save_pretrained()"
            )
        return files
    refuse_lfs_pointer(index)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is broken: {error!r}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names files outside its directory: {', '.join(outside)}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(
            f"{index} names files that are missing: {', '.join(missing)}; download them"
        )
    return [directory / name for name in names]


def refuse_lfs_pointer(file: Path) -> None:
    """Raises `ModelError` if git left only the name of a large file in its place."""
    with _reading(file), file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(
                f"{file} is a git-LFS pointer, not the file itself: run `git lfs pull` in"
                f" {file.parent}"
            )


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read and check the headers of all files: tensor name to place.

    Raises:
        ModelError: a file is cut off, damaged, a git-LFS pointer, or not of this format.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in checkpoint_files(directory):
        for name, tensor in read_header(file).tensors.items():
            if name in tensors:
                raise ModelError(
                    f"{name} lies in {tensors[name].file} and in {file}; a directory holds one"
                    " checkpoint"
                )
            tensors[name] = tensor
    return tensors


def read_header(file: Path) -> Header:
    """Raises `ModelError`: the file is cut off, damaged, a pointer, or not of this format."""
    refuse_lfs_pointer(file)
    with _reading(file), file.open("rb") as opened:
        file_nbytes = file.stat().st_size
        length = int.from_bytes(opened.read(8), "little")
        if file_nbytes < 8 or not 2 <= length <= _MAX_HEADER_NBYTES:
            raise _damaged(file, "it does not begin with the length of a header")
        raw = opened.read(length)
    if len(raw) < length:
        raise _cut_off(file, file_nbytes, 8 + length)
    try:
        tensors = dict(_parse(json.loads(raw), file, 8 + length))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"its header cannot be read ({error})") from error
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if file_nbytes < end:
        raise _cut_off(file, file_nbytes, end)
    return Header(raw, tensors)


def _parse(header: Any, file: Path, start: int) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = map(int, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        tensor = StoredTensor(file, str(entry["dtype"]), shape, start + begin, start + end)
        value_nbytes = DTYPE_NBYTES.get(tensor.dtype)
        if begin < 0 or min(shape, default=0) < 0:
            raise ValueError(f"{name} lies outside the file")
        if value_nbytes is not None and tensor.num_values * value_nbytes != end - begin:
            raise ValueError(f"{name} has {end - begin} bytes for {list(shape)} of {tensor.dtype}")
        yield name, tensor


def _damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is not a readable safetensors file: {why}; download it again")


def _cut_off(file: Path, has_nbytes: int, needs_nbytes: int) -> ModelError:
    return ModelError(
        f"{file} is cut off: it has {has_nbytes:,} of {needs_nbytes:,} bytes; download it again"
    )


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn errors of the file system into `ModelError`s."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def checkpoint_fingerprint(directory: Path) -> str:
    """Return a name for these weights: cheap, and equal on every machine holding the same files.

    Digests config.json and, per weight file, its length, its header and a few evenly spaced
    samples. An edit that misses every sample and keeps every length is not seen.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"disagg-weights")
    digest.update((directory / "config.json").read_bytes())
    for file in checkpoint_files(directory):
        header = read_header(file)
        with _reading(file), file.open("rb") as opened:
            _digest_file(digest, opened, header.raw, file.stat().st_size)
    return digest.hexdigest()


def _digest_file(
    digest: hashlib.blake2b, opened: BinaryIO, header: bytes, file_nbytes: int
) -> None:
    digest.update(file_nbytes.to_bytes(8, "little"))
    digest.update(len(header).to_bytes(8, "little") + header)
    start = 8 + len(header)
    step = max((file_nbytes - start) // _NUM_SAMPLES, 1)
    for offset in range(start, file_nbytes, step):
        opened.seek(offset)
        digest.update(opened.read(_SAMPLE_NBYTES))
