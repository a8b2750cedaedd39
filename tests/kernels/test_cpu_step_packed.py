"""The compiled step with the numbers of quantised checkpoints, of several kinds in a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.random_models import random_weights
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.torch.ops import TorchOps
from disagg.models.decoder import Decoder
from disagg.models.model_config import ModelConfig
from disagg.models.weights import DecoderWeights
from tests.kernels.packed_cases import random_packed
from tests.kernels.step_cases import (
    CPU,
    LLAMA,
    NewDecoder,
    assert_as_close,
    in_float32,
    prompts_and_step,
)

# Kinds that take turns: numbers, groups, zeros, least values.
KINDS: dict[str, list[tuple[Any, int | None, bool, bool]]] = {
    "Q4_1 and Q8_0": [("int4", 32, False, True), ("int8", 32, False, False)],
    "AWQ and W8A16": [("int4", 128, True, False), ("int8", None, False, False)],
    "all": [
        ("int8", 128, False, False),
        ("int4", None, True, False),
        ("int8", None, False, False),
        ("int4", 16, False, False),
        ("floats", None, False, False),
        ("int8", 16, False, False),
    ],
}


def _times(matrix: PackedMatrix, factor: int) -> PackedMatrix:
    least = None if matrix.least is None else matrix.least * factor
    return replace(matrix, scales=matrix.scales * factor, least=least)


def _packed(
    config: ModelConfig, kinds: Iterator[tuple[Any, int | None, bool, bool]]
) -> DecoderWeights:
    """Random ones in place of all matrices, each loud enough to matter."""
    weights = random_weights(config, torch.bfloat16, CPU, seed=2)

    def packed(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.dim() != 2:
            return each
        kind, group, has_zeros, has_least = next(kinds)
        if kind == "floats":
            return each * 6
        made = random_packed(
            kind,
            each.shape[0],
            each.shape[1],
            group,
            has_zeros=has_zeros,
            has_least=has_least,
            dtype=torch.float16,
        )
        return _times(made, 2)

    layers = [
        replace(
            layer, **{name: packed(getattr(layer, name)) for name in ("qkv", "output", "gate_up")}
        )
        for layer in weights.layers
    ]
    layers = [replace(layer, down=packed(layer.down)) for layer in layers]
    table = _times(packed(weights.embedding), 8)
    head = table if config.tie_word_embeddings else packed(weights.lm_head)
    return replace(weights, layers=layers, embedding=table, lm_head=head)


def _as_kept(weights: DecoderWeights, dtype: torch.dtype) -> DecoderWeights:
    """What is multiplied with, whose scales and least values are bfloat16."""
    ops = TorchOps(keeps_packed=True, dtype=torch.bfloat16)

    def wide(each: Any) -> Any:
        if not isinstance(each, PackedMatrix):
            return each
        linear: Any = ops.pack(each, None)
        linear.scales = linear.scales.float()
        return linear.widened().to(dtype)

    layers = [
        replace(layer, **{name: wide(getattr(layer, name)) for name in layer.__dataclass_fields__})
        for layer in weights.layers
    ]
    tables = {name: wide(getattr(weights, name)) for name in ("embedding", "lm_head")}
    return replace(weights, layers=layers, **tables)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_widened_matrices(
    tied: bool, kinds: str, new_decoder: NewDecoder
) -> None:
    """As close to float32 as torch is with the same matrices; prompts, and a step after them."""
    config = replace(
        LLAMA, hidden_size=192, intermediate_size=328, vocab_size=200, tie_word_embeddings=tied
    )
    torch.manual_seed(5)
    weights = _packed(config, cycle(KINDS[kinds]))
    ours = new_decoder(config, weights, "packed")
    torchs = Decoder(config, _as_kept(weights, torch.bfloat16), TorchOps())
    exact = Decoder(config, in_float32(_as_kept(weights, torch.float32)), TorchOps())
    found = (prompts_and_step(each, config, [9, 50, 3], 16) for each in (exact, ours, torchs))
    assert_as_close(*(torch.stack([*prompts, *after]) for prompts, after in found))
