"""Layers that draft tokens for a model, and are nothing without it. Knows no torch.

- `early_exit`: the first layers of the model itself, with its last norm and its vocabulary
  (LayerSkip, arXiv 2404.16710).
- `mtp`: the layer behind the others with which a checkpoint predicts one token more (DeepSeek-V3,
  arXiv 2412.19437, section 2.2; GLM-4.5 has the same).
- `eagle3`: a layer with a checkpoint of its own (EAGLE-3, arXiv 2503.01840), in the layout that
  vLLM and SGLang call LlamaForCausalLMEagle3.
- `medusa`: some heads without layers (Medusa, arXiv 2401.10774), as its authors or vLLM save them.
  Each of them says what comes a token later than what the one before says.

The last three are heads: their input is a hidden state of the model, for `mtp` and `eagle3`
together with the embedding of the token that follows. An EAGLE-3 head makes one state of those of
three layers. It may know only a part of the vocabulary, as Medusa heads may.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from disagg.errors import ModelError
from disagg.models.checkpoint import StoredTensor
from disagg.models.description import ModelDescription, read_config
from disagg.models.family import Fields as Keys
from disagg.models.family import Json
from disagg.models.model_config import ModelConfig
from disagg.models.packing import DeviceFormat
from disagg.models.parts import Fields, Part, check_parts, layer_parts

_EAGLE3 = "LlamaForCausalLMEagle3"
KNOWN_IDS = "token_map"  # the ids of the tokens that Medusa heads know
_MEDUSA = re.compile(r"blocks\.\d+\.layers\.\d+\.(weight|bias)|lm_heads\.\d+\.weight")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class DraftLayers:
    """Some layers, of which `choose` and `memory_plan` ask what they ask of a whole model.

    Attributes:
        config: of these layers alone, with the vocabulary of the model for which they draft.
        tensors: those of the checkpoint that has their weights.
        layer, outer: the fields of a head's layer and of what is around it. Early exit has none,
            and all that a head lacks is the model's.
        num_draft_tokens: tokens that it knows; fewer than the vocabulary if it has a `d2t`.
        kept: the layers of the model whose inputs a head reads. The number of layers stands for
            what comes out of the last norm.
        norms_residual: whether the norm of an EAGLE-3 head's state also applies to what its layer
            adds to.
    """

    name: str
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    layer: Fields
    outer: Fields
    num_draft_tokens: int
    kept: tuple[int, ...] = ()
    norms_residual: bool = False

    is_quantized = False

    @property
    def is_head(self) -> bool:
        return bool(self.kept)

    @property
    def is_medusa(self) -> bool:
        """Whether these are heads without a layer, so that they have no KV."""
        return not self.config.num_layers

    def own_nbytes(self, itemsize: int) -> int:
        """Bytes of its own weights in memory, with numbers of so many bytes."""
        format, fields = DeviceFormat(itemsize), {**self.layer, **self.outer}
        return sum(format.nbytes(parts, None) for parts in fields.values())

    @property
    def fingerprint(self) -> str:
        """Its KV never leaves its worker."""
        return hashlib.blake2b(self.name.encode(), digest_size=16).hexdigest()


def first_layers(model: ModelDescription, num_layers: int) -> DraftLayers:
    """The first layers of a model.

    Raises:
        ModelError: the model has no more layers.
    """
    config = model.config
    if num_layers >= config.num_layers:
        raise ModelError(
            f"{model.name} has {config.num_layers} layers, so fewer of them can draft:"
            f" exit_layer = {num_layers} is too large"
        )
    return DraftLayers(
        name=f"the first {num_layers} layers of {model.name}",
        config=replace(
            config,
            num_layers=num_layers,
            sliding_windows=config.sliding_windows[:num_layers],
            num_nextn_layers=0,
        ),
        tensors=model.tensors,
        layer={},
        outer={},
        num_draft_tokens=config.vocab_size,
    )


def mtp_layer(model: ModelDescription) -> DraftLayers:
    """The first layer behind the others; further ones are not used. Its tables are the model's.

    Raises:
        ModelError: the checkpoint has none, or a broken one.
    """
    config, tensors = model.config, model.tensors
    index, hidden = config.num_layers, config.hidden_size
    place = f"model.layers.{index}"
    if not config.num_nextn_layers or f"{place}.eh_proj.weight" not in tensors:
        raise ModelError(
            f"{model.name} has no layer that predicts further tokens"
            f" (num_nextn_predict_layers, {place}.eh_proj.weight), so the method mtp cannot draft"
            " for it"
        )
    layer = layer_parts(config, index)
    outer = {"combine": [Part(f"{place}.eh_proj.weight", (hidden, 2 * hidden))]} | {
        field: [Part(f"{place}.{name}.weight", (hidden,))]
        for field, name in (
            ("token_norm", "enorm"),
            ("state_norm", "hnorm"),
            ("norm", "shared_head.norm"),
        )
    }
    check_parts(f"the weights of the MTP layer of {model.source}", {**layer, **outer}, tensors)
    one = replace(
        config,
        num_layers=1,
        sliding_windows=(None,),
        dense_layers=frozenset(),
        num_nextn_layers=0,
    )
    return DraftLayers(
        name=f"the MTP layer of {model.name}",
        config=one,
        tensors=tensors,
        layer=layer,
        outer=outer,
        num_draft_tokens=config.vocab_size,
        kept=(index,),
    )


def eagle3_head(place: str | Path, model: ModelDescription) -> DraftLayers:
    """The EAGLE-3 head in a directory, for a model.

    Raises:
        ModelError: it is missing, broken, not supported, or made for another model.
    """
    files, file, raw = read_config(Path(place))
    keys, target = Keys(raw, file), model.config
    if raw.get("architectures") != [_EAGLE3]:
        raise ModelError(
            f"{file} has architectures {raw.get('architectures')}; the method eagle3 needs a"
            f" head, whose architecture is {_EAGLE3}"
        )
    own = ModelConfig.from_hf({**raw, "architectures": ["LlamaForCausalLM"]}, file)
    for what, stated, needed in (
        ("num_hidden_layers", own.num_layers, 1),
        ("hidden size", raw.get("target_hidden_size", own.hidden_size), target.hidden_size),
        ("vocab_size", own.vocab_size, target.vocab_size),
    ):
        if stated != needed:
            raise ModelError(
                f"{files.place} cannot draft for {model.name}: its {what} is {stated}, not {needed}"
            )
    num_draft_tokens = own.vocab_size
    if raw.get("draft_vocab_size") is not None:
        num_draft_tokens = keys.size("draft_vocab_size", own.vocab_size)
    tensors = {
        _usual_name(name): replace(tensor, name=name)
        for header in files.headers().values()
        for name, tensor in header.tensors.items()
    }
    hidden, first = own.hidden_size, "model.layers.0"
    layer = layer_parts(own, 0)
    layer["qkv"] = [replace(part, shape=(part.shape[0], 2 * hidden)) for part in layer["qkv"]]
    outer = {
        "fuse": [Part("model.fc.weight", (hidden, 3 * target.hidden_size))],
        "token_norm": layer.pop("input_norm"),
        "state_norm": [Part(f"{first}.hidden_norm.weight", (hidden,))],
        "norm": [Part("model.norm.weight", (hidden,))],
    }
    table = "model.embed_tokens.weight"
    if table in tensors or hidden != target.hidden_size:
        outer["embedding"] = [Part(table, (own.vocab_size, hidden))]
    knows_all = num_draft_tokens == own.vocab_size
    if "lm_head.weight" in tensors or not knows_all or hidden != target.hidden_size:
        outer["lm_head"] = [Part("lm_head.weight", (num_draft_tokens, hidden))]
    maps = () if knows_all and "d2t" not in tensors else ("d2t",)
    given = {name: each for name, each in tensors.items() if name not in (*maps, "t2d")}
    check_parts(
        f"the weights of the EAGLE-3 head in {files.place}",
        {**layer, **outer},
        given,
        are_all=True,
    )
    for name in maps:
        _check_ids(files.place, name, tensors, num_draft_tokens)
    return DraftLayers(
        name=files.name,
        config=own,
        tensors=MappingProxyType(tensors),
        layer=layer,
        outer=outer,
        num_draft_tokens=num_draft_tokens,
        kept=_kept(raw, keys, target.num_layers),
        norms_residual="norm_before_residual" in raw and keys.flag("norm_before_residual"),
    )


def medusa_heads(place: str | Path, model: ModelDescription) -> DraftLayers:
    """The Medusa heads in a directory, for a model.

    How many there are, and of how many blocks each, is as the tensors say. A head without a table
    of its own has the model's.

    Raises:
        ModelError: they are missing, broken, or made for another model.
    """
    files, _, raw = read_config(Path(place))
    target = model.config
    for what, needed in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if raw.get(what) not in (None, needed):
            raise ModelError(
                f"{files.place} cannot draft for {model.name}: its {what} is {raw[what]}, not"
                f" {needed}"
            )
    tensors = {
        _medusa_name(name): replace(tensor, name=name)
        for header in files.headers().values()
        for name, tensor in header.tensors.items()
    }
    weights = {name: each for name, each in tensors.items() if name != KNOWN_IDS}
    table, num_draft_tokens = weights.get("lm_heads.0.weight"), target.vocab_size
    if KNOWN_IDS in tensors and table is not None and table.shape[:1] != (target.vocab_size,):
        (num_draft_tokens,) = table.shape[:1]
        _check_ids(files.place, KNOWN_IDS, tensors, num_draft_tokens)
    num_heads = max(1, sum(name.endswith(".layers.0.weight") for name in weights))
    names = {*(f"blocks.{i}.layers.0.weight" for i in range(num_heads)), *weights}
    shapes = {
        "lm_heads": (num_draft_tokens, target.hidden_size),
        "weight": (target.hidden_size, target.hidden_size),
        "bias": (target.hidden_size,),
    }
    outer = {
        name: [Part(name, shapes.get(name.split(".")[0]) or shapes[name.split(".")[-1]])]
        for name in sorted(names, key=lambda name: [*map(int, re.findall(r"\d+", name))])
        if _MEDUSA.fullmatch(name)
    }
    check_parts(f"the weights of the Medusa heads in {files.place}", outer, weights, are_all=True)
    return DraftLayers(
        name=files.name,
        config=replace(target, num_layers=0, sliding_windows=(), num_nextn_layers=0),
        tensors=MappingProxyType(tensors),
        layer={},
        outer=outer,
        num_draft_tokens=num_draft_tokens,
        kept=(target.num_layers,),
    )


def _medusa_name(name: str) -> str:
    """The name that vLLM gives a tensor; the authors count the modules of each head."""
    name = name.removeprefix("medusa_heads.")
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def _usual_name(name: str) -> str:
    """The name that a tensor would have in a model of one layer."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = f"layers.0.{name.removeprefix('midlayer.')}"
    return name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}"


def _check_ids(place: Path, name: str, tensors: Mapping[str, StoredTensor], number: int) -> None:
    """Raise `ModelError` unless a tensor holds so many ids of tokens."""
    found = tensors.get(name)
    if found is None or found.shape != (number,) or found.dtype != "I64":
        raise ModelError(f"{place} needs {name}, {[number]} numbers of 64 bits")


def _kept(raw: Json, keys: Keys, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the head reads: as vLLM and SGLang choose, or as the file says."""
    usual = 2, num_layers // 2, num_layers - 3
    inner = raw.get("eagle_config") or {}
    if not isinstance(inner, Mapping) or not inner.get("use_aux_hidden_state", True):
        raise keys.wrong("eagle_config.use_aux_hidden_state = false is not supported")
    # vLLM counts the layers before a state, and SGLang, in eagle_config, names the last of them.
    stated = raw.get(_LAYER_IDS) or [each + 1 for each in inner.get(_LAYER_IDS) or ()] or usual
    if len(stated) != 3 or not all(each in range(num_layers) for each in stated):
        raise keys.wrong(
            f"the states of layers {[*stated]} are needed ({_LAYER_IDS}), but there must be three,"
            f" and the model has {num_layers} layers"
        )
    return tuple(stated)
