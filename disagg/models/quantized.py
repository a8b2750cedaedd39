"""Finds out from config.json and the headers of tensors how a checkpoint is quantised.

The tensors tell most of it. config.json has the settings that they cannot tell, and by these
unsupported kinds are refused before any header is read. A quantised checkpoint is presented as a
float checkpoint, in which the pieces of a matrix are one tensor; `quantized_values` reads their
numbers. Knows no torch.

Sources: transformers' `FineGrainedFP8Config`, `GPTQConfig` and `AwqConfig`; `QuantizationConfig` of
https://github.com/vllm-project/compressed-tensors; the READMEs of AutoAWQ, AutoFP8 and GPTQModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from disagg.errors import ModelError
from disagg.kernels.packed_sizes import MXFP4_GROUP, Kind, Packing
from disagg.models.checkpoint import DTYPE_NBYTES, StoredTensor
from disagg.models.family import Fields

Layout: TypeAlias = Literal["plain", "packed", "awq", "gptq", "mxfp4"]

_PLAIN_DTYPES = {"int": "I8", "float": "F8_E4M3"}
_COMPRESSED: Mapping[str, Layout] = {
    "float-quantized": "plain",
    "int-quantized": "plain",
    "naive-quantized": "plain",
    "pack-quantized": "packed",
}
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED_BITS = (4, 8)
FLOAT_SCALES = ("F32", "BF16", "F16")
WORD_BITS = 32
# Scales of activations and of KV are ignored, because these keep their types here.
_UNUSED = (
    *(".input_scale", ".input_zero_point", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale"),
)
# How the name of the tensor with a matrix's numbers ends.
_NUMBERS: Mapping[Layout, str] = {
    "plain": ".weight",
    "packed": ".weight_packed",
    "awq": ".qweight",
    "gptq": ".qweight",
    "mxfp4": "_blocks",
}
_EXPONENT_NBYTES = 4  # a scale that is stored as a power of two becomes a float32


@dataclass(frozen=True, kw_only=True)
class QuantizedFormat:
    """The format of a checkpoint's quantised matrices; its other matrices are floats.

    Attributes:
        name: the name for people.
        layout: which tensors a matrix consists of. One has its numbers in "plain", bytes with two
            numbers each in "mxfp4", and 32-bit words that contain them in other layouts.
        bits: bits of a number.
        dtype: type of the numbers or words, as safetensors names it.
        group_size: numbers of a row that share a scale; None: the tensors tell it.
        block: numbers of rows and columns that share a scale; None: each row, or the whole matrix,
            has one.
        zero_offset: number to add to a zero point as GPTQ stores it.
        has_order: whether a tensor names the group of each column, so that this tensor must exist.
    """

    name: str
    layout: Layout
    bits: int = 8
    dtype: str = "I32"
    group_size: int | None = None
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    has_order: bool = False

    @property
    def kind(self) -> Kind:
        if self.layout == "mxfp4":
            return "mxfp4"
        if self.dtype == "F8_E4M3":
            return "fp8"
        return "int4" if self.bits == 4 else "int8"

    @property
    def num_columns(self) -> int | None:
        """The number of neighbouring columns that share a scale; None: all, or tensors tell it."""
        return self.group_size if self.block is None else self.block[1]

    @property
    def packing(self) -> Packing:
        """How its bits are kept, as far as config.json tells.

        Assumes that scales have 2 bytes, and that formats that may have zeros have them.
        """
        scale_nbytes, has_zeros = 1 if self.kind == "mxfp4" else 2, self.layout in ("awq", "gptq")
        # One group has no order.
        has_order = self.has_order and self.num_columns is not None
        return Packing(self.kind, self.num_columns, scale_nbytes, has_zeros, has_order)


def quantized_format(fields: Fields, *, is_stacked: bool = False) -> QuantizedFormat | None:
    """The format of quantised weights; None if they are floats.

    Args:
        is_stacked: whether all experts of a layer are one tensor.

    Raises:
        ModelError: the format is not supported, or its settings are broken.
    """
    settings = fields.raw.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if is_stacked:
        if method != "mxfp4":
            raise ModelError(
                f"{fields.place}: the weights are quantised ({method}); only float and MXFP4"
                " checkpoints of this family are supported"
            )
        return MXFP4
    read = _METHODS.get(method) if isinstance(settings, dict) and isinstance(method, str) else None
    if read is None:
        raise ModelError(
            f"{fields.place}: the weights are quantised ({method}), which is not supported."
            f" Supported are float weights, {', '.join(_METHODS)} (and GGUF files; for gpt-oss"
            " mxfp4). Choose a checkpoint of the model in one of these"
        )
    return read(_Settings(settings, fields, str(method)))


@dataclass(frozen=True)
class _Settings:
    """The settings in a quantization_config."""

    raw: Mapping[str, Any]
    fields: Fields
    method: str

    def refuse(self, what: str, supported: str) -> ModelError:
        return ModelError(
            f"{self.fields.place}: the weights are quantised ({self.method}) with {what};"
            f" supported {'is' if ',' not in supported else 'are'} {supported}"
        )

    def first(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of several keys that is set."""
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), default)

    def group_size(self, *keys: str) -> int | None:
        size = self.first(*keys)
        if size is None or size == -1:
            return None
        if not _is_size(size):
            raise self.refuse(f"{keys[0]} {size!r}", "a positive number, or -1")
        return int(size)


