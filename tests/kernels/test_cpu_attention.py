"""Compiled attention gives what the reference does, however a prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu.attention import CpuAttention, CpuPaging, takes_cache
from disagg.kernels.cpu.library import Found
from disagg.kernels.kv_pages import FORMATS, KVFormat
from disagg.kernels.ops import PLAIN_SCORES, Scores
from disagg.kernels.torch.ops import TorchOps
from tests.grids import examples, pairs
from tests.kernels.paged_inputs import LAYER, NUM_LAYERS, PagedInputs, copy_of, paged_inputs

CPU = torch.device("cpu")
BF16 = FORMATS["bfloat16"]
COMPILED_FORMATS = ["bfloat16", "int8", "fp8", "int4"]
# Decodes, whole prompts, chunks behind a cached prefix; around the tile of 64 keys, and around the
# chunk of 512 keys of a decode.
LENS = [
    (1, 1),
    (1, 65),
    (1, 1100),
    (2, 2),
    (63, 63),
    (64, 64),
    (65, 65),
    (7, 64),
    (30, 200),
    (130, 131),
]


@pytest.fixture(scope="module")
def attention(step: Found) -> CpuAttention:
    assert step.loaded is not None
    return CpuAttention(step.loaded)


def _inputs(lens: Sequence[tuple[int, int]], **given: object) -> PagedInputs:
    # Free blocks are NaN, and so is what lies behind a context in its last block.
    return paged_inputs(lens, dtype=torch.bfloat16, **given)  # type: ignore[arg-type]


def _attend(
    attention: CpuAttention,
    inputs: PagedInputs,
    window: int | None = None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    ops = TorchOps(attention=attention, scores=scores)
    paging = ops.plan(inputs, inputs.kv_cache, [window])
    assert isinstance(paging[0], CpuPaging)
    return ops.attention(inputs.qkv, inputs.kv_cache, LAYER, window, paging, sinks)


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    # Weights and results are rounded to bfloat16, 2^-9 of them; an average of values of about 1.
    torch.testing.assert_close(actual, expected, atol=1.6e-2, rtol=8e-3)


@pytest.mark.parametrize(
    ("sizes", "window", "name"),
    pairs(
        [(1, 16, 16), (3, 64, 5), (7, 80, 1), (2, 128, 32)],
        [None, 1, 20, 64, 100],
        COMPILED_FORMATS,
    ),
)
def test_it_is_the_reference(
    sizes: tuple[int, int, int], window: int | None, name: str, attention: CpuAttention
) -> None:
    """Of each format with each window and with all sizes of groups, heads and blocks."""
    group, head_dim, block_size = sizes
    inputs = _inputs(
        LENS, group=group, head_dim=head_dim, block_size=block_size, format=FORMATS[name]
    )
    expected = inputs.expected(window)
    _assert_close(_attend(attention, inputs, window), expected)


@pytest.mark.parametrize("window", [None, 40])
def test_with_sinks(window: int | None, attention: CpuAttention) -> None:
    inputs = _inputs(LENS, group=3, head_dim=64)
    sinks = torch.tensor([-30.0, 0.0, 3.0, 8.0, -2.0, 30.0])
    expected = inputs.expected(window, sinks)
    _assert_close(_attend(attention, inputs, window, sinks), expected)


@pytest.mark.parametrize("format", COMPILED_FORMATS)
def test_scores_of_another_scale_and_with_a_cap(format: str, attention: CpuAttention) -> None:
    inputs = _inputs(LENS, group=3, head_dim=64, format=FORMATS[format])
    for scale, cap in ((0.6, None), (0.3, 1.5), (None, 0.5)):
        expected = inputs.expected(None, None, scale, cap)
        _assert_close(_attend(attention, inputs, scores=Scores(scale, cap)), expected)


@pytest.mark.parametrize(("num_heads", "block_size"), [(1, 16), (6, 5)])
def test_latents(num_heads: int, block_size: int, attention: CpuAttention) -> None:
    """One vector is the key and the value."""
    inputs = _inputs(
        LENS, group=num_heads, num_kv_heads=1, head_dim=48, block_size=block_size, num_vectors=1
    )
    expected = inputs.expected(None, scale=0.3)
    ops = TorchOps(attention=attention)
    paging = ops.plan(inputs, inputs.kv_cache, [None])
    found = ops.latent_attention(inputs.qkv, inputs.kv_cache, LAYER, paging, 48, 0.3)
    _assert_close(found.flatten(1), expected)


@pytest.mark.parametrize("name", COMPILED_FORMATS)
def test_what_is_stored_is_the_references(name: str, attention: CpuAttention) -> None:
    """To the byte, by all layers of a step; nothing else changes, but for what the step clears."""
    lens = [(1, 7), (1, 33), (9, 20), (16, 32)]
    inputs = _inputs(lens, group=3, head_dim=64, format=FORMATS[name])
    inputs.qkv[0, -1] = 0.0  # a vector of zeros
    expected = copy_of(inputs.kv_cache)
    for row in (1, 2):  # whose last block is begun and not filled
        expected.blocks[int(inputs.block_tables[row, inputs.context_lens_host[row] // 16])] = 0
    ops = TorchOps(attention=attention)
    paging = ops.plan(inputs, inputs.kv_cache, [None])
    for layer in range(NUM_LAYERS):
        reference.kv_write(inputs.qkv, expected, layer, inputs.slots)
        ops.attention(inputs.qkv, inputs.kv_cache, layer, None, paging)
    assert torch.equal(inputs.kv_cache.blocks.view(torch.uint8), expected.blocks.view(torch.uint8))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("format", [BF16, FORMATS["int8"]], ids=lambda format: format.name)
def test_threads_and_other_prompts_change_nothing(
    format: KVFormat, threads: int, attention: CpuAttention
) -> None:
    lens = [(200, 300), (3, 3), (64, 640)]
    alone = _attend(attention, _inputs(lens, group=3, format=format))
    torch.set_num_threads(threads)
    assert torch.equal(_attend(attention, _inputs(lens, group=3, format=format)), alone)


@examples(10)
@given(data=st.data())
def test_a_prompt_may_be_cut_anywhere(data: st.DataObject, attention: CpuAttention) -> None:
    """To the bit: the chunks of a prompt give what the whole prompt gives."""
    length = data.draw(st.integers(2, 200))
    window = data.draw(st.sampled_from([None, 1, 33, 64, 150]))
    name = data.draw(st.sampled_from(COMPILED_FORMATS))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=3)))
    whole = _inputs([(length, length)], group=2, head_dim=32, format=FORMATS[name])
    whole.qkv[:, :4] *= 8  # queries: later keys have scores far above those of earlier ones
    expected = _attend(attention, whole, window)
    parts, start = [], 0
    for end in [*cuts, length]:
        if end - start == 1:  # a decode, which reads keys in another way
            end = min(end + 1, length)
        if end <= start + 1:
            break
        part = PagedInputs(
            qkv=whole.qkv[start:end],
            kv_cache=whole.kv_cache,
            slots=whole.slots[start:end],
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=whole.block_tables,
            query_lens=(end - start,),
            context_lens_host=(end,),
        )
        parts.append(_attend(attention, part, window))
        start = end
    made = torch.cat(parts)
    assert torch.equal(made, expected[: made.shape[0]])


def test_models_in_bfloat16_have_it(
    monkeypatch: pytest.MonkeyPatch, attention: CpuAttention
) -> None:
    found = Found(attention._library, "compiled")
    monkeypatch.setattr(dispatch, "find_step", lambda: found)
    inputs = _inputs([(5, 9)])

    def is_compiled(dtype: torch.dtype | None) -> bool:
        ops = dispatch.ops_for(CPU, 4, dtype=dtype)
        assert isinstance(ops, TorchOps)
        return isinstance(ops.plan(inputs, inputs.kv_cache, [None])[0], CpuPaging)

    assert is_compiled(torch.bfloat16)
    assert not is_compiled(torch.float32)
    assert not is_compiled(None)


def test_odd_head_sizes_and_exact_formats_are_torchs(attention: CpuAttention) -> None:
    odd = _inputs([(5, 9)], head_dim=20)
    exact = paged_inputs([(5, 9)], dtype=torch.float32)
    for inputs in (odd, exact):
        assert not takes_cache(inputs.kv_cache)
        paging = TorchOps(attention=attention).plan(inputs, inputs.kv_cache, [None])
        assert not isinstance(paging[0], CpuPaging)


def test_scores_that_grow(attention: CpuAttention) -> None:
    """What was summed up before a far larger score is multiplied by a factor."""
    inputs = _inputs([(300, 400)], group=3, head_dim=64)
    inputs.qkv[:, :6] *= 6  # queries
    _assert_close(_attend(attention, inputs), inputs.expected(None))


def test_large_scores_do_not_overflow(attention: CpuAttention) -> None:
    inputs = _inputs([(100, 100)], group=2, head_dim=64)
    inputs.qkv[:, :4] *= 1e4  # queries
    expected = inputs.expected(None)
    made = _attend(attention, inputs)
    assert torch.isfinite(made).all()
    # One key has all the weight, save in ties that rounding decides.
    same = ((made - expected).abs() < 0.05).float().mean()
    assert same > 0.99
