"""Compiled loops choose the tokens that plain torch chooses."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from disagg.kernels.cpu import sampling as cpu_sampling
from disagg.kernels.cpu.library import SAMPLING
from disagg.kernels.cpu.sampling import CpuSampling
from disagg.kernels.torch.sampling import TorchSampling
from tests.kernels.compiled import loaded
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


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return loaded(SAMPLING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.05, 1.0, 5.0])
def test_any_cut(scale: float, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    """At each of many positions; nearly equal logits show who is kept, bf16 has many ties."""
    numbers = [
        PLAIN._replace(top_k=top_k, top_p=top_p, reach=reach, temperature=temperature, seed=seed)
        for seed, (top_k, top_p) in enumerate(CUTS)
        for reach, temperature in ((math.inf, 1.0), (0.7, 0.6))
    ]
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    logits = logits_of(len(numbers), scale).to(dtype).float()
    ours, torchs = CpuSampling(library), TorchSampling()
    for position in range(60):
        positions = torch.full((len(numbers),), position)
        found = ours.choose(logits.clone(), tables, rows, positions)
        assert torch.equal(found, torchs.choose(logits.clone(), tables, rows, positions))


@pytest.mark.parametrize("seed", range(4))
def test_step_after_step(seed: int, library: ctypes.CDLL) -> None:
    check_step_after_step(CpuSampling(library), seed)


def test_greedy_and_unlikely_rows(library: ctypes.CDLL) -> None:
    check_greedy_and_unlikely_rows(CpuSampling(library))


def test_rows_without_a_token(library: ctypes.CDLL) -> None:
    check_rows_without_a_token(CpuSampling(library))


def test_threads_share_the_rows(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sampling, "_LEAST_LOGITS", VOCAB_SIZE)
    numbers = [PLAIN._replace(seed=seed, top_k=50) for seed in range(7)]
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    logits, positions = logits_of(7, 1.0), torch.arange(7)
    expected = TorchSampling().choose(logits.clone(), tables, rows, positions)
    ours = CpuSampling(library)
    for number in (1, 2, 3, 9):  # which changes from step to step
        torch.set_num_threads(number)
        found = ours.choose(logits.clone(), tables, rows, positions)
        assert torch.equal(found, expected)
