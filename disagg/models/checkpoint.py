"""Reads the headers of the safetensors files of a checkpoint directory. For `description`.

Only safetensors is read, never a format that can run code while loading. Knows no torch: headers
are checked before anything is started, so a damaged file is found in milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from disagg.errors import ModelError
from disagg.kernels.packed_sizes import Packing

Range: TypeAlias = tuple[int, int]  # first, end

WEIGHTS_INDEX = "model.safetensors.index.json"
WHOLE_WEIGHTS = "model.safetensors"
_MAX_HEADER_NBYTES = 100_000_000  # the limit of the format's own library
MAX_TEXT_NBYTES = 256 << 20  # the largest known tokenizer.json has 40 MB
_LFS_POINTER = b"version https://git-lfs"
# Errors that an invalid header raises; ArithmeticError is raised for infinite numbers.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)

_COMPARED_NBYTES = 1 << 24  # of two tensors, at a time
_FLOATS = ("F64", "F32", "F16", "BF16")
DTYPE_NBYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        dtype: the name of its type in safetensors: "F32", "BF16", ...
        begin, end: the range of bytes of `file` that holds it.
        name: its name in the file, if that is a different one.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    name: str = field(default="", kw_only=True)

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in the files."""
        return self.end - self.begin

    @property
    def packing(self) -> Packing | None:
        """How its bits are kept in memory, if they are and no rank cuts it; None: it has floats."""
        return None

    @property
    def is_float(self) -> bool:
        """Whether its values are floats that are read as they are, not bytes, integers or fp8."""
        return self.dtype in _FLOATS

    def is_zero(self) -> bool:
        """Whether all its values are 0; reads them. Raises `ModelError`."""
        with _reading(self.file), self.file.open("rb") as opened:
            opened.seek(self.begin)
            return not any(opened.read(self.end - self.begin))

    def is_equal(self, other: StoredTensor) -> bool:
        """Whether both hold the same values in the same type; reads them. Raises `ModelError`."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        with _reading(self.file), self.file.open("rb") as one, other.file.open("rb") as another:
            one.seek(self.begin)
            another.seek(other.begin)
            left = self.end - self.begin
            while left > 0:
                size = min(left, _COMPARED_NBYTES)
                if one.read(size) != another.read(size):
                    return False
                left -= size
        return True


@dataclass(frozen=True)
class Header:
    """The first part of a safetensors file, and the tensors that it describes."""

    raw: bytes
    tensors: Mapping[str, StoredTensor]


class DirectoryFiles:
    """The files of a Hugging Face model directory."""

    def __init__(self, directory: Path) -> None:
        self.place = directory

    @property
    def name(self) -> str:
        place = self.place.resolve()
        if place.parent.name == "snapshots":  # in Hugging Face's cache: models--Qwen--Qwen3-8B
            return place.parent.parent.name.rpartition("--")[2]
        return place.name

    @property
    def has_weights(self) -> bool:
        """Whether there are files with weights, even if they are broken."""
        return any(self.place.glob("*.safetensors*"))

    def named(self, file: str) -> Path:
        """The path of a file, for messages."""
        return self.place / file

    def read(self, name: str) -> str | None:
        """The text of a file; None if it does not exist. Raises `ModelError`."""
        file = self.place / name
        return read_text(file) if file.is_file() else None

    def headers(self) -> dict[Path, Header]:
        """The headers of all files with weights. Raises `ModelError` if there are none, or they are
        damaged."""
        return {file: read_header(file) for file in checkpoint_files(self.place)}


def checkpoint_files(directory: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, in a fixed order.

    They are the files that transformers chooses: `model.safetensors`, or else the files in the
    index. Other files in the directory (adapters, the same weights in another layout) are not part
    of the model.

    Raises:
        ModelError: there is no file, the index is broken, or a file that it names is missing.
    """
    if (directory / WHOLE_WEIGHTS).is_file():
        return [directory / WHOLE_WEIGHTS]
    index = directory / WEIGHTS_INDEX
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{directory} has no *.safetensors file, so there are no weights; download them, or"
                " convert weights in another format with transformers' save_pretrained()"
            )
        return files
    try:
        names = indexed_files(read_text(index))
    except ValueError as error:
        raise ModelError(f"{index} is broken: {error}") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(
            f"{index} names files that are missing: {', '.join(missing)}; download them"
        )
    return [directory / name for name in names]


def indexed_files(text: str) -> list[str]:
    """The sorted file names in an index of weights.

    Raises:
        ValueError: it is not an index, or names files outside its directory.
    """
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"it has no weight_map of files ({error!r})") from error
    if outside:
        raise ValueError(f"it names files outside its directory: {', '.join(outside)}")
    return names


def read_text(file: Path) -> str:
    """Read a text file.

    Raises:
        ModelError: the file cannot be read, is not text, is far too long, or is a git-LFS pointer.
    """
    with _reading(file):
        if file.stat().st_size > MAX_TEXT_NBYTES:
            raise ModelError(
                f"{file} has {file.stat().st_size / 1e9:.1f} GB, but such files have only some MB;"
                " download it again"
            )
        raw = file.read_bytes()
        _refuse_lfs_pointer(file, raw)
        return raw.decode()


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        ModelError: the file is cut off, damaged, a git-LFS pointer, or not in this format.
    """
    with _reading(file), file.open("rb") as opened:
        _refuse_lfs_pointer(file, opened.read(len(_LFS_POINTER)))
        opened.seek(0)
        file_nbytes = file.stat().st_size
        length = int.from_bytes(opened.read(8), "little")
        if file_nbytes < 8 or not 2 <= length <= _MAX_HEADER_NBYTES:
            raise _damaged(file, "it does not begin with the length of a header")
        raw = opened.read(length)
    if len(raw) < length:
        raise _cut_off(file, file_nbytes, 8 + length)
    try:
        tensors = dict(_parse(json.loads(raw), file, 8 + length))
        _refuse_overlaps(tensors)
    except _UNREADABLE as error:
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


def _refuse_overlaps(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `ValueError` if two tensors share bytes, which the format does not allow."""
    ordered = sorted(tensors.items(), key=lambda each: (each[1].begin, each[1].end))
    for (name, tensor), (following, next_one) in pairwise(ordered):
        if next_one.begin < tensor.end:
            raise ValueError(f"{name} and {following} share bytes")


def _damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is not a readable safetensors file: {why}; download it again")


def _cut_off(file: Path, has_nbytes: int, needs_nbytes: int) -> ModelError:
    return ModelError(
        f"{file} is cut off: it has {has_nbytes:,} of {needs_nbytes:,} bytes; download it again"
    )


def _refuse_lfs_pointer(file: Path, raw: bytes) -> None:
    if raw.startswith(_LFS_POINTER):
        raise ModelError(
            f"{file} is a git-LFS pointer, not the file itself: run `git lfs pull` in {file.parent}"
        )


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Convert errors of the file system to `ModelError`s."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
