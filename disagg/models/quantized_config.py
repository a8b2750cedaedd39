"""Reads from config.json how weights are quantised, and refuses unsupported kinds. Knows no torch.

The tensors themselves tell most of it (`quantized_tensors`). This module reads the settings that
they cannot tell, and refuses unsupported checkpoints before any tensor is read.

Sources: transformers' `FineGrainedFP8Config`, `GPTQConfig` and `AwqConfig`; `QuantizationConfig` of
https://github.com/vllm-project/compressed-tensors; the READMEs of AutoAWQ, AutoFP8 and GPTQModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from disagg.errors import ModelError
from disagg.models.config_fields import Fields

Layout: TypeAlias = Literal["plain", "packed", "awq", "gptq"]

_PLAIN_DTYPES = {"int": "I8", "float": "F8_E4M3"}
_COMPRESSED: Mapping[str, Layout] = {
    "float-quantized": "plain",
    "int-quantized": "plain",
    "naive-quantized": "plain",
    "pack-quantized": "packed",
}
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED_BITS = (4, 8)


@dataclass(frozen=True, kw_only=True)
class QuantizedFormat:
    """The format of a checkpoint's quantised matrices; its other matrices are floats.

    Attributes:
        name: the name for people.
        layout: which tensors a matrix consists of. In "plain" one tensor has its numbers; in other
            layouts one has 32-bit words that contain them.
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


def quantized_format(fields: Fields) -> QuantizedFormat | None:
    """The format of quantised weights; None if they are floats.

    Raises:
        ModelError: the format is not supported, or its settings are broken.
    """
    settings = fields.raw.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
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
