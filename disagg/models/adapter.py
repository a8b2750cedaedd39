"""Reads the description of a LoRA adapter, a directory that PEFT has saved. Knows no torch.

An adapter adds `scale * B (A x)` to the outputs of some matrices of its model. All that could make
it wrong for the model is checked here, from the headers, before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from disagg.adapters import Adapter, AdapterEntry
from disagg.errors import ModelError
from disagg.models.checkpoint import StoredTensor, read_header, read_text
from disagg.models.description import ModelDescription, text_name
from disagg.models.model_config import ModelConfig
from disagg.models.parts import Fields, Part, layer_parts, some
from disagg.models.share import WHOLE, Share

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIELDS = ("qkv", "output", "gate_up", "down")  # of a layer; those of MLPs only if it has no experts
MAX_RANK = 256
_RANK_UNIT = 16
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PIECE_NBYTES = 1 << 22
# Settings that change what an adapter computes, and why one that sets them is refused.
_REFUSED = {
    "use_dora": "DoRA also normalises the columns of the matrices",
    "modules_to_save": "whole matrices are replaced (modules_to_save)",
    "alpha_pattern": "its alpha differs by module (alpha_pattern)",
    "megatron_config": "its layers are those of Megatron",
    "fan_in_fan_out": "its matrices are stored as [in, out] (fan_in_fan_out)",
    "layer_replication": "layers are repeated (layer_replication)",
    "trainable_token_indices": "embeddings of tokens are replaced (trainable_token_indices)",
    "use_qalora": "its matrices read groups of columns (QA-LoRA)",
    "lora_bias": "its matrices have biases (lora_bias)",
    "target_parameters": "parameters are adapted that are no matrices (target_parameters)",
    "corda_config": "CorDA changes the weights of the model",
    "arrow_config": "Arrow routes tokens to adapters",
    "alora_invocation_tokens": "it begins in the middle of a prompt (aLoRA)",
}
_STARTS = ("gaussian", "eva", "orthogonal")  # that leave the model as it is, as True and False do


class Site(NamedTuple):
    """Where a module's output lies: the rows of `part` in a field of a layer.

    place: of the part in its field, from 0.
    """

    layer: int
    field: str
    place: int
    part: Part


def sites(config: ModelConfig, share: Share = WHOLE) -> dict[str, list[Site]]:
    """The modules that an adapter may change, and where a rank has their outputs.

    A module that the checkpoint stores as one matrix, such as `qkv_proj`, has several.
    """
    found: dict[str, list[Site]] = {}
    if config.latent is not None:
        return found
    for layer in range(config.num_layers):
        fields = layer_parts(config, layer, share)
        for field in FIELDS[:2] if "router" in fields else FIELDS:
            for place, part in enumerate(fields[field]):
                module = part.name.removesuffix(".weight")
                found.setdefault(module, []).append(Site(layer, field, place, part))
    return found


def padded_rank(max_rank: int) -> int:
    """The rank for which slots have room: matrix units multiply so many values at a time."""
    return -(-max_rank // _RANK_UNIT) * _RANK_UNIT


def slots_nbytes(
    config: ModelConfig, share: Share, num_slots: int, max_rank: int, itemsize: int
) -> int:
    """Bytes of a rank's `adapter_weights.AdapterTables`."""
    parts = [site.part for found in sites(config, share).values() for site in found]
    num_values = padded_rank(max_rank) * sum(sum(part.shape) for part in parts)
    return num_slots * num_values * itemsize


@dataclass(frozen=True)
class AdapterDescription:
    """An adapter that fits its model.

    Attributes:
        ranks: of each module that it changes.
        scales: by which the product of each is multiplied.
        tensors: by names as `model.layers.0.self_attn.q_proj.lora_A`.
    """

    source: Path
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    tensors: Mapping[str, StoredTensor]

    def parts(self, module: str, site: Site) -> Fields:
        """What a rank reads of a module's A, [rank, in], and B, [out, rank]."""
        rank, part = self.ranks[module], site.part
        num_out, num_in = part.stored_shape
        rows, columns = part.box or ((0, num_out), (0, num_in))
        plain = replace(part, cut=None)

        def of(side: str, stored: tuple[int, int], *box: tuple[int, int]) -> list[Part]:
            shape = tuple(end - first for first, end in box)
            name = f"{module}.lora_{side}"
            return [replace(plain, name=name, shape=shape, stored=stored, box=box)]

        return {
            "a": of("A", (rank, num_in), (0, rank), columns),
            "b": of("B", (num_out, rank), rows, (0, rank)),
        }


def describe_adapter(
    path: str | Path, model: ModelDescription, max_rank: int = MAX_RANK
) -> AdapterDescription:
    """Read an adapter's settings and headers, and compare them with its model.

    Raises:
        ModelError: it is missing or broken, does not fit the model, or needs what is not supported.
    """
    directory = Path(path)
    if not (directory / CONFIG).is_file():
        raise ModelError(
            f"{directory} is no LoRA adapter: it has no {CONFIG}; give a directory that PEFT's"
            " save_pretrained() has written"
        )
    settings = _settings(directory)
    if not (directory / WEIGHTS).is_file():
        raise ModelError(
            f"{directory} has no {WEIGHTS}; save the adapter again with safe_serialization=True"
        )
    tensors: dict[str, StoredTensor] = {}
    unknown = []
    known = sites(model.config)
    if not known:
        raise ModelError(
            f"{directory} cannot be used: adapters for models with latent attention"
            f" ({model.config.family}) are not supported; merge it into its model"
        )
    for name, tensor in read_header(directory / WEIGHTS).tensors.items():
        match = _NAME.fullmatch(name)
        module = match and (text_name(match["module"]) if model.reads_images else match["module"])
        if not match or module not in known:
            unknown.append(name)
        else:
            side = f"{module}.lora_{match['side']}"
            tensors[side] = replace(tensor, name=name)
    if unknown:
        supported = sorted({module.rpartition(".")[2] for module in known})
        raise ModelError(
            f"{directory} changes what cannot be adapted in {model.source}: {some(unknown)}."
            f" Supported are {', '.join(supported)} of its {model.config.num_layers} layers; is it"
            " an adapter of this model? If it is, merge it into the model"
        )
    ranks = _ranks(directory, tensors, model, known, max_rank)
    _check_complete(directory, settings, ranks, known)
    alpha, is_rooted = settings.get("lora_alpha", 8), settings.get("use_rslora", False)
    scales = {
        module: alpha / (math.sqrt(rank) if is_rooted else rank) for module, rank in ranks.items()
    }
    return AdapterDescription(directory, ranks, scales, tensors)


