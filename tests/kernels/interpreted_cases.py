"""Kernels in Triton equal their references; run by `test_interpreted.py` under its interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from bench.random_models import random_weights
from disagg.kernels import reference
from disagg.kernels.activation import Activation
from disagg.kernels.gpu.gated_mul import gated_mul
from disagg.kernels.gpu.kv_write import kv_write
from disagg.kernels.gpu.norm_rope import norm_rope_
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.paged_attention import paged_attention
from disagg.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from disagg.kernels.kv_pages import FORMATS, KVFormat
from disagg.kernels.ops import Scores
from disagg.models.decoder import Decoder
from tests.grids import some
from tests.kernels.paged_inputs import LAYER, copy_of, paged_inputs
from tests.models.paging import SMALL, Tokens, new_slab, run_step

CPU = torch.device("cpu")
WITH_SCALES = ["int8", "int4", "fp8"]
HALF, SINGLE = 2e-3, 2e-5  # tolerances, absolute and relative

# Single tokens, exact multiples of blocks and tiles, a verified draft, prompts with and without
# a cached prefix; single queries first.
MIXED = [(1, 1), (1, 64), (1, 65), (1, 300), (3, 70), (40, 40), (35, 99)]


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def _attend(
    lens: list[tuple[int, int]],
    window: int | None,
    num_programs: int,
    **shape: int | torch.dtype | KVFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = paged_inputs(lens, **shape)  # type: ignore[arg-type]
    expected = inputs.expected(window)
    inputs.write()
    num_kv_heads = inputs.kv_cache.values.shape[3]
    group = inputs.qkv.shape[1] // num_kv_heads - 2
    work = inputs.work(group, window, num_programs)
    out = paged_attention(
        inputs.qkv,
        inputs.kv_cache,
        LAYER,
        inputs,
        work,
    )
    return out, expected


@pytest.mark.parametrize("group", [1, 3, 5, 7])
@pytest.mark.parametrize("window", [None, 50])
def test_paged_attention_of_odd_groups(group: int, window: int | None) -> None:
    out, expected = _attend(MIXED, window, num_programs=2, group=group)
    _assert_close(out, expected, SINGLE)


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 16), (80, 64), (128, 16), (128, 64), (64, 128), (16, 1)]
)
def test_paged_attention_of_head_and_block_sizes(head_dim: int, block_size: int) -> None:
    lens = [(1, 64), (1, 130), (2, 64), (40, 75)]
    out, expected = _attend(
        lens, None, 2, group=2, num_kv_heads=1, head_dim=head_dim, block_size=block_size
    )
    _assert_close(out, expected, SINGLE)


def test_paged_attention_in_half_precision() -> None:
    out, expected = _attend(MIXED, None, 2, group=4, dtype=torch.float16)
    _assert_close(out, expected, HALF)


SIZES = [(1, 64, 16, None), (3, 80, 64, None), (7, 20, 5, 50), (2, 16, 1, None), (4, 128, 128, 50)]


@pytest.mark.parametrize(
    ("sizes", "name"),
    some([*zip(2 * SIZES, cycle(WITH_SCALES))], product(SIZES, WITH_SCALES)),
)
def test_paged_attention_with_scales(sizes: tuple[int, int, int, int | None], name: str) -> None:
    """Two formats of all sizes, and each format with and without a window."""
    group, head_dim, block_size, window = sizes
    given = {"group": group, "head_dim": head_dim, "block_size": block_size}
    out, expected = _attend(MIXED, window, 2, format=FORMATS[name], **given)
    _assert_close(out, expected, SINGLE)


@pytest.mark.parametrize("name", WITH_SCALES)
def test_one_kv_head_with_scales(name: str) -> None:
    """torch calls the stride of its pages, a dimension of one, that of their values alone."""
    format = FORMATS[name]
    out, expected = _attend(MIXED, 33, 2, group=7, num_kv_heads=1, head_dim=64, format=format)
    _assert_close(out, expected, SINGLE)
    lens = [(1, 5), (9, 20)]
    inputs = paged_inputs(lens, group=7, num_kv_heads=1, head_dim=64, format=format)
    wanted = copy_of(inputs.kv_cache)
    kv_write(inputs.qkv, inputs.kv_cache, LAYER, inputs.slots)
    reference.kv_write(inputs.qkv, wanted, LAYER, inputs.slots)
    assert torch.equal(inputs.kv_cache.blocks.view(torch.uint8), wanted.blocks.view(torch.uint8))


@pytest.mark.parametrize("name", WITH_SCALES)
def test_paged_attention_with_scales_in_half_precision(name: str) -> None:
    lens = [(1, 65), (3, 70), (35, 99)]
    out, expected = _attend(lens, None, 2, group=4, dtype=torch.float16, format=FORMATS[name])
    _assert_close(out, expected, HALF)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("lens", [[(1, 1100), (4, 515)], [(45, 1100)]], ids=["few", "a prompt"])
def test_a_long_context_is_cut_along_its_keys(
    lens: list[tuple[int, int]], window: int | None
) -> None:
    shape = {"group": 3, "num_kv_heads": 1}
    cut, expected = _attend(lens, window, num_programs=64, **shape)
    _assert_close(cut, expected, SINGLE)
    (launch,) = paged_inputs(lens, **shape).work(3, None, 64).launches  # type: ignore[arg-type]
    assert launch.counts[2] == 2


def test_tiles_of_prompts_are_lower_for_wide_heads() -> None:
    inputs = paged_inputs([(70, 90)], group=3, num_kv_heads=1, head_dim=144)
    ops = TritonOps(3, 1)
    paging = ops.plan(inputs, inputs.kv_cache, [None])
    assert paging.work[None].launches[-1].rows == 64
    expected = inputs.expected(None)
    _assert_close(ops.attention(inputs.qkv, inputs.kv_cache, LAYER, None, paging), expected, SINGLE)


@pytest.mark.parametrize("long_rows", [32, 64])
def test_prompts_in_lower_tiles(long_rows: int) -> None:
    inputs = paged_inputs([(1, 65), (70, 90), (40, 40)], group=3, num_kv_heads=1)
    ops = TritonOps(3, 1, long_rows=long_rows)
    paging = ops.plan(inputs, inputs.kv_cache, [None])
    assert paging.work[None].launches[-1].rows == long_rows
    expected = inputs.expected(None)
    _assert_close(ops.attention(inputs.qkv, inputs.kv_cache, LAYER, None, paging), expected, SINGLE)


@pytest.mark.parametrize(
    ("name", "window", "cap"),
    [("float32", None, None), ("int8", None, 1.5), ("float32", 50, 1.5)],
)
def test_scores_of_another_scale_and_with_a_cap(
    window: int | None, cap: float | None, name: str
) -> None:
    inputs = paged_inputs([*MIXED, (70, 90)], group=3, num_kv_heads=1, format=FORMATS[name])
    sinks = torch.randn(3)
    expected = inputs.expected(window, sinks, 0.6, cap)
    ops = TritonOps(3, 3, scores=Scores(0.6, cap))
    paging = ops.plan(inputs, inputs.kv_cache, [window])
    out = ops.attention(inputs.qkv, inputs.kv_cache, LAYER, window, paging, sinks)
    _assert_close(out, expected, SINGLE)


@pytest.mark.parametrize("size", [1, 48, 384, 1000])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    ],
)
def test_norms(size: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 3, size).to(dtype)
    weight = torch.rand(size).to(weight_dtype)
    tolerance = SINGLE if dtype == torch.float32 else HALF
    _assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), tolerance)
    for ours, theirs in zip(
        add_rms_norm(x, residual, weight, 1e-6),
        reference.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        _assert_close(ours, theirs, tolerance)


@pytest.mark.parametrize(
    ("head_dim", "rope_dim"), [(16, 16), (64, 64), (80, 80), (128, 128), (128, 64), (80, 20)]
)
@pytest.mark.parametrize("normalised_by", ["nothing", "each head", "given squares"])
def test_norm_rope(head_dim: int, rope_dim: int, normalised_by: str) -> None:
    qkv = torch.randn(3, 7, head_dim)
    norm = None if normalised_by == "nothing" else torch.rand(5, head_dim)
    squares = torch.rand(3, 5) if normalised_by == "given squares" else None
    angles = torch.randn(3, rope_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    expected = qkv.clone()
    expected[:, :5] = reference.norm_rope(qkv[:, :5], norm, 1e-6, cos, sin, squares)
    norm_rope_(qkv[:, :5], norm, 1e-6, torch.stack((cos, sin), 1), squares)
    _assert_close(qkv, expected, SINGLE)


@pytest.mark.parametrize("size", [1, 80, 1024, 1500])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mul(size: int, activation: Activation) -> None:
    gate_up = 2 * torch.randn(3, 2 * size)
    expected = reference.gated_mul(gate_up, activation)
    _assert_close(gated_mul(gate_up, activation), expected, SINGLE)


@pytest.mark.parametrize("name", ["float32", *WITH_SCALES])
@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(16, 4), (80, 16), (64, 64), (20, 3), (128, 128), (16, 1)],
)
def test_kv_write_touches_its_slots_and_nothing_else(
    head_dim: int, block_size: int, name: str
) -> None:
    inputs = paged_inputs(
        [(1, 5), (9, 20)],
        group=3,
        head_dim=head_dim,
        block_size=block_size,
        format=FORMATS[name],
    )
    inputs.qkv[0, -1] = 0.0  # a vector of zeros
    expected = copy_of(inputs.kv_cache)
    kv_write(inputs.qkv, inputs.kv_cache, LAYER, inputs.slots)
    reference.kv_write(inputs.qkv, expected, LAYER, inputs.slots)
    written = inputs.kv_cache.blocks.view(torch.uint8)
    assert torch.equal(written, expected.blocks.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of the interpreter
@pytest.mark.parametrize("name", WITH_SCALES)
def test_a_nan_reaches_the_scale(name: str) -> None:
    inputs = paged_inputs([(1, 1)], format=FORMATS[name])
    inputs.qkv[0, -1, 3] = torch.nan
    kv_write(inputs.qkv, inputs.kv_cache, LAYER, inputs.slots)
    block_id, offset = divmod(int(inputs.slots[0]), 16)
    assert inputs.kv_cache.scales is not None
    scales = inputs.kv_cache.scales[block_id, LAYER, :, :, offset]
    assert scales.isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of casts and of inf - inf
@pytest.mark.parametrize(
    ("row", "name"),
    some(
        [(3, ""), (4, ""), (5, ""), *zip((3, 4, 5), WITH_SCALES, strict=True)],
        product((3, 4, 5), WITH_SCALES),
    ),
)
def test_nan_of_a_sequence_stays_and_is_its_own(row: int, name: str) -> None:
    """Beside sequences with which it shares tiles, pieces and blocks of the cache: one that is in
    pieces (3), a draft (4) and a prompt (5)."""
    inputs = paged_inputs(MIXED, group=2, format=FORMATS[name] if name else None)
    expected = inputs.expected(None)
    first, end = inputs.query_start[row : row + 2].tolist()
    inputs.qkv[first:end, -4:] = torch.nan  # its keys and values
    kv_write(inputs.qkv, inputs.kv_cache, LAYER, inputs.slots)
    work = inputs.work(2, None, 2)
    out = paged_attention(inputs.qkv, inputs.kv_cache, LAYER, inputs, work)
    assert out[first:end].isnan().all()
    for others in (slice(first), slice(end, None)):
        _assert_close(out[others], expected[others], SINGLE)


def test_a_decoder_on_the_kernels_equals_one_on_torch() -> None:
    config = replace(SMALL, num_heads=2, num_kv_heads=1)
    weights = random_weights(config, torch.float32, CPU, seed=2)
    results = []
    for decoder in (Decoder(config, weights, TritonOps(2, 1)), Decoder(config, weights)):
        slab = new_slab(config, 16, 8, torch.float32, fill=torch.nan)
        short, long = (
            Tokens([3, 1, 4, 1, 5], [7]),
            Tokens(list(range(60)), [9, 2, 3, 0, 5, 1, 8, 4]),
        )
        run_step(decoder, slab, [(short, 4), (long, 30)], 8)
        run_step(decoder, slab, [(short, 1), (long, 29)], 8)
        run_step(decoder, slab, [(long, 1)], 8)
        results.append(torch.stack(short.logits + long.logits))
    _assert_close(results[0], results[1], SINGLE)
