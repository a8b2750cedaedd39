"""Checks that a checkpoint has the tensors that a decoder needs. Loads no torch."""

from __future__ import annotations

from disagg.errors import ModelError
from disagg.models.checkpoint import StoredTensor
from disagg.models.description import ModelDescription
from disagg.models.gguf_model import GgufStored
from disagg.models.parts import all_parts
from disagg.models.quantized import QuantizedStored

_MAX_NAMES_IN_AN_ERROR = 8


def check_weights(model: ModelDescription) -> None:
    """Compare the tensors of a checkpoint with those that the decoder needs.

    Raises:
        ModelError: a file is damaged, or tensors are missing, unexpected, of the wrong shape or
            not floating point; the message names them.
    """
    wanted, stored = {part.name: part for part in all_parts(model.config)}, model.tensors
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    further = _further_layers(model)
    missing = [name for name in wanted if name not in stored]
    unexpected = [
        name
        for name in stored
        if name not in wanted
        and name not in ignored
        and not name.startswith(further)
        and not _says_nothing(name, stored[name])
    ]
    reshaped = [
        f"{name} is {list(stored[name].shape)}, not {list(part.stored_shape)}"
        for name, part in wanted.items()
        if name in stored and stored[name].shape != part.stored_shape
    ]
    not_float = [
        f"{name} is {stored[name].dtype}"
        for name in wanted
        # Quantised tensors were checked when the model was described.
        if name in stored and not isinstance(stored[name], GgufStored | QuantizedStored)
        if not stored[name].is_float
    ]
    problems = [
        f"{title}: {_some(names)}"
        for title, names in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("wrong shapes", reshaped),
            ("types that are not supported (only float weights are)", not_float),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"the weights in {model.source} do not fit its configuration ({model.config.family}). "
            + "; ".join(problems)
        )


def _further_layers(model: ModelDescription) -> tuple[str, ...]:
    """Prefixes of the names of layers that predict further tokens, which are not used."""
    config = model.config
    last = config.num_layers + config.num_nextn_layers
    return tuple(f"model.layers.{layer}." for layer in range(config.num_layers, last))


def _says_nothing(name: str, stored: StoredTensor) -> bool:
    """Whether a tensor may be ignored: a relic of old checkpoints, or one of GPTQ's zero biases."""
    return name.endswith("rotary_emb.inv_freq") or (name.endswith(".bias") and stored.is_zero())


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_AN_ERROR])
    hidden = len(names) - _MAX_NAMES_IN_AN_ERROR
    return f"{shown} and {hidden} more" if hidden > 0 else shown
