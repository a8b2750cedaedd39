"""Kernels that choose tokens equal their plain twin, under Triton's interpreter.

Run by `test_triton_sampling.py`.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from disagg.kernels import torch_sampling
from disagg.kernels.sampling_rows import TEMPERATURE
from disagg.kernels.torch_sampling import TorchSampling
from disagg.kernels.triton_floors import FloorBuffers, find_floors
from disagg.kernels.triton_sampling import TritonSampling
from tests.kernels.sampling_cases import (
    OFF,
    PLAIN,
    VOCAB_SIZE,
    copy_of,
    logits_of,
    random_numbers,
    rows_of,
    tables_of,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.05, 1.0, 5.0])
def test_kept_tokens(scale: float, dtype: torch.dtype) -> None:
    """The floors may differ where no logit is between them, so what they keep is compared.

    Logits of a model in bf16 have many ties.
    """
    cuts = [(OFF, 0.9), (20, 0.8), (20, 0.95), (1, 0.5), (3, math.inf), (6, math.inf)]
    cuts += [(7, math.inf), (300, 0.7), (1000, math.inf), (VOCAB_SIZE - 1, 0.3), (OFF, 1e-9)]
    cuts += [(OFF, math.inf), (OFF, 0.9999)]
    numbers = [
        PLAIN._replace(top_k=top_k, top_p=top_p, reach=reach, temperature=temperature)
        for top_k, top_p in cuts
        for reach, temperature in ((math.inf, 1.0), (0.7, 0.6))
    ]
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    logits = logits_of(len(numbers), scale).to(dtype).float()
    found = find_floors(
        logits, tables, rows, FloorBuffers(logits.shape[0], logits.shape[1], logits.device)
    )
    temperatures = tables.numbers[:, TEMPERATURE].view(torch.float64).float().unsqueeze(1)
    scaled = logits / temperatures
    expected = torch_sampling.floors(scaled, tables.numbers, rows)
    assert torch.equal(scaled >= found.unsqueeze(1), scaled >= expected)


@pytest.mark.parametrize("seed", range(4))
def test_tokens(seed: int) -> None:
    """Step after step: penalties count what was chosen before, by both in tables of their own."""
    rng = random.Random(seed)
    numbers = [random_numbers(rng) for _ in range(7)]
    slots = rng.sample(range(7), 5)
    rows = rows_of(numbers, slots)
    ours = tables_of(numbers, VOCAB_SIZE, num_ids=30)
    ours.stop_ids = torch.randint(-1, VOCAB_SIZE + 3, (7, 3), dtype=torch.int32)
    theirs = copy_of(ours)
    triton, plain = TritonSampling(), TorchSampling()
    for tables, ops in ((ours, triton), (theirs, plain)):
        for token_id in (3, 9, 3, 1000):
            ops.remember(tables, torch.arange(7), torch.full((7,), token_id), torch.arange(7))
    for position in range(6, 11):
        logits = logits_of(5, 2.0, seed=position)
        positions = torch.full((5,), position)
        expected = logits.clone()
        if rows.adjusted.shape[0]:
            triton.adjust_(logits, ours, rows, positions)
            plain.adjust_(expected, theirs, rows, positions)
        assert torch.equal(logits, expected)
        found = triton.choose(logits, ours, rows, positions)
        assert torch.equal(found, plain.choose(expected, theirs, rows, positions))
        triton.remember(ours, rows.slots, found, rows.remembered)
        plain.remember(theirs, rows.slots, found, rows.remembered)
        assert torch.equal(ours.counts, theirs.counts)
        assert torch.equal(ours.num_seen, theirs.num_seen)
        for slot, num_seen in enumerate(ours.num_seen.tolist()):
            assert torch.equal(ours.seen_ids[slot, :num_seen], theirs.seen_ids[slot, :num_seen])


def test_greedy_and_unlikely_rows() -> None:
    """The first of equal logits; rows in which a grammar or `min_tokens` leaves one token."""
    numbers = [PLAIN._replace(temperature=0.0), PLAIN, PLAIN._replace(top_p=0.5, top_k=4)]
    logits = torch.full((3, VOCAB_SIZE), -math.inf)
    logits[0, [70, 900]] = 2.0
    logits[1, 1280] = logits[2, 1300] = -5.0
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    found = TritonSampling().choose(logits, tables, rows, torch.zeros(3, dtype=torch.int64))
    assert found.tolist() == [70, 1280, 1300]
