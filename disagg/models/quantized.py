"""Finds out from config.json and the headers of tensors how a checkpoint is quantised.

The tensors tell most of it. config.json has the settings that they cannot tell, and by these
unsupported kinds are refused before any header is read. A quantised checkpoint is presented as a
float checkpoint, in which the pieces of a matrix are one tensor. `LAYOUTS` describes the pieces,
for the checks here and for `quantized_values`, which reads their numbers. Knows no torch.

Sources: transformers' `FineGrainedFP8Config`, `GPTQConfig` and `AwqConfig`; `QuantizationConfig` of
https://github.com/vllm-project/compressed-tensors; the READMEs of AutoAWQ, AutoFP8 and GPTQModel;
NVFP4 and MXFP4: `compressors/quantized_compressors/nvfp4_quantized.py` there, and `modelopt.py` of
vLLM for what NVIDIA's ModelOpt writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from disagg.errors import ModelError
from disagg.kernels.packed_sizes import FP4_KINDS, MXFP4_GROUP, NVFP4_GROUP, Kind, Packing
from disagg.models.checkpoint import DTYPE_NBYTES, Range, StoredTensor
from disagg.models.family import Fields

LayoutName: TypeAlias = Literal[
    "plain", "packed", "awq", "gptq", "mxfp4", "mxfp4 packed", "nvfp4 packed", "modelopt"
]

_PLAIN_DTYPES = {"int": "I8", "float": "F8_E4M3"}
_COMPRESSED: Mapping[str, LayoutName] = {
    "float-quantized": "plain",
    "int-quantized": "plain",
    "naive-quantized": "plain",
    "pack-quantized": "packed",
    "mxfp4-pack-quantized": "mxfp4 packed",
    "nvfp4-pack-quantized": "nvfp4 packed",
}
# Types and bits of numbers of compressed-tensors.
_NUMBERS: Mapping[LayoutName, Sequence[tuple[str, int]]] = {
    "plain": (("int", 4), ("int", 8), ("float", 8)),
    "packed": (("int", 4), ("int", 8)),
    "mxfp4 packed": (("float", 4),),
    "nvfp4 packed": (("float", 4),),
}
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED_BITS = (4, 8)
_FLOAT_SCALES = ("F32", "BF16", "F16")
_INDICES = ("I32", "I64")
WORD_BITS = 32
# Scales of KV, and of activations that stay in 16 bits, are ignored.
_UNUSED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale"),
)
# How transformers' fp8 calls pieces.
_OTHER_NAMES = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
_EXPONENT_NBYTES = 4  # a scale that is stored as a power of two becomes a float32
# Which dimension of a matrix each axis of a piece divides.
_DIVIDED = {"e": -3, "r": -2, "R": -2, "b": -2, "c": -1, "C": -1, "g": -1}
# Axes that divide none.
_WHOLE: Mapping[str, Range] = {"h": (0, MXFP4_GROUP // 2), "d": (0, 2)}


class MatrixPiece(NamedTuple):
    """One of the tensors of a matrix.

    Attributes:
        end: the end of its name.
        axes: what its dimensions count: experts (e), rows (r), columns (c), words or bytes that
            hold several rows (R) or columns (C), blocks of rows (b) and groups of columns (g) with
            one scale, bytes of a group (h), dimensions (d).
        dtypes: the possible types; empty: that of the format.
        is_needed: whether a matrix without it is refused.
    """

    end: str
    axes: str
    dtypes: tuple[str, ...] = ()
    is_needed: bool = True


class Layout(NamedTuple):
    """The tensors of which a matrix consists.

    Attributes:
        pieces: by role. "numbers" come first. "order" names the group of each column, and is also
            needed if config.json says so. "shape" repeats the shape of the matrix. "inputs" is the
            scale of its activations. "global" is a second scale of all numbers.
        places: place in a word of the first number, of the second, ...; empty: in order.
        divides: whether the global scale divides numbers instead of multiplying them.
    """

    pieces: Mapping[str, MatrixPiece]
    places: tuple[int, ...] = ()
    divides: bool = False


LAYOUTS: Mapping[LayoutName, Layout] = {
    "plain": Layout(
        {
            "numbers": MatrixPiece("weight", "rc"),
            "scales": MatrixPiece("weight_scale", "bg", (*_FLOAT_SCALES, "F8_E8M0")),
            "zeros": MatrixPiece("weight_zero_point", "bg", ("I8",), is_needed=False),
            "inputs": MatrixPiece("input_scale", "", _FLOAT_SCALES, is_needed=False),
        }
    ),
    "packed": Layout(
        {
            "numbers": MatrixPiece("weight_packed", "rC"),
            "scales": MatrixPiece("weight_scale", "rg", _FLOAT_SCALES),
            "zeros": MatrixPiece("weight_zero_point", "Rg", ("I32",), is_needed=False),
            "order": MatrixPiece("weight_g_idx", "c", _INDICES, is_needed=False),
            "shape": MatrixPiece("weight_shape", "d", _INDICES),
        }
    ),
    "awq": Layout(
        {
            "numbers": MatrixPiece("qweight", "cR"),
            "scales": MatrixPiece("scales", "gr", _FLOAT_SCALES),
            "zeros": MatrixPiece("qzeros", "gR", ("I32",)),
        },
        places=(0, 4, 1, 5, 2, 6, 3, 7),
    ),
    "gptq": Layout(
        {
            "numbers": MatrixPiece("qweight", "Cr"),
            "scales": MatrixPiece("scales", "gr", _FLOAT_SCALES),
            "zeros": MatrixPiece("qzeros", "gR", ("I32",)),
            "order": MatrixPiece("g_idx", "c", _INDICES, is_needed=False),
        }
    ),
    "mxfp4": Layout(
        {"numbers": MatrixPiece("blocks", "ergh"), "scales": MatrixPiece("scales", "erg")}
    ),
    "mxfp4 packed": Layout(
        {
            "numbers": MatrixPiece("weight_packed", "rC"),
            "scales": MatrixPiece("weight_scale", "rg", ("U8",)),
        }
    ),
    "nvfp4 packed": Layout(
        {
            "numbers": MatrixPiece("weight_packed", "rC"),
            "scales": MatrixPiece("weight_scale", "rg", ("F8_E4M3",)),
            "global": MatrixPiece("weight_global_scale", "", ("F32",)),
        },
        divides=True,
    ),
    "modelopt": Layout(
        {
            "numbers": MatrixPiece("weight", "rC"),
            "scales": MatrixPiece("weight_scale", "rg", ("F8_E4M3",)),
            "global": MatrixPiece("weight_scale_2", "", ("F32",)),
        }
    ),
}


@dataclass(frozen=True, kw_only=True)
class QuantizedFormat:
    """The format of a checkpoint's quantised matrices; its other matrices are floats.

    Attributes:
        name: the name for people.
        layout: its name in `LAYOUTS`.
        bits: bits of a number.
        dtype: type of the numbers or words, as safetensors names it.
        group_size: numbers of a row that share a scale; None: the tensors tell it.
        block: numbers of rows and columns that share a scale; None: each row, or the whole matrix,
            has one.
        zero_offset: number to add to a zero point as GPTQ stores it.
        has_order: whether a tensor names the group of each column, so that this tensor must exist.
        inputs: how activations are quantised to numbers of the same type: with a scale of their
            "own" for each row, or a "static" one that the checkpoint has; empty: they are not.
    """

    name: str
    layout: LayoutName
    bits: int = 8
    dtype: str = "I32"
    group_size: int | None = None
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    has_order: bool = False
    inputs: Literal["", "own", "static"] = ""

    @property
    def pieces(self) -> Mapping[str, MatrixPiece]:
        return LAYOUTS[self.layout].pieces

    @property
    def kind(self) -> Kind:
        if self.dtype == "U8":
            return "nvfp4" if "global" in self.pieces else "mxfp4"
        if self.dtype == "F8_E4M3":
            return "fp8"
        return "int4" if self.bits == 4 else "int8"

    @property
    def num_columns(self) -> int | None:
        """The number of neighbouring columns that share a scale; None: all, or tensors tell it."""
        return self.group_size if self.block is None else self.block[1]

    def unit(self, axis: str) -> int | None:
        """How many experts, rows or columns a place of an axis stands for; None: all."""
        if axis in "RC":
            return (8 if self.dtype == "U8" else WORD_BITS) // self.bits
        if axis == "b":
            return 1 if self.block is None else self.block[0]
        return self.num_columns if axis == "g" else 1

    def ranges(self, piece: MatrixPiece, box: Sequence[Range]) -> tuple[Range, ...]:
        """The range of each axis of a piece that holds the values of a box of the matrix."""
        return tuple(
            _WHOLE[axis] if axis in _WHOLE else units(box[_DIVIDED[axis]], self.unit(axis))
            for axis in piece.axes
        )

    @property
    def packing(self) -> Packing:
        """How its bits are kept, as far as config.json tells.

        Assumes that scales have 2 bytes, and that formats that may have zeros have them.
        """
        scale_nbytes, zeros = 1 if self.kind in FP4_KINDS else 2, self.pieces.get("zeros")
        has_zeros = zeros is not None and zeros.is_needed
        # One group has no order.
        has_order = self.has_order and self.num_columns is not None
        return Packing(self.kind, self.num_columns, scale_nbytes, has_zeros, has_order)


def quantized_format(fields: Fields, *, stacked: str = "") -> QuantizedFormat | None:
    """The format of quantised weights; None if they are floats.

    Args:
        stacked: how all experts of a layer are one tensor (`ExpertNames.stacked`).

    Raises:
        ModelError: the format is not supported, or its settings are broken.
    """
    settings = fields.raw.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if stacked:
        if method != "mxfp4" or stacked != "alternating":
            also = " and MXFP4" * (stacked == "alternating")
            raise ModelError(
                f"{fields.place}: the weights are quantised ({method}); only float{also}"
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
        inputs="static" if settings.raw.get("activation_scheme") == "static" else "own",
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
    if len(found) > 1:
        found = {replace(each, inputs="") for each in found}
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
    if not _is_size(bits) or (kind, bits) not in _NUMBERS[layout]:
        possible = (f"{each} of {number} bits" for each, number in _NUMBERS[layout])
        raise settings.refuse(f"{bits} bits ({kind}, {format})", ", ".join(possible))
    strategy = weights.get("strategy")
    if bits == 4 and kind == "float":
        return _fp4(settings, layout, weights.get("group_size"))
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
        inputs="" if layout == "packed" else _inputs(group.get("input_activations"), kind),
    )


def _fp4(settings: _Settings, layout: LayoutName, group_size: object) -> QuantizedFormat:
    """Activations in 4 bits are left in 16, which loses less."""
    name, size = ("MXFP4", MXFP4_GROUP) if layout == "mxfp4 packed" else ("NVFP4", NVFP4_GROUP)
    if group_size not in (size, None):
        raise settings.refuse(f"group_size {group_size!r}", f"{size}")
    return QuantizedFormat(name=name, layout=layout, bits=4, dtype="U8", group_size=size)


def _modelopt(settings: _Settings) -> QuantizedFormat:
    """Of config.json, or of hf_quant_config.json, which has one level more.

    Which modules are excluded is not read: their tensors are floats.
    """
    said = settings.raw.get("quantization") or settings.raw
    algorithm = str(said.get("quant_algo")).upper()
    if algorithm == "FP8":
        return QuantizedFormat(
            name="fp8", layout="plain", dtype=_PLAIN_DTYPES["float"], inputs="static"
        )
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise settings.refuse(f"quant_algo {algorithm}", "NVFP4, W4A16_NVFP4, FP8")
    return _fp4(settings, "modelopt", said.get("group_size"))


def _inputs(activations: Mapping[str, Any] | None, kind: str) -> Literal["", "own", "static"]:
    """How activations are quantised to numbers as the weights' are, without a zero point."""
    said = activations or {}
    is_alike = said.get("num_bits") == 8 and said.get("type", "int") == kind
    if not is_alike or said.get("symmetric") is False:
        return ""
    return "own" if said.get("dynamic") else "static"


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
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
MXFP4 = QuantizedFormat(name="MXFP4", layout="mxfp4", bits=4, dtype="U8", group_size=MXFP4_GROUP)


