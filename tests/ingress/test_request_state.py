"""A request that has grown on its way names its blocks, and keeps of its draft what still holds."""

from __future__ import annotations

import pytest

from disagg.blocks import hash_blocks
from disagg.ingress.dispatch import append_tokens
from tests.router.fakes import BLOCK_SIZE, ROOT, make_request


def test_grown_names_the_blocks_that_fill() -> None:
    request = make_request(30, priority=-3)
    tokens = list(range(500, 540))
    bigger = append_tokens(request, tokens, BLOCK_SIZE)
    assert bigger.token_ids == (*request.token_ids, *tokens)
    assert bigger.block_hashes == tuple(hash_blocks(ROOT, bigger.token_ids, BLOCK_SIZE))
    assert (
        append_tokens(append_tokens(request, tokens[:7], BLOCK_SIZE), tokens[7:], BLOCK_SIZE)
        == bigger
    )
    assert (bigger.num_prompt_tokens, bigger.sampling) == (30, request.sampling)
    assert bigger.priority == -3


@pytest.mark.parametrize(
    ("gained", "left"),
    [([1], (2, 3)), ([1, 2, 3], ()), ([1, 2, 3, 4], ()), ([2], ()), ([1, 9], ()), ([1, 2, 9], ())],
)
def test_grown_keeps_the_draft_that_its_tokens_agree_with(
    gained: list[int], left: tuple[int, ...]
) -> None:
    request = make_request(5, draft_token_ids=(1, 2, 3))
    assert append_tokens(request, gained, BLOCK_SIZE).draft_token_ids == left
