"""Compiled loops choose the tokens that plain torch chooses."""

from __future__ import annotations

import ctypes
import math
import random

import pytest
import torch

from disagg.kernels import cpu_sampling, dispatch
from disagg.kernels.cpu_library import CPU_KERNELS, Found, find_library
from disagg.kernels.cpu_sampling import CpuSampling
from disagg.kernels.torch_sampling import TorchSampling
from tests.kernels.compiled import compiled_sampling
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

CUTS = [(OFF, 0.9), (20, 0.8), (20, 0.95), (1, 0.5), (3, math.inf), (6, math.inf)]
CUTS += [(7, math.inf), (300, 0.7), (1000, math.inf), (VOCAB_SIZE - 1, 0.3), (OFF, 1e-9)]
CUTS += [(OFF, math.inf), (OFF, 0.9999)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_sampling(tmp_path_factory.mktemp("built"))


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
    """Penalties count what was chosen before, by both in tables of their own."""
    rng = random.Random(seed)
    numbers = [random_numbers(rng) for _ in range(7)]
    slots = rng.sample(range(7), 5)
    rows = rows_of(numbers, slots)
    ours = tables_of(numbers, VOCAB_SIZE, num_ids=30)
    ours.stop_ids = torch.randint(-1, VOCAB_SIZE + 3, (7, 3), dtype=torch.int32)
    theirs = copy_of(ours)
    compiled, plain = CpuSampling(library), TorchSampling()
    for tables, ops in ((ours, compiled), (theirs, plain)):
        for token_id in (3, 9, 3, 1000):
            ops.remember(tables, torch.arange(7), torch.full((7,), token_id), torch.arange(7))
    for position in range(6, 11):
        logits = logits_of(5, 2.0, seed=position)
        positions, expected = torch.full((5,), position), logits.clone()
        compiled.adjust_(logits, ours, rows, positions)
        plain.adjust_(expected, theirs, rows, positions)
        assert torch.equal(logits, expected)
        found = compiled.choose(logits, ours, rows, positions)
        assert torch.equal(found, plain.choose(expected, theirs, rows, positions))
        compiled.remember(ours, rows.slots, found, rows.remembered)
        plain.remember(theirs, rows.slots, found, rows.remembered)
        assert torch.equal(ours.counts, theirs.counts)
        assert torch.equal(ours.num_seen, theirs.num_seen)
        for slot, num_seen in enumerate(ours.num_seen.tolist()):
            assert torch.equal(ours.seen_ids[slot, :num_seen], theirs.seen_ids[slot, :num_seen])


def test_greedy_and_unlikely_rows(library: ctypes.CDLL) -> None:
    """The first of equal logits; rows in which a grammar or `min_tokens` leaves one token."""
    numbers = [PLAIN._replace(temperature=0.0), PLAIN, PLAIN._replace(top_p=0.5, top_k=4)]
    logits = torch.full((3, VOCAB_SIZE), -math.inf)
    logits[0, [70, 900]] = 2.0
    logits[1, 1280] = logits[2, 1300] = -5.0
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    found = CpuSampling(library).choose(logits, tables, rows, torch.zeros(3, dtype=torch.int64))
    assert found.tolist() == [70, 1280, 1300]


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_logits_of_a_broken_model(strange: float, library: ctypes.CDLL) -> None:
    """Whatever the parameters: the first that is no number, or infinite; else the first."""
    cuts = [PLAIN, PLAIN._replace(temperature=0.0), PLAIN._replace(reach=2.0)]
    cuts += [PLAIN._replace(top_k=top_k, top_p=top_p) for top_k, top_p in CUTS]
    tables, rows = tables_of(cuts, VOCAB_SIZE), rows_of(cuts)
    positions = torch.zeros(len(cuts), dtype=torch.int64)
    some, all_of_them = logits_of(len(cuts), 1.0), torch.full((len(cuts), VOCAB_SIZE), strange)
    some[:, [600, 700, 1281]] = strange
    for logits, expected in ((some, 600), (all_of_them, 0), (-all_of_them.abs(), 0)):
        found = CpuSampling(library).choose(logits.clone(), tables, rows, positions)
        assert found.tolist() == [expected] * len(cuts)
        assert torch.equal(found, TorchSampling().choose(logits, tables, rows, positions))


def test_threads_share_the_rows(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sampling, "_FEW", VOCAB_SIZE)
    numbers = [PLAIN._replace(seed=seed, top_k=50) for seed in range(7)]
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    logits, positions = logits_of(7, 1.0), torch.arange(7)
    expected = TorchSampling().choose(logits.clone(), tables, rows, positions)
    num_threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 9):
            torch.set_num_threads(number)
            found = CpuSampling(library).choose(logits.clone(), tables, rows, positions)
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(num_threads)


def test_the_environment_may_ask_for_torch(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(dispatch, "find_library", lambda _: Found(library, "compiled"))
    assert isinstance(dispatch.sampling_ops_for(cpu), CpuSampling)
    monkeypatch.setattr(dispatch, "find_library", find_library)
    monkeypatch.setenv(CPU_KERNELS, "torch")
    find_library.cache_clear()
    try:
        assert isinstance(dispatch.sampling_ops_for(cpu), TorchSampling)
    finally:
        find_library.cache_clear()