@dataclass(frozen=True)
class QuantizedStored(StoredTensor):
    """A matrix [out, in] that is stored quantised, or several [experts, out, in].

    Attributes:
        pieces: its tensors by role, with their names in the file.
    """

    format: QuantizedFormat
    pieces: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces.values())

    @property
    def packing(self) -> Packing:
        scales, size = self.pieces["scales"], self.format.num_columns
        is_one = size is not None and (size >= self.shape[-1] or scales.num_values == 1)
        if is_one and self.format.kind not in FP4_KINDS:
            size = None
        is_exponent = scales.dtype == "F8_E8M0"
        return self.format.packing._replace(
            group=size,
            scale_nbytes=_EXPONENT_NBYTES if is_exponent else DTYPE_NBYTES[scales.dtype],
            has_zeros="zeros" in self.pieces,
            has_order=self.format.has_order and size is not None,
        )


def as_floats(
    stored: Mapping[str, StoredTensor], format: QuantizedFormat
) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint as if it had floats.

    Tensors that belong to no matrix are kept, and refused later.

    Raises:
        ModelError: a piece is missing, or does not fit the others; the message names it.
    """
    between, float_end = ("_", "") if format.layout == "mxfp4" else (".", ".weight")
    own_end = between + format.pieces["numbers"].end
    presented: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, tensor in stored.items():
        module = name.removesuffix(own_end)
        if module == name or (own_end == ".weight" and tensor.is_float):
            continue
        presented[f"{module}{float_end}"] = _matrix(stored, module + between, format, used)
    for name, tensor in stored.items():
        if name not in used and not name.endswith(_UNUSED):
            if name in presented:
                raise ModelError(f"{name} is in {tensor.file} twice, as floats and quantised")
            presented[name] = tensor
    return presented


def _matrix(
    stored: Mapping[str, StoredTensor], prefix: str, format: QuantizedFormat, used: set[str]
) -> QuantizedStored:
    """The matrix of which the names of all pieces begin with `prefix`; they are added to `used`."""
    found, shape = dict[str, StoredTensor](), tuple[int, ...]()
    for role, piece in format.pieces.items():
        if role == "zeros" and format.kind == "fp8":
            continue
        name, other = prefix + piece.end, prefix + _OTHER_NAMES.get(piece.end, piece.end)
        name = other if other in stored else name
        tensor = stored.get(name)
        if tensor is None:
            if piece.is_needed or (role == "order" and format.has_order):
                raise ModelError(
                    f"{prefix}{format.pieces['numbers'].end} is quantised, and {name} is missing;"
                    " download the checkpoint again"
                )
            continue
        dtypes = piece.dtypes or (format.dtype,)
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{name} in {tensor.file} is {tensor.dtype}, but must be {' or '.join(dtypes)}"
            )
        if role == "numbers":
            if len(tensor.shape) != len(piece.axes):
                raise _misshapen(name, tensor, f"{len(piece.axes)} dimensions")
            shape = _shape_of(tensor, piece, format)
        wanted = tuple(end for _, end in format.ranges(piece, [(0, size) for size in shape]))
        # Scales of rows may be one number for all, or lack the axis of groups.
        is_usual = piece.axes in ("rg", "bg", "")
        fits = is_usual and (tensor.num_values == 1 or (*tensor.shape, 1) == wanted)
        if tensor.shape != wanted and not fits:
            raise _misshapen(name, tensor, str(list(wanted)))
        found[role] = replace(tensor, name=tensor.name or name)
        used.add(name)
    numbers = found["numbers"]
    return QuantizedStored(
        numbers.file, numbers.dtype, shape, numbers.begin, numbers.end, format, found
    )


def _shape_of(
    numbers: StoredTensor, piece: MatrixPiece, format: QuantizedFormat
) -> tuple[int, ...]:
    """The shape of a matrix whose numbers are in a piece of the shape of `numbers`."""
    shape = [0] * (3 if "e" in piece.axes else 2)
    for axis, size in zip(piece.axes, numbers.shape, strict=True):
        if axis in _DIVIDED:
            shape[_DIVIDED[axis]] = size * (format.unit(axis) or 1)
    return tuple(shape)


def _misshapen(name: str, tensor: StoredTensor, wanted: str) -> ModelError:
    return ModelError(
        f"{name} in {tensor.file} has the shape {list(tensor.shape)}, but by config.json it should"
        f" be {wanted}"
    )


def units(own: Range, size: int | None) -> Range:
    """The words, groups or blocks that contain `own`. size: of one; None: there is only one."""
    return (0, 1) if size is None else (own[0] // size, -(-own[1] // size))
