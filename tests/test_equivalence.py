"""The promise of the whole system: apart, workers answer exactly what one big engine answers.

Two prefill and two decode workers, real cores, real slabs and stamps, played in one thread in a
drawn order: tiny caches, shared prefixes, preemption, tickets that are late, lost or never used,
pulls that are torn, fail or hang, notifications lost or doubled, holds that expire or are broken,
requests that are cancelled, moved or too late, links that are cut, workers that die, break or are
drained, tickets that are forged, a store that forgets.
The KV is made so that one wrong byte changes the answer (`tests/engine/fake_runner.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import kv_groups
from tests.engine.workload import STATES, WINDOWS
from tests.grids import examples
from tests.worker.fleet import assert_equivalent, assert_thrifty
from tests.worker.plays import Dice, DrawnDice, Play, play_in_quiet, play_in_trouble
from tests.worker.rehearsal import play_many


@pytest.fixture(autouse=True, scope="module")
def _quiet_log() -> Iterator[None]:
    """Every failed pull is a warning, and here most pulls fail."""
    log = logging.getLogger("disagg")
    level = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)


@st.composite
def plays(draw: st.DrawFn) -> Play:
    return play_in_trouble(DrawnDice(draw))


@examples(20)  # beside the plays of `play_many`
@given(plays())
def test_a_fleet_in_trouble_answers_what_one_engine_answers(play: Play) -> None:
    assert_equivalent(play)


def test_so_it_does_where_layers_have_windows() -> None:
    """Whose blocks leave in the middle of prompts, and move, are cached and stored apart."""
    met: Counter[str] = Counter()
    for seed in range(60):
        with mock.patch.object(kv_groups, "TILE_TOKENS", 1 + seed % 2 * 3):
            play = play_in_trouble(Dice(seed), num_trips=range(5, 15), of_windows=WINDOWS)
            met.update(assert_equivalent(play).met)
    wanted = (
        "pulled",
        "prefetched",
        "granted",
        "hit in the store",
        "hit in host memory",
        "preempted",
    )
    assert all(met[each] for each in (*wanted, "pull torn", "draft accepted")), met


def test_so_it_does_where_layers_have_recurrent_states() -> None:
    met: Counter[str] = Counter()
    for seed in range(60):
        play = play_in_trouble(Dice(seed), num_trips=range(5, 15), of_windows=STATES)
        met.update(assert_equivalent(play).met)
    assert all(met[each] for each in ("pulled", "prefetched", "granted", "preempted")), met
    assert not met["draft accepted"]


@st.composite
def quiet_plays(draw: st.DrawFn) -> Play:
    return play_in_quiet(DrawnDice(draw))


@examples(16)
@given(quiet_plays())
def test_in_quiet_times_no_token_is_computed_twice(play: Play) -> None:
    assert_thrifty(play)


def test_very_many_steps_go_well_and_meet_all_that_can_happen() -> None:
    """Or the properties above would say little. `bench.faults property_steps` plays more."""
    tally = play_many(num_steps=12_000)
    assert tally.num_steps >= 12_000
    assert not any(tally.failures.values()), tally.failures
    assert not tally.missing, tally.met
