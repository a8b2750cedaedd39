"""Kernels that choose tokens equal their plain twin, under Triton's interpreter.

Run by `test_interpreted.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from disagg.kernels.gpu.floors import find_floors
from disagg.kernels.gpu.sampling import TritonSampling
from disagg.kernels.sampling_rows import TEMPERATURE
from disagg.kernels.torch import sampling as torch_sampling
from tests.kernels.compiled_order import argmax
from tests.kernels.sampling_cases import (
    CUTS,
    PLAIN,
    VOCAB_SIZE,
    check_greedy_and_unlikely_rows,
    check_rows_without_a_token,
    check_step_after_step,
    logits_of,
    rows_of,
    tables_of,
)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(0.05, torch.bfloat16), (1.0, torch.float32), (5.0, torch.bfloat16)],
)
def test_kept_tokens(scale: float, dtype: torch.dtype) -> None:
    """The floors may differ where no logit is between them, so what they keep is compared.

    Logits of a model in bf16 have many ties.
    """
    numbers = [
        PLAIN._replace(top_k=top_k, top_p=top_p, reach=reach, temperature=temperature)
        for top_k, top_p in CUTS
        for reach, temperature in ((math.inf, 1.0), (0.7, 0.6))
    ]
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    logits = logits_of(len(numbers), scale).to(dtype).float()
    found = find_floors(logits, tables, rows)
    temperatures = tables.numbers[:, TEMPERATURE].view(torch.float64).float().unsqueeze(1)
    scaled = logits / temperatures
    expected = torch_sampling.floors(scaled, tables.numbers, rows)
    assert torch.equal(scaled >= found.unsqueeze(1), scaled >= expected)


@pytest.mark.parametrize("seed", [0, 3])
def test_tokens(seed: int) -> None:
    check_step_after_step(TritonSampling(), seed)


def test_greedy_and_unlikely_rows() -> None:
    check_greedy_and_unlikely_rows(TritonSampling())


def test_the_interpreter_has_the_compiled_argmax() -> None:
    """Of a row of NaN the answer is in the padding: this is what kernels must be safe from."""
    assert argmax(np.array([math.nan] * 6 + [-math.inf] * 2), 0, False) == 6


def test_rows_without_a_token() -> None:
    check_rows_without_a_token(TritonSampling())
