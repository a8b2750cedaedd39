"""Presents a quantised checkpoint as a float checkpoint: finds the tensors of each matrix.

It reads headers only, and raises errors for tensors that do not fit together. `quantized_values`
reads the numbers. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.errors import ModelError
from disagg.models.checkpoint import StoredTensor
from disagg.models.quantized_config import QuantizedFormat

FLOAT_SCALES = ("F32", "BF16", "F16")
WORD_BITS = 32
# Scales of activations and of KV are ignored, because these keep their types here.
_UNUSED = (
    *(".input_scale", ".input_zero_point", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale"),
)
_NUMBERS = {"plain": "weight", "packed": "weight_packed", "awq": "qweight", "gptq": "qweight"}


@dataclass(frozen=True)
class QuantizedStored(StoredTensor):
    """A matrix [out, in] that is stored quantised.

    Attributes:
        module: its name without ".weight".
        format: its format.
        pieces: its tensors by the ends of their names: first the numbers, then "weight_scale" or
            "scales", ...
    """

    module: str
    format: QuantizedFormat
    pieces: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """The size of its pieces in the files."""
        return sum(piece.end - piece.begin for piece in self.pieces.values())

    @property
    def group_size(self) -> int | None:
        """The number of neighbouring columns that share a scale; None: all."""
        format, num_in = self.format, self.shape[1]
        size = format.group_size if format.block is None else format.block[1]
        is_one = size is None or size >= num_in or self.pieces[self.scales_end].num_values == 1
        return None if is_one else size

    @property
    def scales_end(self) -> str:
        """The end of the name of the piece with the scales."""
        return next(end for end in self.pieces if end.startswith(("weight_scale", "scales")))


def as_floats(
    stored: Mapping[str, StoredTensor], format: QuantizedFormat
) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint as if it had floats.

    Tensors that belong to no matrix are kept, and refused later.

    Raises:
        ModelError: a piece is missing, or does not fit the others; the message names it.
    """
    own_end = f".{_NUMBERS[format.layout]}"
    presented: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, tensor in stored.items():
        module = name.removesuffix(own_end)
        if module == name or (format.layout == "plain" and tensor.is_float):
            continue
        matrix = _matrix(stored, module, format)
        used.update(f"{module}.{end}" for end in matrix.pieces)
        presented[f"{module}.weight"] = matrix
    for name, tensor in stored.items():
        if name not in used and not name.endswith(_UNUSED):
            if name in presented:
                raise ModelError(f"{name} is in {tensor.file} twice, as floats and quantised")
            presented[name] = tensor
    return presented


def _matrix(
    stored: Mapping[str, StoredTensor], module: str, format: QuantizedFormat
) -> QuantizedStored:
    pieces = _Pieces(stored, module)
    match format.layout:
        case "plain":
            shape = _plain(pieces, format)
        case "packed":
            shape = _packed(pieces, format)
        case _:
            shape = _transposed(pieces, format)
    numbers = next(iter(pieces.found.values()))
    return QuantizedStored(
        numbers.file, numbers.dtype, shape, numbers.begin, numbers.end, module, format, pieces.found
    )


class _Pieces:
    """Finds the tensors of one matrix, and checks them."""

    def __init__(self, stored: Mapping[str, StoredTensor], module: str) -> None:
        self._stored = stored
        self._module = module
        self.found: dict[str, StoredTensor] = {}

    def has(self, end: str) -> bool:
        return f"{self._module}.{end}" in self._stored

    def take(self, end: str, dtypes: tuple[str, ...], num_dims: int | None = None) -> StoredTensor:
        name = f"{self._module}.{end}"
        tensor = self._stored.get(name)
        if tensor is None:
            numbers = next(iter(self.found))
            raise ModelError(
                f"{self._module}.{numbers} is quantised, and {name} is missing; download the"
                " checkpoint again"
            )
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{name} in {tensor.file} is {tensor.dtype}, but must be {' or '.join(dtypes)}"
            )
        if num_dims is not None and len(tensor.shape) != num_dims:
            raise self.wrong(end, tensor, f"{num_dims} dimensions")
        self.found[end] = tensor
        return tensor

    def check(self, end: str, shape: tuple[int, ...]) -> None:
        tensor = self.found[end]
        if tensor.shape != shape:
            raise self.wrong(end, tensor, str(list(shape)))

    def wrong(self, end: str, tensor: StoredTensor, wanted: str) -> ModelError:
        return ModelError(
            f"{self._module}.{end} in {tensor.file} has the shape {list(tensor.shape)}, but by"
            f" config.json it should be {wanted}"
        )


