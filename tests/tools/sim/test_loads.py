"""Made-up loads have the statistics that they say."""

from __future__ import annotations

import pytest

from disagg.errors import RequestError
from disagg.tools.sim.loads import LOADS, make_load
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest


def shared_percent(requests: list[TraceRequest]) -> float:
    """Of all blocks, how many an earlier prompt had."""
    known: set[int] = set()
    num_shared = num_blocks = 0
    for each in requests:
        num_blocks += -(-each.num_prompt_tokens // TRACE_BLOCK_TOKENS)
        num_shared += sum(name in known for name in each.block_names)
        known.update(each.block_names)
    return 100.0 * num_shared / num_blocks


@pytest.mark.parametrize("name", LOADS)
def test_a_load_is_the_same_for_a_seed_and_has_the_rate_that_is_asked_for(name: str) -> None:
    requests = make_load(name, 8.0, 2000, seed=1)
    assert requests == make_load(name, 8.0, 2000, seed=1) != make_load(name, 8.0, 2000, seed=2)
    assert len(requests) == 2000
    arrivals = [each.arrival_s for each in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0.0
    if name != "conversations":  # whose first turns come before there are later ones
        assert 2000 / arrivals[-1] == pytest.approx(8.0, rel=0.15)
    for each in requests:
        assert len(each.block_names) in (0, -(-each.num_prompt_tokens // TRACE_BLOCK_TOKENS))


@pytest.mark.parametrize(
    ("name", "mean_prompt", "mean_answer", "shared"),
    [
        ("conversations", 4600, 128, 77),
        ("agents", 7400, 120, 90),
        ("completions", 2048, 28, 0),
        ("mooncake-synthetic", 14_000, 150, 67),
        ("reasoning", 250, 17_300, 0),
        ("herd", 1155, 200, 0),
    ],
)
def test_lengths_and_shared_prefixes_are_as_documented(
    name: str, mean_prompt: float, mean_answer: float, shared: float
) -> None:
    requests = make_load(name, 8.0, 4000, seed=0)
    num_prompt = sum(each.num_prompt_tokens for each in requests) / 4000
    num_answer = sum(each.num_output_tokens for each in requests) / 4000
    assert num_prompt == pytest.approx(mean_prompt, rel=0.1)
    assert num_answer == pytest.approx(mean_answer, rel=0.1)
    assert shared_percent(requests) == pytest.approx(shared, abs=4)


def test_a_turn_begins_with_the_turn_before() -> None:
    requests = make_load("agents", 5.0, 400, seed=1)
    longest = max(requests, key=lambda each: each.num_prompt_tokens)
    begins = [each.block_names for each in requests if each is not longest]
    assert any(len(each) > 12 and longest.block_names[: len(each)] == each for each in begins)
    assert len({each.block_names[:6] for each in requests}) == 4, "system prompts"


def test_a_flood_is_one_tenant_in_the_middle() -> None:
    requests = make_load("flood", 10.0, 2000, seed=0)
    times = [each.arrival_s for each in requests if each.tenant == "flood"]
    assert len(times) == pytest.approx(1000, rel=0.1)
    assert times[0] >= 80.0 and times[-1] <= 120.0


def test_a_cliff_is_in_the_middle() -> None:
    requests = make_load("cliff", 10.0, 2000, seed=0)
    assert sum(each.arrival_s < 100.0 for each in requests) == pytest.approx(500, rel=0.1)


def test_an_unknown_load_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"no load 'nothing'.*agents"):
        make_load("nothing", 1.0, 1, 0)
