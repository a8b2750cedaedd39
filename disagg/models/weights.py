"""Weights from safetensors or GGUF into the fused tensors of a decoder.

Checks every name, shape and value before the first forward pass. The order of layers and the
fusing of q, k, v and of gate, up are decided here; nothing here computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.errors import ModelError
from disagg.models.checkpoint import StoredTensor
from disagg.models.description import ModelDescription
from disagg.models.gguf_model import GgufStored
from disagg.models.model_config import ModelConfig

Progress: TypeAlias = Callable[[int, int], None]  # bytes loaded so far, bytes in all
Shape: TypeAlias = tuple[int, ...]

FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_NAMES_IN_AN_ERROR = 8


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; vectors are None where the family has none."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, num_heads * head_dim]
    output_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a decoder. `lm_head` is `embedding` itself where the two are tied.

    `layers` of a checkpoint can be gone through once: each is read when it is asked for, so that
    whoever packs layers never holds all of them twice.
    """

    embedding: Tensor  # [vocab, hidden]
    layers: Iterable[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint. Parts of one field are stacked along their first dimension."""

    name: str
    shape: Shape


def layer_parts(config: ModelConfig, layer: int) -> dict[str, list[Part]]:
    """Say which checkpoint tensors make up each field of `LayerWeights`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    parts = {
        "input_norm": [Part(f"{prefix}.input_layernorm.weight", (hidden,))],
        "qkv": [Part(f"{attention}.{name}.weight", (size, hidden)) for name, size in qkv.items()],
        "output": [Part(f"{attention}.o_proj.weight", (hidden, q_size))],
        "post_norm": [Part(f"{prefix}.post_attention_layernorm.weight", (hidden,))],
        "gate_up": [Part(f"{mlp}.{name}.weight", (inner, hidden)) for name in gate_up],
        "down": [Part(f"{mlp}.down_proj.weight", (hidden, inner))],
    }
    if config.qkv_bias:
        parts["qkv_bias"] = [Part(f"{attention}.{name}.bias", (qkv[name],)) for name in qkv]
    if config.output_bias:
        parts["output_bias"] = [Part(f"{attention}.o_proj.bias", (hidden,))]
    if config.mlp_bias:
        parts["gate_up_bias"] = [Part(f"{mlp}.{name}.bias", (inner,)) for name in gate_up]
        parts["down_bias"] = [Part(f"{mlp}.down_proj.bias", (hidden,))]
    if config.qk_norm:
        parts["q_norm"] = [Part(f"{attention}.q_norm.weight", (config.head_dim,))]
        parts["k_norm"] = [Part(f"{attention}.k_norm.weight", (config.head_dim,))]
    return parts


def outer_parts(config: ModelConfig) -> dict[str, list[Part]]:
    """Say which checkpoint tensors lie outside the layers."""
    table = (config.vocab_size, config.hidden_size)
    parts = {
        "embedding": [Part("model.embed_tokens.weight", table)],
        "norm": [Part("model.norm.weight", (config.hidden_size,))],
    }
    if not config.tie_word_embeddings:
        parts["lm_head"] = [Part("lm_head.weight", table)]
    return parts


def num_weights(config: ModelConfig) -> int:
    """Values in all tensors of a checkpoint."""
    layers = (layer_parts(config, layer) for layer in range(config.num_layers))
    fields = (outer_parts(config), *layers)
    return sum(_num_values(part.shape) for each in fields for part in _flatten(each))


def check_weights(model: ModelDescription) -> None:
    """Compare the tensors there are with what the decoder needs.

    Raises:
        ModelError: a file is damaged, or tensors are missing, unexpected, of the wrong shape or
            not floating point; the message names them.
    """
    config = model.config
    fields = [outer_parts(config)]
    fields += (layer_parts(config, layer) for layer in range(config.num_layers))
    wanted = {part.name: part for each in fields for part in _flatten(each)}
    _check_names(model, wanted)


def load_weights(
    model: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> DecoderWeights:
    """Read a checkpoint, cast to `dtype`, onto `device`; layers are read later, one by one.

    Raises:
        ModelError: tensors are missing, unexpected, of the wrong shape, unreadable or hold NaN;
            the message names them. Of a layer's values this is found when the layer is read.
    """
    check_weights(model)
    config = model.config
    outer = outer_parts(config)
    layers = [layer_parts(config, layer) for layer in range(config.num_layers)]
    reader = _Reader(model.tensors, dtype, device, num_weights(config) * dtype.itemsize, progress)
    tables = {field: reader.read(parts) for field, parts in outer.items()}
    tables.setdefault("lm_head", tables["embedding"])
    # The reader goes with the last layer, and its mapped files with it.
    return DecoderWeights(layers=(reader.read_layer(fields) for fields in layers), **tables)


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> DecoderWeights:
    """Draw weights of the right shapes: normal matrices of deviation 0.02, norms of one."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(parts: list[Part]) -> Tensor:
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if parts[0].name.endswith(("norm.weight",)):
            return torch.ones(shape, dtype=dtype, device=device)
        drawn = torch.empty(shape, dtype=torch.float32, device=device)
        return drawn.normal_(0.0, 0.02, generator=generator).to(dtype)

    tables = {field: draw(parts) for field, parts in outer_parts(config).items()}
    tables.setdefault("lm_head", tables["embedding"])
    layers = []
    for layer in range(config.num_layers):
        fields = {field: draw(parts) for field, parts in layer_parts(config, layer).items()}
        layers.append(_layer(fields))
    return DecoderWeights(layers=tuple(layers), **tables)


def _flatten(fields: Mapping[str, list[Part]]) -> Iterator[Part]:
    return (part for parts in fields.values() for part in parts)


def _extremes(values: Tensor) -> list[float]:
    """The least and the largest value; NaN if there is one. A tenth of the time of `isfinite`."""
    return [float(extreme) for extreme in torch.aminmax(values)]


def _num_values(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def _layer(fields: Mapping[str, Tensor]) -> LayerWeights:
    optional = ("qkv_bias", "q_norm", "k_norm", "output_bias", "gate_up_bias", "down_bias")
    return LayerWeights(**{**dict.fromkeys(optional), **fields})  # type: ignore[arg-type]


def _check_names(model: ModelDescription, wanted: Mapping[str, Part]) -> None:
    """Raise one error that names everything that does not fit."""
    stored = model.tensors
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = [name for name in wanted if name not in stored]
    unexpected = [
        name
        for name in stored
        if name not in wanted and name not in ignored and not name.endswith("rotary_emb.inv_freq")
    ]
    reshaped = [
        f"{name} is {list(stored[name].shape)}, not {list(part.shape)}"
        for name, part in wanted.items()
        if name in stored and stored[name].shape != part.shape
    ]
    not_float = [
        f"{name} is {stored[name].dtype}"
        for name in wanted
        if name in stored and not _is_read(stored[name])
    ]
    problems = [
        f"{title}: {_some(names)}"
        for title, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("wrong shapes", reshaped),
            ("types that are not loaded, only float weights are", not_float),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"the weights in {model.source} do not fit its configuration ({model.config.family}). "
            + "; ".join(problems)
        )


def _is_read(stored: StoredTensor) -> bool:
    # A GGUF file with another type was refused when it was described.
    return isinstance(stored, GgufStored) or stored.dtype in FLOATS


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_AN_ERROR])
    hidden = len(names) - _MAX_NAMES_IN_AN_ERROR
    return f"{shown} and {hidden} more" if hidden > 0 else shown


class _Reader:
    """Reads parts into fused tensors, one file open at a time."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        device: torch.device,
        num_total: int,
        progress: Progress | None,
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._total_nbytes = num_total
        self._loaded_nbytes = 0
        self._opened: dict[Path, safe_open] = {}

    def read_layer(self, fields: Mapping[str, list[Part]]) -> LayerWeights:
        return _layer({field: self.read(parts) for field, parts in fields.items()})

    def read(self, parts: list[Part]) -> Tensor:
        """Stack `parts` along their first dimension."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        fused = torch.empty(shape, dtype=self._dtype, device=self._device)
        row = 0
        for part in parts:
            rows = fused[row : row + part.shape[0]]
            rows.copy_(self._one(part.name))
            if not all(map(math.isfinite, _extremes(rows))):
                raise ModelError(
                    f"{part.name} in {self._stored[part.name].file} holds NaN or infinite values "
                    f"as {self._dtype}; the file is damaged, download it again"
                )
            row += part.shape[0]
        self._loaded_nbytes += fused.nbytes
        if self._progress is not None:
            self._progress(self._loaded_nbytes, self._total_nbytes)
        return fused

    def _one(self, name: str) -> Tensor:
        stored = self._stored[name]
        file = stored.file
        try:
            if isinstance(stored, GgufStored):
                from disagg.models.gguf_values import read_values

                return read_values(stored)
            if file not in self._opened:
                self._opened[file] = safe_open(file, framework="pt")
            tensor: Tensor = self._opened[file].get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{name} cannot be read from {file}: {error}") from error
        return tensor
