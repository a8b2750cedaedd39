"""Reads the header of a GGUF file: its settings, and the places of its tensors. For `gguf_model`.

It follows https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf`
library takes seconds and hundreds of megabytes for a vocabulary, in every process that describes a
model, and has no clear error for a truncated file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ModelError
from disagg.kernels.packed_sizes import Packing
from disagg.models.checkpoint import StoredTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # codes of `struct`, by type
_STRING, _ARRAY = 8, 9


class Block(NamedTuple):
    """A type of tensors.

    Attributes:
        packing: how a CPU keeps it; None: it is always widened.
    """

    name: str
    num_values: int
    nbytes: int
    packing: Packing | None = None


# The supported types by their numbers; `gguf_values` reads what is in a block.
BLOCKS: Mapping[int, Block] = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    2: Block("Q4_0", 32, 18, Packing("int4", 32, 2)),
    3: Block("Q4_1", 32, 20, Packing("int4", 32, 2, has_least=True)),
    6: Block("Q5_0", 32, 22),
    7: Block("Q5_1", 32, 24),
    8: Block("Q8_0", 32, 34, Packing("int8", 32, 2)),
    12: Block("Q4_K", 256, 144, Packing("int4", 32, 4, has_least=True)),
    13: Block("Q5_K", 256, 176),
    14: Block("Q6_K", 256, 210, Packing("int8", 16, 4)),
    30: Block("BF16", 1, 2),
}
BY_NAME = {block.name: block for block in BLOCKS.values()}
_OTHER_TYPES = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"} | {
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        raw: all bytes before the tensors' values.
        settings: settings by their full names, such as "llama.block_count".
        tensors: tensors by their names in the file, such as "blk.0.attn_q.weight". Their types are
            called "F32", "Q4_K", ..., and the outermost dimension is the first one.
    """

    raw: bytes
    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_gguf(file: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        ModelError: it is not a GGUF file, is cut off or damaged, or has an unsupported type.
    """
    try:
        with file.open("rb") as opened:
            if opened.read(4) != _MAGIC:
                raise ModelError(
                    f"{file} is not a GGUF file; a model is a GGUF file or a directory with"
                    " config.json, tokenizer.json and *.safetensors files"
                )
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _parsed(content, file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    except (struct.error, EOFError, OverflowError, MemoryError) as error:
        raise ModelError(f"{file} is cut off in its header; download it again") from error
    except ValueError as error:  # includes UnicodeDecodeError
        raise ModelError(f"{file} is damaged: {error}; download it again") from error


class _Cursor:
    """Reads one value after the other. Raises `struct.error` or `EOFError` at the end."""

    def __init__(self, content: mmap.mmap, position: int) -> None:
        self.content = content
        self.position = position

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        found = struct.unpack_from(layout, self.content, self.position)
        self.position += struct.calcsize(layout)
        return found

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def string(self) -> str:
        length = self.number("Q")
        end = self.position + length
        if end > len(self.content):
            raise EOFError
        found = self.content[self.position : end]
        self.position = end
        return found.decode()

    def value(self) -> Any:
        kind = self.number("I")
        if kind != _ARRAY:
            return self._scalar(kind)
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(_code(kind), count))

    def _scalar(self, kind: int) -> Any:
        return self.string() if kind == _STRING else self.number(_code(kind))


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a setting has the unknown type {kind}")
    return _SCALARS[kind]


def _parsed(content: mmap.mmap, file: Path) -> GgufHeader:
    cursor = _Cursor(content, len(_MAGIC))
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ModelError(
            f"{file} has GGUF version {version}, or another byte order; supported are versions"
            f" {' and '.join(map(str, _VERSIONS))} in little-endian byte order"
        )
    num_tensors, num_settings = cursor.numbers("Q", 2)
    settings = {}
    for _ in range(num_settings):
        name = cursor.string()
        settings[name] = cursor.value()
    found = []
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.number("I")
        found.append(
            (name, cursor.numbers("Q", num_dims), *cursor.numbers("I"), cursor.number("Q"))
        )
    alignment = settings.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _tensor(file, name, dims, kind, start + offset) for name, dims, kind, offset in found
    }
    if len(tensors) < num_tensors:
        raise ValueError("two tensors have one name")
    end = max((tensor.end for tensor in tensors.values()), default=0)
    if end > len(content):
        raise ModelError(
            f"{file} is cut off: it has {len(content):,} of {end:,} bytes; download it again"
        )
    return GgufHeader(content[: cursor.position], settings, tensors)


def _tensor(file: Path, name: str, dims: tuple[int, ...], kind: int, begin: int) -> StoredTensor:
    if kind not in BLOCKS:
        raise ModelError(
            f"{file}: {name} has type {_OTHER_TYPES.get(kind, f'number {kind}')}, which is not"
            f" supported; choose a file whose tensors are of {', '.join(BY_NAME)}"
        )
    block = BLOCKS[kind]
    if not dims or not all(dims) or dims[0] % block.num_values:
        raise ValueError(
            f"{name} of shape {list(dims)} is not made of whole blocks of {block.name}"
        )
    end = begin + math.prod(dims) // block.num_values * block.nbytes
    return StoredTensor(file, block.name, tuple(reversed(dims)), begin, end)
