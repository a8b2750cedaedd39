"""Steps of several ranks that are launched before the last one is read.

As in `test_launching`: a late first rank stands for a GPU, and the other ranks have the message of
a step before the step before it is computed. They are threads, which talk by gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.errors import RequestFailed
from disagg.rank_messages import RankStep
from tests.engine.fake_followers import FakeFollowers, engine_of_ranks
from tests.engine.test_blame import (
    SAMPLINGS,
    break_edits,
    break_inputs,
    break_numbers,
    said_alone,
)
from tests.engine.test_launching import (
    BLOCK_SIZE,
    GREEDY,
    MIXTURES,
    LateRunner,
    play,
    play_at_once,
    said_in_order,
    sequences,
    tokens_of,
)
from tests.grids import pairs
from tests.tiny_model import write_tiny_model

NUM_LAYERS = 2


@contextmanager
def ranks(
    directory: Path, num_ranks: int, num_blocks: int, place: Path, **settings: bool
) -> Iterator[tuple[Engine, FakeFollowers]]:
    """An engine of so many ranks, whose steps are launched ahead."""
    sizes = {
        "block_size": BLOCK_SIZE,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "num_gpu_blocks_override": num_blocks,
        **settings,
    }
    made = engine_of_ranks(directory, place, num_ranks=num_ranks, **sizes)
    with made as (engine, kv_cache, others):
        assert isinstance(engine.runner, ModelRunner)
        runner = LateRunner(engine.runner.decoder, kv_cache, others, engine.runner.max_model_len)
        engine.runner = engine.launcher = runner
        yield engine, others


@pytest.mark.parametrize(
    ("num_ranks", "num_blocks", "mixture"),
    [(2, 16, "everything"), (2, 60, "early ends"), (4, 60, "everything")],
)
def test_ranks_launched_ahead_say_what_one_rank_says_in_order(
    num_ranks: int, num_blocks: int, mixture: str, directory: Path, tmp_path: Path
) -> None:
    expected = tokens_of(said_in_order(directory, mixture, 3))
    with ranks(directory, num_ranks, num_blocks, tmp_path) as (engine, others):
        runner = engine.runner
        assert isinstance(runner, LateRunner)
        assert tokens_of(play(engine, sequences(3, MIXTURES[mixture]))) == expected
    assert runner.num_followed > runner.num_continued > 0
    given = [each for each in others.given if isinstance(each, RankStep)]
    assert sum(each.shape.num_unread > 0 for each in given) == runner.num_followed
    assert all(each.shares_tokens for each in given if each.shape.num_unread)


@pytest.mark.parametrize(
    ("break_", "is_ahead", "num_before"),
    pairs([break_numbers, break_edits, break_inputs], [False, True], [0, 4]),
)
def test_others_go_on_also_with_ranks(
    break_: Any,
    is_ahead: bool,
    num_before: int,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `test_blame`: the other ranks do not notice a failure of the first one's host code."""
    expected = said_alone(directory)
    with ranks(directory, 2, 60, tmp_path) as (engine, _):
        assert isinstance(engine.runner, LateRunner)
        engine.runner.is_late = False
        engine.launcher = engine.runner if is_ahead else None
        with monkeypatch.context() as patch:
            break_(patch, num_before)
            found = play_at_once(engine, sequences(6, SAMPLINGS))
        assert isinstance(found.pop("0")[-1], RequestFailed)
        assert found == {name: told for name, told in expected.items() if name != "0"}
        assert play_at_once(engine, sequences(6, SAMPLINGS)) == expected


def counted(engine: Engine, others: FakeFollowers) -> list[tuple[int, dict[str, int]]]:
    """What each call of `step` sent to the other ranks, and asked of them, until all is done."""
    seen = []
    while engine.has_work:
        others.communicator.calls.clear()
        num_before = len(others.given)
        engine.step()
        seen.append((len(others.given) - num_before, dict(others.communicator.calls)))
    return seen


def test_what_a_step_asks_of_the_ranks(directory: Path, tmp_path: Path) -> None:
    """One message; a sum for the embedding and two a layer; the logits, and the tokens back."""
    of_a_step = {"all_reduce_": 1 + 2 * NUM_LAYERS, "gather": 1}
    with ranks(directory, 2, 60, tmp_path) as (engine, others):
        assert isinstance(engine.runner, LateRunner)
        engine.runner.is_late = False  # what is launched is computed in the same call
        for sequence in sequences(3, [GREEDY] * 3):
            engine.submit(sequence)
        first, *between, last = counted(engine, others)
        of_a_launch = {**of_a_step, "broadcast_": 1}
        assert first == (2, {name: 2 * num for name, num in of_a_launch.items()})
        assert between == [(1, of_a_launch)] * len(between) and len(between) > 4
        assert last == (0, {})  # its results are read

        engine.launcher = None  # the host reads each step: no tokens are sent back
        engine.submit(sequences(5, [GREEDY])[0])
        in_order = counted(engine, others)
        assert in_order == [(1, of_a_step)] * len(in_order) and len(in_order) > 4


def test_whole_experts_ask_for_no_more(tmp_path: Path) -> None:
    """The sum after each MLP is the one that there is in any case."""
    directory = write_tiny_model(tmp_path / "model", has_experts=True)
    expected = tokens_of(said_in_order(directory, "everything", 3))
    made = ranks(directory, 2, 60, tmp_path, enable_expert_parallel=True)
    with made as (engine, others):
        assert tokens_of(play(engine, sequences(3, MIXTURES["everything"]))) == expected
        others.communicator.calls.clear()
        engine.launcher = None
        engine.submit(sequences(5, [GREEDY])[0])
        steps = counted(engine, others)
        assert steps == [(1, {"all_reduce_": 1 + 2 * NUM_LAYERS, "gather": 1})] * len(steps)
