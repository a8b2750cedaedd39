"""KV by groups of layers, over NIXL: a layer's window moves as far as later tokens see it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import openai
import pytest

from disagg.kv_groups import TILE_TOKENS
from tests import plain_http
from tests.e2e.command import Command
from tests.e2e.served.operate import WINDOW, until_pulled
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import assert_same_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

BLOCK_TOKENS = 16
BLOCK_NBYTES = (
    BLOCK_TOKENS * 2 * 2 * 16 * 4
)  # of one layer: keys and values, 2 heads of 16, float32


def pulled(server: Command) -> tuple[int, int]:
    """Pulls of tiny's workers that succeeded, and their bytes."""
    workers = plain_http.get(f"{server.url}/debug/fleet").json()["workers"]
    pulls = [pull for each in workers if each["model"] == "tiny" for pull in each["pulls"]]
    return sum(each["num_ok"] for each in pulls), sum(each["nbytes"] for each in pulls)


def test_of_a_window_only_its_end_moves(
    server: Command, client: openai.OpenAI, engines: Mapping[str, SingleEngine]
) -> None:
    numbers = itertools.count()
    prompt = "{:03}: a prompt that nobody has asked before, of which a layer sees the end; " * 5
    length = len(engines["tiny"].prompt(prompt.format(*[0] * 5)))
    before = pulled(server)

    def ask() -> None:
        text = prompt.format(*[next(numbers)] * 5)
        assert_same_text(client, "tiny", engines["tiny"], text)

    until_pulled(server, ask)
    num_pulls, nbytes = (now - then for now, then in zip(pulled(server), before, strict=True))
    num_blocks = -(-length // BLOCK_TOKENS)
    num_of_window = -(-(WINDOW + TILE_TOKENS) // BLOCK_TOKENS) + 1
    assert num_blocks > 2 * num_of_window
    assert 0 < nbytes <= num_pulls * (num_blocks + num_of_window) * BLOCK_NBYTES
