"""What min-p, top-k and top-p keep, by their definitions, however many columns are sorted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from disagg.kernels.sampling_rows import Numbers
from disagg.kernels.torch import sampling as torch_sampling
from tests.grids import pairs
from tests.kernels.sampling_cases import (
    OFF,
    PLAIN,
    check_rows_without_a_token,
    rows_of,
    tables_of,
)


def random_row(vocab_size: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(vocab_size, generator=generator) * scale


def kept_by_definition(row: Tensor, top_k: int, top_p: float, reach: float) -> Tensor:
    """bool [vocab_size], one token at a time. Ties with the last one stay."""
    probs = torch.softmax(row.double(), dim=-1).tolist()
    largest = max(probs)
    kept = [i for i, prob in enumerate(probs) if prob >= largest * math.exp(-reach)]
    kept.sort(key=lambda i: -probs[i])
    kept = [i for i in kept if probs[i] >= probs[kept[:top_k][-1]]]
    total = math.fsum(probs[i] for i in kept)
    nucleus, mass = torch.zeros(len(probs), dtype=torch.bool), 0.0
    for i in kept:
        if mass >= top_p * total:
            break
        nucleus[i] = True
        mass += probs[i]
    smallest = min(prob for prob, is_in in zip(probs, nucleus.tolist(), strict=True) if is_in)
    return torch.tensor([prob >= smallest for prob in probs])


def kept(rows: Tensor, numbers: list[Numbers]) -> Tensor:
    tables = tables_of(numbers, rows.shape[1])
    return rows >= torch_sampling.floors(rows, tables.numbers, rows_of(numbers))


@pytest.mark.parametrize(
    ("top_k", "top_p", "reach", "looks"),
    pairs(
        [1, 1500, 2047, 2048, OFF],
        [0.7, 0.99, math.inf],
        [math.inf, -math.log(0.3)],
        [(), (64, 256), (64, 1500)],
    ),
)
def test_a_nucleus_is_of_what_top_k_and_min_p_keep(
    top_k: int,
    top_p: float,
    reach: float,
    looks: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In flat and in steep rows, beside a row that keeps all, however many columns are sorted.

    Any two settings of the four meet.
    """
    monkeypatch.setattr(torch_sampling, "SORTED_COLUMNS", looks)
    rows = [random_row(2048, scale=scale) for scale in (0.1, 4.0, 1.0)]
    numbers = [PLAIN._replace(top_k=top_k, top_p=top_p, reach=reach)] * 2 + [PLAIN]
    found = kept(torch.stack(rows), numbers)
    for row, each, its in zip(rows, numbers, found, strict=True):
        assert torch.equal(its, kept_by_definition(row, each.top_k, each.top_p, each.reach))


@pytest.mark.parametrize("top_k", [1, 20, 50, 300, 1024])
def test_ties_with_the_last_of_top_k_count_for_top_p(top_k: int) -> None:
    """A model in bf16 has many equal logits; each row is one of several with another top-k."""
    for seed in range(8):
        row = torch.randn(4_099, generator=torch.Generator().manual_seed(seed)) * 3
        row = row.bfloat16().float()
        others = [PLAIN._replace(top_k=top_k, top_p=0.9), PLAIN._replace(top_k=7)]
        found = kept(row.expand(2, -1).clone(), others)
        assert torch.equal(found[0], kept_by_definition(row, top_k, 0.9, math.inf))
        assert torch.equal(found[1], kept_by_definition(row, 7, 1.0, math.inf))


@pytest.mark.parametrize("shape", [(1, 61), (3, 100), (5, 16384), (2, 128 * 300), (300, 128)])
def test_the_first_of_several_largest_is_the_most_likely(shape: tuple[int, int]) -> None:
    """As in bfloat16, where neighbours are often equal; also of rows that a mask has emptied."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(shape, generator=generator).bfloat16().float()
    logits[-1] = -math.inf
    assert torch.equal(torch_sampling.most_likely(logits), logits.argmax(dim=-1))
    assert torch.equal(torch_sampling.most_likely(logits.round()), logits.round().argmax(dim=-1))


def test_rows_without_a_token() -> None:
    check_rows_without_a_token(torch_sampling.TorchSampling())
