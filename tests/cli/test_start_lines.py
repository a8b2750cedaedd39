"""The words of a start, for terminals and for logs."""

from __future__ import annotations

import pytest

from disagg.cli.lines import StartLog
from disagg.messages import StartPhase, StartStep

GB = 10**9
Worker = dict[StartPhase, StartStep]


def worker(num_done: int = 155 * GB // 10, *more: StartStep) -> Worker:
    """Has read so many bytes of 15.5 GB, and what came after them."""
    steps = (StartStep("weights", num_done, 155 * GB // 10), *more)
    return {step.phase: step for step in steps}


BLOCKS = StartStep("kv_blocks", 0, 5120, 256, 8192)
ALLOCATING = "allocating 5,120 KV blocks; steps of up to 256 sequences and 8,192 tokens"
WARM_UP = StartStep("warm_up")
READY = StartStep("ready")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (worker(72 * GB // 10), "weights 7.2 of 15.5 GB (46 %)"),
        (worker(), "weights 15.5 of 15.5 GB (100 %)"),
        ({"weights": StartStep("weights", 1_500_000, 2_000_000)}, "weights 1.5 of 2.0 MB (75 %)"),
        ({"weights": StartStep("weights", 500, 999)}, "weights 0.5 of 1.0 kB (50 %)"),
        (worker(155 * GB // 10, BLOCKS), ALLOCATING),
        (worker(155 * GB // 10, BLOCKS, WARM_UP), "warming up"),
        (worker(155 * GB // 10, BLOCKS, WARM_UP, READY), "ready"),
    ],
)
def test_what_a_worker_does_in_words(steps: Worker, words: str) -> None:
    assert StartLog({"m-decode": 1}).news({"m-decode": {"a": steps}})[-1] == f"m-decode: {words}"


def test_a_pool_is_as_far_as_its_slowest_worker() -> None:
    pools = {
        "m-prefill": {"a": worker(155 * GB // 10, BLOCKS, WARM_UP)},
        "m-decode": {"a": worker(8 * GB), "b": worker(2 * GB), "c": worker(155 * GB // 10, BLOCKS)},
        "n-decode": {"a": worker()},
    }
    sizes = {"m-prefill": 1, "m-decode": 3, "n-decode": 2, "n-prefill": 1}
    assert StartLog(sizes).news(pools) == [
        "m-prefill: weights 15.5 of 15.5 GB (100 %)",
        f"m-prefill: {ALLOCATING}",
        "m-prefill: warming up",
        "m-decode: slowest of 3: weights 2.0 of 15.5 GB (12 %)",
    ]


def test_a_log_has_a_line_for_every_tenth_and_every_phase() -> None:
    log = StartLog({"m": 1})
    lines = []
    for percent in range(1, 101):
        lines += log.news({"m": {"a": worker(155 * GB * percent // 1000)}})
    assert len(lines) == 11
    assert lines[0] == "m: weights 0.2 of 15.5 GB (1 %)"
    assert lines[1] == "m: weights 1.6 of 15.5 GB (10 %)"
    assert lines[-1] == "m: weights 15.5 of 15.5 GB (100 %)"
    steps = worker(155 * GB // 10, BLOCKS, WARM_UP, READY)
    after = [f"m: {ALLOCATING}", "m: warming up", "m: ready"]
    assert log.news({"m": {"a": steps}}) == after
    assert log.news({"m": {"a": steps}}) == []


def test_a_log_says_of_a_pool_what_holds_for_all_its_workers() -> None:
    log = StartLog({"m": 2})
    ready = worker(155 * GB // 10, BLOCKS, WARM_UP, READY)
    assert log.news({"m": {"a": ready}}) == []
    half = {"m": {"a": ready, "b": worker(155 * GB // 20)}}
    assert log.news(half) == ["m: slowest of 2: weights 7.8 of 15.5 GB (50 %)"]
    assert log.news({"m": {"a": ready, "b": ready}})[-1] == "m: slowest of 2: ready"
