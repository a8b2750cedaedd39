"""When an engine counts as stalled, and that nothing slow or stopped is taken for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.worker.liveness import DEAD_FACTOR, LOOK_S, STEP_FACTOR, TURN_S, Liveness


def still_until_stalled(liveness: Liveness, step_s: float) -> float:
    """How long an engine may stand still in a step that should take `step_s`."""
    liveness.look(1, step_s)
    while not liveness.look(1, step_s):
        assert not liveness.is_stalled
    assert liveness.is_stalled
    return liveness.still_s


def test_a_freeze_is_noticed_within_the_promised_time() -> None:
    """Five seconds, with one to spare for telling everybody."""
    assert still_until_stalled(Liveness(), 0.05) + LOOK_S <= 4.0


@given(st.floats(0.0, 100.0))
def test_a_long_step_gets_the_time_that_it_needs(step_s: float) -> None:
    still_s = still_until_stalled(Liveness(), step_s)
    assert TURN_S + STEP_FACTOR * step_s < still_s <= TURN_S + STEP_FACTOR * step_s + LOOK_S


def test_it_is_said_once_and_again_after_the_next_turn() -> None:
    liveness = Liveness()
    still_until_stalled(liveness, 0.0)
    assert not liveness.look(1, 0.0) and liveness.is_stalled
    assert not liveness.look(2, 0.0) and not liveness.is_stalled
    still_until_stalled(liveness, 0.0)


def test_it_is_dead_much_later_than_it_is_stalled() -> None:
    liveness = Liveness()
    while not liveness.is_dead:
        liveness.look(1, 0.0)
    assert DEAD_FACTOR * TURN_S < liveness.still_s <= DEAD_FACTOR * TURN_S + LOOK_S
    liveness.look(2, 0.0)
    assert not liveness.is_dead


@given(st.lists(st.booleans(), max_size=200))
def test_an_engine_that_turns_in_time_is_never_stalled(turns: list[bool]) -> None:
    liveness, num_turns, num_still = Liveness(), 0, 0
    for has_turned in turns:
        num_still = 0 if has_turned or num_still * LOOK_S >= TURN_S else num_still + 1
        num_turns += num_still == 0
        assert not liveness.look(num_turns, 0.0)