def _fp8(settings: _Settings) -> QuantizedFormat:
    block = settings.raw.get("weight_block_size")
    return QuantizedFormat(
        name="fp8",
        layout="plain",
        dtype=_PLAIN_DTYPES["float"],
        block=None if block is None else _block(settings, block),
    )


def _awq(settings: _Settings) -> QuantizedFormat:
    bits, version = settings.first("bits", "w_bit"), settings.first("version", "checkpoint_format")
    if not _is_size(bits) or bits != 4:
        raise settings.refuse(f"{bits} bits", "4 bits")
    if version is not None and str(version).lower() != "gemm":
        raise settings.refuse(f"version {version!r}", "gemm")
    size = settings.group_size("group_size", "q_group_size")
    return QuantizedFormat(name="AWQ", layout="awq", bits=4, group_size=size)


def _gptq(settings: _Settings) -> QuantizedFormat:
    bits = settings.raw.get("bits")
    if not _is_size(bits) or bits not in _PACKED_BITS:
        raise settings.refuse(f"{bits} bits", "4, 8 bits")
    version = settings.first("checkpoint_format", "format", default="gptq")
    offsets = {"gptq": 1, "gptq_v2": 0}
    if version not in offsets or settings.raw.get("is_marlin_format"):
        raise settings.refuse(f"the format {version!r}", ", ".join(offsets))
    words = settings.raw.get("pack_dtype", "int32")
    if str(words).removeprefix("torch.") != "int32":
        raise settings.refuse(f"words of {words}", "int32")
    of_layers = settings.raw.get("dynamic") or {}
    if not isinstance(of_layers, dict) or any(not key.startswith("-:") for key in of_layers):
        raise settings.refuse(
            "other settings for some layers (dynamic)", "one setting for all layers"
        )
    return QuantizedFormat(
        name="GPTQ",
        layout="gptq",
        bits=bits,
        group_size=settings.group_size("group_size"),
        zero_offset=offsets[version],
        has_order=bool(settings.raw.get("desc_act")),
    )


def _compressed_tensors(settings: _Settings) -> QuantizedFormat:
    sparsity = settings.raw.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise settings.refuse(f"sparse weights ({sparsity['format']})", "dense weights")
    if (settings.raw.get("transform_config") or {}).get("config_groups"):
        raise settings.refuse("transformed weights (transform_config)", "weights as they are")
    groups = [
        group
        for group in (settings.raw.get("config_groups") or {}).values()
        if group.get("weights") is not None
    ]
    found = {_of_group(settings, group) for group in groups}
    if len(found) != 1:
        what = "no group of weights" if not found else "groups of weights that differ"
        raise settings.refuse(what, "one group (config_groups)")
    return found.pop()


def _of_group(settings: _Settings, group: Mapping[str, Any]) -> QuantizedFormat:
    """The format that an entry of `config_groups` describes."""
    weights = group["weights"]
    format = str(group.get("format") or settings.raw.get("format"))
    if format not in _COMPRESSED:
        raise settings.refuse(f"the format {format}", ", ".join(_COMPRESSED))
    layout, bits, kind = _COMPRESSED[format], weights.get("num_bits"), weights.get("type", "int")
    most = {"int": _PACKED_BITS, "float": (8,)}.get(kind, ())
    if not _is_size(bits) or bits not in most or (layout == "packed" and kind != "int"):
        raise settings.refuse(
            f"{bits} bits ({kind}, {format})", "int of 4, 8 bits, float of 8 bits"
        )
    strategy = weights.get("strategy")
    if strategy not in (*_STRATEGIES, None):
        raise settings.refuse(f"scales of each {strategy}", ", ".join(_STRATEGIES))
    size = weights.get("group_size")
    if size is not None and size != -1 and not _is_size(size):
        raise settings.refuse(f"group_size {size!r}", "a positive number")
    return QuantizedFormat(
        name=f"compressed-tensors, {format}, {bits} bits",
        layout=layout,
        bits=bits,
        dtype="I32" if layout == "packed" else _PLAIN_DTYPES[kind],
        group_size=size if strategy in ("group", None) and size != -1 else None,
        block=_block(settings, weights.get("block_structure")) if strategy == "block" else None,
        has_order=weights.get("actorder") in ("group", "dynamic"),
    )