def _plain(pieces: _Pieces, format: QuantizedFormat) -> tuple[int, int]:
    """The shape from weight [out, in], with one scale, or scales of rows, groups or blocks."""
    numbers = pieces.take("weight", (format.dtype,), 2)
    num_out, num_in = numbers.shape
    end = "weight_scale_inv" if pieces.has("weight_scale_inv") else "weight_scale"
    scales = pieces.take(end, (*FLOAT_SCALES, "F8_E8M0"))
    shape: tuple[int, ...] = _scales_shape(format, num_out, num_in)
    if scales.num_values == 1:
        shape = scales.shape
    elif scales.shape == (num_out,) and shape == (num_out, 1):
        shape = (num_out,)
    pieces.check(end, shape)
    if format.dtype == "I8" and pieces.has("weight_zero_point"):
        pieces.take("weight_zero_point", ("I8",))
        pieces.check("weight_zero_point", shape)
    return num_out, num_in


def _packed(pieces: _Pieces, format: QuantizedFormat) -> tuple[int, int]:
    """The shape from weight_packed [out, in / numbers in a word], with scales of rows or groups."""
    in_a_word = WORD_BITS // format.bits
    numbers = pieces.take("weight_packed", (format.dtype,), 2)
    num_out, num_in = numbers.shape[0], numbers.shape[1] * in_a_word
    pieces.take("weight_shape", ("I64", "I32"), 1)
    pieces.check("weight_shape", (2,))
    scales = pieces.take("weight_scale", FLOAT_SCALES)
    shape = _scales_shape(format, num_out, num_in)
    pieces.check("weight_scale", scales.shape if scales.num_values == 1 else shape)
    if pieces.has("weight_zero_point"):
        pieces.take("weight_zero_point", ("I32",))
        pieces.check("weight_zero_point", (-(-num_out // in_a_word), shape[1]))
    if format.has_order or pieces.has("weight_g_idx"):
        pieces.take("weight_g_idx", ("I32", "I64"))
        pieces.check("weight_g_idx", (num_in,))
    return num_out, num_in


def _transposed(pieces: _Pieces, format: QuantizedFormat) -> tuple[int, int]:
    """The shape from AWQ's qweight [in, out / 8], or GPTQ's [in / numbers in a word, out].

    Both have scales [groups, out] and qzeros [groups, out / numbers in a word].
    """
    in_a_word = WORD_BITS // format.bits
    numbers = pieces.take("qweight", (format.dtype,), 2)
    num_in, num_out = numbers.shape
    if format.layout == "awq":
        num_out *= in_a_word
    else:
        num_in *= in_a_word
    pieces.take("scales", FLOAT_SCALES)
    pieces.take("qzeros", ("I32",))
    num_groups = _scales_shape(format, num_out, num_in)[1]
    pieces.check("scales", (num_groups, num_out))
    pieces.check("qzeros", (num_groups, -(-num_out // in_a_word)))
    if format.layout == "gptq" and (format.has_order or pieces.has("g_idx")):
        pieces.take("g_idx", ("I32", "I64"))
        pieces.check("g_idx", (num_in,))
    return num_out, num_in


def _scales_shape(format: QuantizedFormat, num_out: int, num_in: int) -> tuple[int, int]:
    if format.block is not None:
        rows, columns = format.block
        return -(-num_out // rows), -(-num_in // columns)
    return num_out, 1 if format.group_size is None else -(-num_in // format.group_size)
