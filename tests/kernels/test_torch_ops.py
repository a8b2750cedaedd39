"""The operations for CPUs equal their references, whatever the dtype and the batch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.activation import Activation
from disagg.kernels.kv_pages import FORMATS, KVFormat
from disagg.kernels.ops import Scores, TokenIndex
from disagg.kernels.torch.attention import TorchPaging
from disagg.kernels.torch.ops import TorchOps
from tests.grids import pairs
from tests.kernels.paged_inputs import LAYER, chosen_inputs, copy_of, paged_inputs

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)
WITH_SCALES = ["int8", "int4", "fp8"]


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 100])
def test_rms_norm_of_few_and_many_rows(num_rows: int, dtype: torch.dtype) -> None:
    # Small values, so that the epsilon counts.
    x, drawn = (torch.randn(num_rows, 96) * 1e-3).to(dtype), torch.rand(96)
    for weight in (drawn.to(dtype), drawn):
        normed = TorchOps().rms_norm(x, weight, 1e-6)
        assert normed.dtype == dtype
        _assert_close(normed, reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(
    ("rope_dim", "normalised_by", "dtype", "norm_dtype"),
    pairs([64, 24], ["nothing", "each head", "given squares"], DTYPES, [None, torch.float32]),
)
def test_norm_rope(
    rope_dim: int, normalised_by: str, dtype: torch.dtype, norm_dtype: torch.dtype | None
) -> None:
    ops = TorchOps()
    qkv = torch.randn(5, 7, 64).to(dtype)
    norm = None if normalised_by == "nothing" else torch.rand(5, 64).to(norm_dtype or dtype)
    squares = torch.rand(5, 5) if normalised_by == "given squares" else None
    angles = torch.randn(9, rope_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    picked = torch.tensor([8, 0, 3, 3, 5])
    expected = qkv.clone()
    turned = reference.norm_rope(qkv[:, :5], norm, 1e-6, cos[picked], sin[picked], squares)
    expected[:, :5] = turned
    rows = ops.rope_table(cos, sin, dtype).index_select(0, picked)
    ops.norm_rope_(qkv[:, :5], norm, 1e-6, rows, squares)
    _assert_close(qkv, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_projections(num_rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    ops = TorchOps()
    x, residual = torch.randn(2, num_rows, 64).to(dtype)
    weight = (torch.randn(96, 64) * 0.1).to(dtype)
    square, norm = (torch.randn(64, 64) * 0.1).to(dtype), torch.rand(64).to(dtype)
    bias = torch.randn(96).to(dtype) if with_bias else None
    wide = x.float() @ weight.float().T + (0.0 if bias is None else bias.float())
    _assert_close(ops.project(x, ops.pack(weight, bias)), wide.to(dtype))
    gate_up = ops.pack_gated(weight, bias)
    for activation in get_args(Activation):
        gated = ops.project_gated(x, gate_up, activation)
        _assert_close(gated, reference.gated_mul(wide, activation).to(dtype))
    total = (residual.float() + x.float() @ square.float().T).to(dtype)
    added, normed = ops.project_add_norm(x, ops.pack(square, None), residual, norm, 1e-6)
    _assert_close(added, total)
    _assert_close(normed, reference.rms_norm(added, norm, 1e-6))


@pytest.mark.parametrize(
    ("sizes", "window", "name", "dtype"),
    pairs(
        [(1, 16, 16), (3, 20, 5), (7, 64, 1)],
        [None, 1, 20],
        ["exact", *WITH_SCALES],
        [torch.float32, torch.bfloat16],
    ),
)
def test_attention(
    sizes: tuple[int, int, int], window: int | None, name: str, dtype: torch.dtype
) -> None:
    """Of each format with each window and with all sizes of groups, heads and blocks."""
    group, head_dim, block_size = sizes
    lens = [(1, 1), (1, 16), (1, 65), (3, 40), (30, 30), (17, 50)]
    inputs = paged_inputs(
        lens,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        format=FORMATS.get(name),
    )
    expected, ops = inputs.expected(window), TorchOps()
    paging = ops.plan(inputs, inputs.kv_cache, [window])
    _assert_close(ops.attention(inputs.qkv, inputs.kv_cache, LAYER, window, paging), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "block_size"), [(1, 16), (6, 5)])
def test_latent_attention(num_heads: int, block_size: int, dtype: torch.dtype) -> None:
    lens = [(1, 1), (1, 16), (1, 65), (3, 40), (30, 30), (300, 320)]
    inputs = paged_inputs(
        lens,
        group=num_heads,
        num_kv_heads=1,
        head_dim=28,
        block_size=block_size,
        dtype=dtype,
        num_vectors=1,
    )
    expected = inputs.expected(None, scale=0.3).view(-1, num_heads, 28)[..., :20]
    ops = TorchOps()
    paging = ops.plan(inputs, inputs.kv_cache, [None])
    found = ops.latent_attention(inputs.qkv, inputs.kv_cache, LAYER, paging, 20, 0.3)
    _assert_close(found, expected)


@pytest.mark.parametrize("with_nan", [False, True])
def test_latent_attention_to_chosen_tokens(with_nan: bool) -> None:
    lens, index = [(3, 40), (1, 1), (1, 65), (30, 30), (60, 90)], TokenIndex(13, 6)
    drawn = chosen_inputs(
        lens,
        num_heads=4,
        key_dim=28,
        head_dim=34,
        index=index,
        index_heads=3,
        block_size=5,
        with_nan=with_nan,
    )
    ops, cache = TorchOps(scores=Scores(index=index)), drawn.inputs.kv_cache
    paging = ops.plan(drawn.inputs, cache, [None])
    for asked in (drawn.asked, None):  # a layer that chooses, and one that does not
        at = drawn.inputs.qkv, cache, LAYER, paging
        _assert_close(ops.latent_attention(*at, 20, 0.3, asked), drawn.expected(20, 0.3))
    assert isinstance(paging[0], TorchPaging) and paging[0].chosen is not None
    drawn.assert_chosen(paging[0].chosen)


@pytest.mark.parametrize("window", [None, 300])
def test_attention_of_skewed_decodes_and_of_a_long_chunk(window: int | None) -> None:
    lens = [(1, 900), (1, 3), (1, 500), (1, 880), (1, 16), (400, 700)]
    inputs = paged_inputs(lens, group=2, begun_blocks_are_clean=True)
    expected = inputs.expected(window)
    ops = TorchOps()
    paging = ops.plan(inputs, inputs.kv_cache, [window])
    _assert_close(ops.attention(inputs.qkv, inputs.kv_cache, LAYER, window, paging), expected)


@pytest.mark.parametrize(
    ("sizes", "name", "dtype"),
    pairs([(16, 16), (20, 3), (64, 1), (128, 8)], WITH_SCALES, DTYPES),
)
def test_what_is_stored_with_scales_is_the_references(
    sizes: tuple[int, int], name: str, dtype: torch.dtype
) -> None:
    """To the byte, and nothing else of the cache changes: not even the padding of a page."""
    head_dim, block_size = sizes
    inputs = paged_inputs(
        [(1, 7), (9, 20)],
        group=3,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        format=FORMATS[name],
    )
    inputs.qkv[0, -1] = 0.0  # a vector of zeros
    inputs.qkv[1, -1] *= 1e-20
    expected, ops = copy_of(inputs.kv_cache), TorchOps()
    paging = ops.plan(inputs, inputs.kv_cache, [None])
    expected.blocks.copy_(inputs.kv_cache.blocks)  # with what planning cleared
    ops.attention(inputs.qkv, inputs.kv_cache, LAYER, None, paging)
    reference.kv_write(inputs.qkv, expected, LAYER, inputs.slots)
    assert torch.equal(inputs.kv_cache.blocks, expected.blocks)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_bytes_of_int4(sign: float) -> None:
    """Whichever sign the largest value has, it is -8 steps: the scale has the other one."""
    format = FORMATS["int4"]
    vector = sign * torch.arange(-8.0, 8.0) / 4
    stored, scale = reference.quantize(vector, format)
    assert stored.view(torch.uint8).numpy().tobytes().hex() == "98badcfe10325476"
    assert float(scale) == sign / 64
    assert torch.equal(reference.widen(stored, format) * scale, vector)
    # As far from 0 on the other side there is no number, only the next one.
    both, scale = reference.quantize(torch.tensor([-2.0, 2.0]), format)
    assert (reference.widen(both, format) * scale).tolist() == [-2.0, 1.75]


@pytest.mark.parametrize(
    ("cap", "window", "dtype", "format"),
    pairs([None, 1.5], [None, 20], [torch.float32, torch.bfloat16], [None, FORMATS["int8"]]),
)
def test_scores_of_another_scale_and_with_a_cap(
    cap: float | None, window: int | None, dtype: torch.dtype, format: KVFormat | None
) -> None:
    lens = [(1, 1), (1, 65), (3, 40), (30, 30), (300, 300)]
    inputs = paged_inputs(
        lens, group=3, dtype=dtype, format=format, begun_blocks_are_clean=format is None
    )
    sinks = torch.randn(6)
    for own in (None, sinks):
        expected = inputs.expected(window, own, 0.6, cap)
        ops = TorchOps(scores=Scores(0.6, cap))
        paging = ops.plan(inputs, inputs.kv_cache, [window])
        out = ops.attention(inputs.qkv, inputs.kv_cache, LAYER, window, paging, own)
        _assert_close(out, expected)
    assert float((expected - inputs.expected(window, sinks)).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("format", "magnitude", "window"),
    pairs([("int8", 0.01), ("fp8", 0.04), ("int4", 0.1)], [1e-3, 1.0, 300.0], [None, 33]),
)
def test_attention_with_scales_stays_near_to_exact_attention(
    format: tuple[str, float], magnitude: float, window: int | None
) -> None:
    """Largest error of values in the usual range, as a fraction of the largest value."""
    name, bound = format
    lens = [(1, 1), (1, 400), (5, 77), (64, 64), (50, 300)]
    exact, stored = (
        paged_inputs(lens, group=3, head_dim=64, format=each) for each in (None, FORMATS[name])
    )
    for inputs in (exact, stored):
        inputs.qkv[:, -2:] *= magnitude  # the values of both heads
        values = inputs.kv_cache.values if inputs is exact else inputs.kv_cache.scales
        assert values is not None
        values[:, :, 1] *= magnitude
    ops = TorchOps()
    paging = ops.plan(stored, stored.kv_cache, [window])
    out = ops.attention(stored.qkv, stored.kv_cache, LAYER, window, paging)
    expected = exact.expected(window)
    error = float((out - expected).abs().max() / expected.abs().max())
    assert 1e-4 < error < bound
