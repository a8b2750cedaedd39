"""Block names: equal exactly when tokens, positions, model and tenant are."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.blocks import HASH_NBYTES, hash_block, hash_blocks, hash_root

ROOT = hash_root("model", 4)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=24)
SIZES = st.integers(1, 6)


@given(TOKENS, SIZES)
def test_whole_chain_equals_block_by_block(tokens: list[int], size: int) -> None:
    names, parent = [], ROOT
    for start in range(0, len(tokens) // size * size, size):
        parent = hash_block(parent, tokens[start : start + size])
        names.append(parent)
    assert hash_blocks(ROOT, tokens, size) == names
    assert all(len(name) == HASH_NBYTES for name in names)


@given(TOKENS, TOKENS, SIZES)
def test_names_agree_exactly_as_far_as_the_tokens_do(
    left: list[int], right: list[int], size: int
) -> None:
    pairs = zip(hash_blocks(ROOT, left, size), hash_blocks(ROOT, right, size), strict=False)
    for i, (a, b) in enumerate(pairs):
        end = (i + 1) * size
        assert (a == b) == (left[:end] == right[:end])


def test_same_tokens_after_another_prefix_have_another_name() -> None:
    assert hash_blocks(ROOT, [1, 2, 3, 4], 2)[1] != hash_blocks(ROOT, [9, 2, 3, 4], 2)[1]


@pytest.mark.parametrize(
    "other",
    [
        hash_root("model-2", 4),
        hash_root("model", 8),
        hash_root("model", 4, "tenant"),
        hash_root("mode", 4, "l"),
        hash_root("model4", 4, ""),
    ],
)
def test_roots_bind_model_block_size_and_tenant(other: bytes) -> None:
    assert other != ROOT
    assert hash_blocks(other, [1, 2, 3, 4], 4) != hash_blocks(ROOT, [1, 2, 3, 4], 4)


def test_another_process_computes_the_same_names() -> None:
    code = (
        "from disagg.blocks import hash_blocks, hash_root;"
        "print(hash_blocks(hash_root('model', 4), list(range(8)), 4)[-1].hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == hash_blocks(ROOT, list(range(8)), 4)[-1].hex()


def test_a_token_that_is_no_32_bit_number_is_refused() -> None:
    with pytest.raises(OverflowError):
        hash_block(ROOT, [-1])