def _block(settings: _Settings, block: Any) -> tuple[int, int]:
    """The sizes of a block, also in the form "128x128" of older files."""
    if isinstance(block, str) and all(each.isdecimal() for each in block.split("x")):
        block = [int(each) for each in block.split("x")]
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(map(_is_size, block)):
        raise settings.refuse(f"blocks of {block!r}", "blocks of two sizes, such as [128, 128]")
    return block[0], block[1]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_METHODS: Mapping[str, Callable[[_Settings], QuantizedFormat]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}
MXFP4 = QuantizedFormat(name="MXFP4", layout="mxfp4", bits=4, dtype="U8", group_size=MXFP4_GROUP)


@dataclass(frozen=True)
class QuantizedStored(StoredTensor):
    """A matrix [out, in] that is stored quantised, or several [experts, out, in].

    Attributes:
        prefix: the beginning of the names of its pieces.
        format: its format.
        pieces: its tensors by the ends of their names: first the numbers, then "weight_scale" or
            "scales", ...
    """

    prefix: str
    format: QuantizedFormat
    pieces: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces.values())

    @property
    def packing(self) -> Packing:
        scales, size = self.pieces[self.scales_end], self.format.num_columns
        if size is not None and (size >= self.shape[-1] or scales.num_values == 1):
            size = None
        is_exponent = scales.dtype == "F8_E8M0"
        return self.format.packing._replace(
            group=size,
            scale_nbytes=_EXPONENT_NBYTES if is_exponent else DTYPE_NBYTES[scales.dtype],
            has_zeros=any(end in self.pieces for end in ("qzeros", "weight_zero_point")),
            has_order=self.format.has_order and size is not None,
        )

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
    own_end = _NUMBERS[format.layout]
    float_end = "" if format.layout == "mxfp4" else ".weight"
    presented: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, tensor in stored.items():
        module = name.removesuffix(own_end)
        if module == name or (format.layout == "plain" and tensor.is_float):
            continue
        matrix = _matrix(stored, module + own_end[0], format)
        used.update(f"{matrix.prefix}{end}" for end in matrix.pieces)
        presented[f"{module}{float_end}"] = matrix
    for name, tensor in stored.items():
        if name not in used and not name.endswith(_UNUSED):
            if name in presented:
                raise ModelError(f"{name} is in {tensor.file} twice, as floats and quantised")
            presented[name] = tensor
    return presented


def _matrix(
    stored: Mapping[str, StoredTensor], prefix: str, format: QuantizedFormat
) -> QuantizedStored:
    pieces = _Pieces(stored, prefix)
    shape: tuple[int, ...]
    match format.layout:
        case "plain":
            shape = _plain(pieces, format)
        case "packed":
            shape = _packed(pieces, format)
        case "mxfp4":
            shape = _mxfp4(pieces, format)
        case _:
            shape = _transposed(pieces, format)
    numbers = next(iter(pieces.found.values()))
    return QuantizedStored(
        numbers.file, numbers.dtype, shape, numbers.begin, numbers.end, prefix, format, pieces.found
    )


class _Pieces:
    """Finds the tensors of one matrix, and checks them."""

    def __init__(self, stored: Mapping[str, StoredTensor], prefix: str) -> None:
        self._stored = stored
        self._prefix = prefix
        self.found: dict[str, StoredTensor] = {}

    def has(self, end: str) -> bool:
        return f"{self._prefix}{end}" in self._stored

    def take(self, end: str, dtypes: tuple[str, ...], num_dims: int | None = None) -> StoredTensor:
        name = f"{self._prefix}{end}"
        tensor = self._stored.get(name)
        if tensor is None:
            numbers = next(iter(self.found))
            raise ModelError(
                f"{self._prefix}{numbers} is quantised, and {name} is missing; download the"
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
            f"{self._prefix}{end} in {tensor.file} has the shape {list(tensor.shape)}, but by"
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


def _mxfp4(pieces: _Pieces, format: QuantizedFormat) -> tuple[int, ...]:
    """The shape from blocks [experts, out, groups, bytes of a group], with scales of groups."""
    *shape, num_groups, _ = pieces.take("blocks", (format.dtype,), 4).shape
    pieces.check("blocks", (*shape, num_groups, MXFP4_GROUP // 2))
    pieces.take("scales", (format.dtype,))
    pieces.check("scales", (*shape, num_groups))
    return (*shape, num_groups * MXFP4_GROUP)


def _scales_shape(format: QuantizedFormat, num_out: int, num_in: int) -> tuple[int, int]:
    if format.block is not None:
        rows, columns = format.block
        return -(-num_out // rows), -(-num_in // columns)
    return num_out, 1 if format.group_size is None else -(-num_in // format.group_size)
