"""Pieces of work cover every visible key of every query exactly once, and are evenly sized; run by
`test_interpreted.py` under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu_step_parity import check_cut
from disagg.kernels.gpu.attention_work import KEY_TILE, MIN_SPLIT_KEYS, AttentionWork
from tests.grids import examples

CPU = torch.device("cpu")
steps = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3000)), max_size=6)


def cut(
    lens: list[tuple[int, int]], num_programs: int, window: int | None = None, num_idle: int = 0
) -> AttentionWork:
    """(new tokens, those with KV before) of each sequence."""
    return check_cut(lens, num_idle, 4, window, num_programs, CPU)


@examples(10)
@given(steps, st.integers(1, 70), st.none() | st.integers(1, 2000), st.integers(1, 200))
def test_every_query_sees_its_keys_once(
    lens: list[tuple[int, int]], num_idle: int, window: int | None, num_programs: int
) -> None:
    """Also in the buffers of another step, and tokens without a sequence get zeros."""
    cut(lens, num_programs, window, num_idle)


@examples(10)
@given(st.lists(st.integers(0, 3000), max_size=9), st.integers(1, 200))
def test_decodes_see_their_keys_once(contexts: list[int], num_programs: int) -> None:
    lens = [(1, cached) for cached in contexts]
    check_cut(lens, 3, 4, None, num_programs, CPU, are_decodes=True)


@pytest.mark.parametrize("num_new", [1, 16, 200])
def test_one_long_context_fills_the_device(num_new: int) -> None:
    """Whatever the number of tiles: 16 tokens are one, and 200 are seven."""
    work = cut([(num_new, 100_000)], 40)
    sizes = []
    for launch in work.launches:
        num_first, num_last = launch.counts.tolist()[:2]
        pieces = launch.pieces.tolist()
        used = pieces[:num_first] + pieces[len(pieces) - num_last :]
        sizes += [end - start for *_, start, end, _ in used if end]
    num_keys = 100_000 * -(-num_new // 32)
    assert 38 <= len(sizes) <= 47
    assert max(sizes) <= 1.1 * num_keys / 38


def test_short_contexts_are_not_cut() -> None:
    short, _ = cut([(1, MIN_SPLIT_KEYS - 1)], 1000).launches
    assert short.counts.tolist()[:3] == [1, 0, 0]


@pytest.mark.parametrize("num_new", [100, 3000])
def test_only_prompts_that_do_not_fill_the_device_have_partial_results(num_new: int) -> None:
    _, long = cut([(num_new, 30_000)], 48).launches
    assert bool(long.counts[2]) == (num_new == 100)
    assert KEY_TILE * 48 < 30_000