def digest_of(path: str | Path) -> str:
    """A digest of the files of an adapter; reads them. Raises `ModelError`."""
    digest = hashlib.blake2b(digest_size=16, person=b"disagg-adapter")
    for name in (CONFIG, WEIGHTS):
        try:
            with (Path(path) / name).open("rb") as opened:
                while piece := opened.read(_PIECE_NBYTES):
                    digest.update(piece)
                digest.update(opened.tell().to_bytes(8, "little"))
        except OSError as error:
            raise ModelError(f"{Path(path) / name} cannot be read: {error}") from error
    return digest.hexdigest()


def find_adapter(
    name: str, path: str, of_model: str, model: ModelDescription, max_rank: int
) -> Adapter:
    """Check an adapter against its model, and identify it by its content.

    Args:
        of_model: the served name of the model.

    Raises:
        ModelError: as `describe_adapter`.
    """
    describe_adapter(path, model, max_rank)
    return Adapter(name, of_model, str(Path(path).absolute()), digest_of(path))


def configured_adapters(
    modules: Mapping[str, str], of_model: str, model: ModelDescription, max_rank: int
) -> list[AdapterEntry]:
    """The adapters of a configuration, by name. Raises `ModelError` with the name of one."""
    found = []
    for name, path in modules.items():
        try:
            found.append(AdapterEntry(find_adapter(name, path, of_model, model, max_rank)))
        except ModelError as error:
            raise ModelError(
                f"The LoRA adapter {name!r} cannot be served: {error.message}.",
                param="lora_modules",
            ) from error
    return found


def _settings(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    try:
        settings: Any = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind != "LORA":
        raise ModelError(f"{file} describes no LoRA adapter: its peft_type is {kind!r}")
    alpha = settings.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{file}: lora_alpha is {alpha!r}, which is no number")
    reasons = [why for key, why in _REFUSED.items() if settings.get(key)]
    if isinstance(start := settings.get("init_lora_weights", True), str) and start not in _STARTS:
        reasons.append(f"it belongs to changed weights of the model (init_lora_weights: {start})")
    if settings.get("bias", "none") != "none":
        reasons.append("its biases were trained (bias)")
    if reasons:
        raise ModelError(
            f"{directory} cannot be used: {'; '.join(reasons)}. Merge it into its model"
            " (merge_and_unload() of PEFT), and serve that"
        )
    return dict(settings)


def _ranks(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    model: ModelDescription,
    known: Mapping[str, list[Site]],
    max_rank: int,
) -> dict[str, int]:
    """The rank of each module, whose A and B are there and have the right shapes."""
    ranks: dict[str, int] = {}
    missing, reshaped, others = [], [], []
    for module in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        pair = [tensors.get(f"{module}.lora_{side}") for side in "AB"]
        missing += [f"{module}.lora_{s}" for s, each in zip("AB", pair, strict=True) if not each]
        num_out, num_in = known[module][0].part.stored_shape
        a, b = pair
        if a is None or b is None:
            continue
        rank = a.shape[0] if a.shape else 0
        if not rank or (a.shape, b.shape) != ((rank, num_in), (num_out, rank)):
            reshaped.append(
                f"{module} has A {[*a.shape]} and B {[*b.shape]}, not [r, {num_in}] and"
                f" [{num_out}, r]"
            )
        others += [f"{module} is {each.dtype}" for each in (a, b) if not each.is_float]
        ranks[module] = rank
    if missing:
        raise ModelError(f"{directory} lacks tensors: {some(missing)}; save the adapter again")
    if reshaped:
        raise ModelError(
            f"{directory} is an adapter of another model than {model.source}: {some(reshaped)}"
        )
    if others:
        raise ModelError(f"{directory} must have floats, but {some(others)}")
    largest = max(ranks.values(), default=0)
    if largest > max_rank:
        raise ModelError(
            f"{directory} has rank {largest}, but max_lora_rank is {max_rank}; set --max-lora-rank"
            f" to {largest} or more (at most {MAX_RANK})"
        )
    return ranks


def _check_complete(
    directory: Path,
    settings: Mapping[str, Any],
    ranks: Mapping[str, int],
    known: Mapping[str, list[Site]],
) -> None:
    """Check that all modules are there that adapter_config.json names, unless it also chooses."""
    if not ranks:
        raise ModelError(f"{directory} has no tensors of LoRA in {WEIGHTS}; save the adapter again")
    targets = settings.get("target_modules")
    chooses = any(settings.get(key) for key in ("layers_to_transform", "exclude_modules"))
    if not isinstance(targets, list) or chooses:
        return
    ends = tuple(f".{target}" for target in map(str, targets))
    missing = [name for name in known if f".{name}".endswith(ends) and name not in ranks]
    if missing:
        raise ModelError(
            f"{directory} lacks tensors of modules that its {CONFIG} names: {some(missing)}; save"
            " the adapter again"
        )
