"""Latent attention in Triton equals its reference; run by `test_interpreted.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.random_models import random_weights
from disagg.kernels import reference
from disagg.kernels.gpu import token_index
from disagg.kernels.gpu.kv_write import kv_write
from disagg.kernels.gpu.latent_attention import LONG_ROWS, latent_attention
from disagg.kernels.gpu.latent_group import latent_group
from disagg.kernels.gpu.norm_rope import norm_rope_
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.route import choose_experts
from disagg.kernels.grouping import Grouping
from disagg.kernels.ops import Scores, TokenIndex
from disagg.models.decoder import Decoder, scores_of
from disagg.models.model_config import ModelConfig
from tests.kernels.paged_inputs import LAYER, chosen_inputs, copy_of, paged_inputs
from tests.models.paging import SMALL_LATENT, SMALL_SPARSE, Tokens, new_slab, run_step

CPU = torch.device("cpu")
SCALE = 0.3
HALF, SINGLE = 2e-3, 2e-5  # tolerances, absolute and relative
# As `interpreted_cases.MIXED`.
MIXED = [(1, 1), (1, 64), (1, 65), (1, 300), (3, 70), (40, 40), (9, 99)]


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def _attend(
    num_heads: int,
    rank: int,
    rope: int,
    block_size: int,
    num_programs: int,
    dtype: torch.dtype = torch.float32,
    lens: list[tuple[int, int]] = MIXED,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = paged_inputs(
        lens,
        group=num_heads,
        num_kv_heads=1,
        head_dim=rank + rope,
        block_size=block_size,
        dtype=dtype,
        num_vectors=1,
    )
    expected = inputs.expected(None, scale=SCALE).view(-1, num_heads, rank + rope)[..., :rank]
    kv_write(inputs.qkv, inputs.kv_cache, LAYER, inputs.slots)
    work = inputs.work(latent_group(num_heads), None, num_programs, LONG_ROWS)
    out = latent_attention(inputs.qkv, inputs.kv_cache, LAYER, inputs, work, rank, SCALE)
    return out, expected


@pytest.mark.parametrize(
    ("num_heads", "rank", "rope", "block_size"),
    [(16, 32, 16, 64), (32, 24, 8, 16), (6, 64, 16, 5), (3, 20, 6, 1), (22, 16, 8, 128)],
)
def test_latent_attention(num_heads: int, rank: int, rope: int, block_size: int) -> None:
    _assert_close(*_attend(num_heads, rank, rope, block_size, num_programs=2), SINGLE)


def test_latent_attention_in_half_precision() -> None:
    _assert_close(*_attend(16, 32, 16, 64, 2, torch.float16), HALF)


def test_a_long_context_cut_into_many_pieces() -> None:
    _assert_close(*_attend(32, 32, 8, 16, 64, lens=[(1, 1100), (2, 515)]), SINGLE)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of NumPy
@pytest.mark.parametrize(
    (
        "num_heads",
        "index_heads",
        "block_size",
        "num_chosen",
        "multiprocessors",
        "with_nan",
        "num_evicted",
    ),
    [
        (16, 4, 16, 20, 1, False, 48),
        (96, 16, 5, 13, 1, True, 0),
        (3, 5, 64, 600, 40, False, 0),  # keys of a token are cut into pieces
    ],
)
def test_attention_to_chosen_tokens(
    num_heads: int,
    index_heads: int,
    block_size: int,
    num_chosen: int,
    multiprocessors: int,
    with_nan: bool,
    num_evicted: int,
) -> None:
    """Some see fewer tokens than are chosen. Prompts share tiles of keys with decodes."""
    lens, index = [(5, 70), (1, 1), (1, 2 * num_chosen), (30, 40)], TokenIndex(num_chosen, 6)
    if num_heads == 96:  # few tokens of many sequences, each with keys of its own
        lens = [(3, 40), *[(1, length) for length in (9, 13, 14, 50)]]
    drawn = chosen_inputs(
        lens,
        num_heads=num_heads,
        key_dim=28,
        head_dim=34,
        index=index,
        index_heads=index_heads,
        block_size=block_size,
        with_nan=with_nan,
    )
    ops, cache = (
        TritonOps(num_heads, multiprocessors, scores=Scores(index=index)),
        drawn.inputs.kv_cache,
    )
    inputs = replace(drawn.inputs, num_evicted=num_evicted)
    paging = ops.plan(inputs, cache, [None])
    for asked in (drawn.asked, None):  # a layer that chooses, and one that does not
        at = inputs.qkv, cache, LAYER, paging
        found = ops.latent_attention(*at, 20, SCALE, asked)
        _assert_close(found, drawn.expected(20, SCALE), SINGLE)
    assert paging.choice is not None
    drawn.assert_chosen(paging.choice.chosen)


def test_more_queries_than_fit_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "SCORES_NBYTES", 4 * 64 * 7)
    test_attention_to_chosen_tokens(16, 4, 16, 20, 1, False, 0)


def test_a_latent_is_written_as_the_reference_writes_it() -> None:
    inputs = paged_inputs([(1, 5), (9, 20)], group=3, num_kv_heads=1, head_dim=20, num_vectors=1)
    wanted = copy_of(inputs.kv_cache)
    kv_write(inputs.qkv, inputs.kv_cache, LAYER, inputs.slots)
    reference.kv_write(inputs.qkv, wanted, LAYER, inputs.slots)
    assert torch.equal(inputs.kv_cache.blocks.view(torch.uint8), wanted.blocks.view(torch.uint8))


def test_the_end_of_each_head_is_turned() -> None:
    heads, angles = torch.randn(5, 3, 28), torch.randn(5, 4)
    cos, sin = angles.cos(), angles.sin()
    expected = heads.clone()
    expected[..., 20:] = reference.norm_rope(heads[..., 20:], None, 0.0, cos, sin)
    norm_rope_(heads[..., 20:], None, 0.0, torch.stack((cos, sin), 1))
    _assert_close(heads, expected, SINGLE)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(
    ("grouping", "num_experts"),
    [
        (Grouping(4, 2, is_sigmoid=True, scale=2.5), 20),
        (Grouping(5, 3, scale=16.0), 30),
        (Grouping(is_sigmoid=True), 7),
        (Grouping(), 8),
    ],
)
def test_routes_by_groups(grouping: Grouping, num_experts: int, is_normalized: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, num_experts, generator=generator)
    logits[0] = 0.5  # all are equal: the first ones
    bias = torch.randn(num_experts, generator=generator) if grouping.is_sigmoid else None
    weights, chosen = choose_experts(logits, 3, is_normalized, bias, grouping)
    wanted_weights, wanted = reference.choose_grouped(logits, bias, 3, is_normalized, grouping)
    if bias is None:
        assert torch.equal(chosen.long(), wanted)
    else:  # a sigmoid may be rounded in another way
        assert torch.equal(chosen[1:].long(), wanted[1:])
    _assert_close(weights[1:], wanted_weights[1:], SINGLE)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN")  # of NumPy
def test_what_chooses_among_nans_exists() -> None:
    _, chosen = choose_experts(torch.full((1, 6), torch.nan), 3, True, None, Grouping(3, 2))
    assert ((chosen >= 0) & (chosen < 6)).all()


@pytest.mark.parametrize("config", [SMALL_LATENT, SMALL_SPARSE], ids=["all", "chosen"])
def test_a_decoder_is_that_of_a_cpu(config: ModelConfig) -> None:
    """A prompt, a chunk after a prefix, and decodes."""
    made = []
    for ops in (None, TritonOps(config.num_heads, 2, scores=scores_of(config))):
        decoder = Decoder(config, random_weights(config, torch.float32, CPU, seed=2), ops)
        slab = new_slab(config, 16, 8, torch.float32)
        tokens = Tokens(list(range(40)), [9, 2, 3, 7, 1])
        for count in (11, 9, 1, 1):
            run_step(decoder, slab, [(tokens, count)], 8)
        made.append(torch.stack(tokens.logits))
    _assert_close(made[1], made[0], 1e-4)
