"""KV by groups of layers: blocks of windows come and go, and nobody misses one."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import kv_groups
from disagg.blocks import HASH_NBYTES
from disagg.engine.sched.step import Sampled, SequencesFailed, StepPlan
from disagg.errors import InvalidLogits, RequestError
from disagg.kv_groups import NO_BLOCK, STATE, KVGroups, Window, block_name, group_layers
from disagg.messages import Snapshot, StepFrame, WorkerStatus, decode_to_ingress, encode
from disagg.router.prefix_index import PrefixIndex
from tests.engine.fake_runner import FakeRunner, expected_tokens
from tests.engine.workload import (
    STATES,
    WINDOWS,
    Driver,
    Workload,
    new_engine,
    new_sequence,
    prompt,
    workloads,
)
from tests.grids import examples
from tests.router.fakes import held_by

NO_STOP: frozenset[int] = frozenset()
ANY_WINDOWS = st.sampled_from([*WINDOWS, *STATES])
TILES = st.sampled_from([1, 4])


@examples(40, deadline=None)
@given(workloads(of_windows=ANY_WINDOWS), TILES)
def test_random_workloads(workload: Workload, tile: int) -> None:
    """Tokens are those of full KV, whatever chunks, hits, drafts, hand-overs and preemptions do.

    After each step every group has the blocks that the next token sees and no other, and no block
    has two owners (`Engine.check`).
    """
    with mock.patch.object(kv_groups, "TILE_TOKENS", tile):
        Driver(workload).play()


@given(st.lists(st.sampled_from([None, None, 4, 9]), min_size=1, max_size=20))
def test_each_layer_has_a_place_among_layers_of_its_window(windows: list[Window]) -> None:
    layers = group_layers(windows)
    assert len(set(layers.places)) == len(layers.places) == len(windows)
    for window, (group, place) in zip(windows, layers.places, strict=True):
        assert layers.windows[group] == window and 0 <= place < layers.num_layers
    num_full = windows.count(None)
    assert layers.windows.count(None) * layers.num_layers == num_full, "no padding that all keep"
    first_window = layers.windows.count(None)
    assert None not in layers.windows[first_window:], "full attention comes first"


@given(st.lists(st.sampled_from([None, 4, 9]), min_size=2, max_size=12), st.data())
def test_layers_that_share_kv_have_the_place_of_another(
    windows: list[Window], data: st.DataObject
) -> None:
    """Their pool has no more bytes than that of the layers before them."""
    num_own = len(windows)
    shared = data.draw(st.lists(st.sampled_from(windows), max_size=5))
    sources = [num_own - 1 - windows[::-1].index(window) for window in shared]
    own, both = (
        group_layers(windows),
        group_layers([*windows, *shared], [*range(num_own), *sources]),
    )
    assert both.places[:num_own] == own.places
    assert both.places[num_own:] == tuple(own.places[source] for source in sources)
    assert (both.windows, both.num_layers) == (own.windows, own.num_layers)


@pytest.mark.parametrize(
    ("num_windows", "num_full", "size", "windows"),
    [
        (18, 18, 18, (None, 128)),  # gpt-oss-120b
        (40, 8, 8, (None, *[128] * 5)),  # Gemma 3 12B
        (52, 10, 10, (None, *[128] * 6)),  # Gemma 3 27B
        (24, 8, 8, (None, *[128] * 3)),  # OLMo 3 7B
        (2, 7, 1, (*[None] * 7, 128, 128)),
        (32, 0, 32, (128,)),
        (0, 32, 32, (None,)),
    ],
)
def test_groups_of_models(
    num_windows: int, num_full: int, size: int, windows: tuple[Window, ...]
) -> None:
    layers = group_layers([128] * num_windows + [None] * num_full)
    assert (layers.num_layers, layers.windows) == (size, windows)


@given(ANY_WINDOWS, st.sampled_from([1, 4, 16, 64, 128]), st.integers(1, 600))
def test_needed_blocks(windows: tuple[Window, ...], size: int, num_tokens: int) -> None:
    """They have each position that the next token sees, and are counted right."""
    groups = KVGroups(windows, size)
    needed = groups.needed(num_tokens)
    assert len(set(needed)) == len(needed) == groups.num_needed(num_tokens)
    assert len(needed) <= groups.num_at_most(num_tokens)
    for group, window in enumerate(windows):
        rows = {index // len(windows) for index in needed if index % len(windows) == group}
        num_behind = num_tokens if window is None else 1 if window == STATE else window - 1
        seen = range(max(0, num_tokens - num_behind), num_tokens)
        assert {position // size for position in seen} <= rows
        # A tile and a block of more may be kept.
        assert len(rows) * size <= len(seen) + 64 + 2 * size
    table = groups.table(range(len(needed)), num_tokens)
    assert [table[index] for index in needed] == [*range(len(needed))]
    assert sum(block_id != NO_BLOCK for block_id in table) == len(needed)
    longest = groups.longest(len(needed))
    assert groups.num_at_most(longest) <= len(needed) < groups.num_at_most(longest + size)


@given(ANY_WINDOWS, st.integers(0, 12), st.data())
def test_a_prefix_is_found_where_the_next_token_sees_all(
    windows: tuple[Window, ...], num_rows: int, data: st.DataObject
) -> None:
    hashes = [bytes((row,)) * 16 for row in range(num_rows)]
    every = [block_name(each, group) for each in hashes for group in range(len(windows))]
    cached = {*every} - {*data.draw(st.lists(st.sampled_from(every or [b""]), max_size=5))}
    with mock.patch.object(kv_groups, "TILE_TOKENS", 1):
        groups = KVGroups(windows, 2)

        def is_whole(rows: int) -> bool:
            return (
                all(
                    rows <= 0
                    or window is not None
                    or all(block_name(hashes[row], group) in cached for row in range(rows))
                    for group, window in enumerate(windows)
                )
                and {*groups.names(hashes, 2 * rows)} <= cached
            )

        found = groups.num_found(hashes, cached.__contains__)
        assert found == max(rows for rows in range(num_rows + 1) if is_whole(rows))


def test_a_prompt_that_forks_in_the_middle_of_another_finds_the_windows_there() -> None:
    engine, _ = new_engine(400, 4, windows=(None, 6), max_num_batched_tokens=64)
    long = new_sequence(prompt(300), 4, 2, stop_ids=NO_STOP)
    fork = new_sequence((*prompt(200), 99), 4, 2, stop_ids=NO_STOP)
    for sequence in (long, fork):
        engine.submit(sequence)
        engine.step()
        assert engine.pool.num_blocks - engine.pool.num_free < 2 * 75
        while engine.has_work:
            engine.step()
    assert fork.num_cached_tokens == 200


def test_a_prompt_that_leaves_its_windows_behind_needs_less_than_the_pool() -> None:
    """Which has no room for all of its groups; a longer one is refused in words."""
    groups = KVGroups((None, 6), 4)
    engine, _ = new_engine(groups.num_at_most(303), 4, windows=(None, 6))
    sequence = new_sequence(prompt(300), 4, 4, stop_ids=NO_STOP)
    engine.submit(sequence)
    while engine.has_work:
        engine.step()
        engine.check()
    expected = expected_tokens(prompt(300), 4, windows=(None, 6))
    assert sequence.tokens[300:] == expected and not engine.scheduler.num_preempted
    with pytest.raises(RequestError, match="need 96 KV blocks of 4 tokens; this worker has 95"):
        engine.submit(new_sequence(prompt(304), 4, 4, stop_ids=NO_STOP))


def test_a_step_that_failed_does_not_advance_a_recurrent_state_twice() -> None:
    """It has written the states of all its sequences when one of them makes it fail."""
    engine, kv = new_engine(60, 4, windows=(None, STATE))
    bad, good = (new_sequence(prompt(6, first), 4, 8, stop_ids=NO_STOP) for first in (4, 30))

    class Failing(FakeRunner):
        def run(self, plan: StepPlan) -> list[Sampled]:
            sampled = super().run(plan)
            if bad in plan.sequences and len(bad.tokens) > 9:  # in the middle of a row
                raise SequencesFailed({bad: IndexError("planted")})
            return sampled

    engine.runner = Failing(kv)
    for sequence in (bad, good):
        engine.submit(sequence)
    while engine.has_work:
        engine.step()
        engine.check(())
    assert len(bad.tokens) == 10
    assert good.tokens[6:] == expected_tokens(prompt(6, 30), 8, windows=(None, STATE))


@pytest.mark.parametrize("windows", [(None,), (None, 6), (None, STATE)])
def test_nobody_finds_what_a_sequence_without_logits_has_left_behind(
    windows: tuple[Window, ...],
) -> None:
    """Blocks of windows and states keep their names when the sequence no longer needs them."""
    engine, kv = new_engine(200, 4, windows=windows)
    bad, other = (new_sequence(prompt(150, first), 4, 8, stop_ids=NO_STOP) for first in (4, 5))

    class Failing(FakeRunner):
        def run(self, plan: StepPlan) -> list[Sampled]:
            sampled = super().run(plan)
            is_at_end = [each is bad and len(bad.tokens) > 153 for each in plan.sequences]
            return [
                InvalidLogits("planted") if is_bad else each
                for is_bad, each in zip(is_at_end, sampled, strict=True)
            ]

    engine.runner = Failing(kv)
    for sequence in (other, bad):
        engine.submit(sequence)
        while engine.has_work:
            engine.step()
            engine.check(())
    assert len(bad.tokens) == 154 and engine.scheduler.num_corrupted == 1
    every = [{*engine.pool.groups.every_name(each.block_hashes)} for each in (bad, other)]
    found = [{name for name in names if name in engine.pool} for names in every]
    assert not found[0] and found[1] and engine.pool.num_free == 200


@pytest.mark.parametrize("windows", [(None,), (None, STATE), (None, None, STATE, STATE)])
def test_routers_know_what_the_engine_finds(windows: tuple[Window, ...]) -> None:
    """Of conversations whose turns go on from the last answers, of forks, and of new prompts; also
    from a snapshot. Of an answer's states, the last one is kept, also if its client ends it."""
    engine, _ = new_engine(400, 4, windows=windows, max_num_batched_tokens=16)
    reported, pool = PrefixIndex(), engine.pool
    reported.snapshot("engine", ())
    first = new_sequence(prompt(41), 4, 30, stop_ids=NO_STOP)
    conversation, found = [first], list[int]()
    for turn in range(4):
        sequence = conversation[-1]
        snapshot, frame = PrefixIndex(), Snapshot(1, pool.hashes(), WorkerStatus())
        received = decode_to_ingress(encode(frame))
        assert isinstance(received, Snapshot)
        snapshot.snapshot("engine", received.block_hashes)
        asked = sequence.block_hashes[: (len(sequence.tokens) - 1) // 4]
        expected = [
            held_by(index, asked, has_states=STATE in windows).get("engine", 0) * 4
            for index in (reported, snapshot)
        ]
        engine.submit(sequence)
        while engine.has_work:
            engine.step()
            if turn == 1 and sequence.num_output_tokens == 30:
                engine.abort(sequence.request_id)
            engine.check(())
        received = decode_to_ingress(encode(StepFrame(turn, (), pool.take_events())))
        assert isinstance(received, StepFrame)
        reported.apply("engine", received.kv_events)
        assert expected == [sequence.num_cached_tokens] * 2
        found.append(sequence.num_cached_tokens)
        next_turn = [*prompt(30), 99, 98] if turn == 2 else [*sequence.tokens, *prompt(7, 30)]
        max_tokens = 60 if turn == 0 else 30
        conversation.append(new_sequence(tuple(next_turn), 4, max_tokens, stop_ids=NO_STOP))
    # All that was computed of whole rows, and the fork from the end of a chunk.
    assert found == [0, 68, 104, 28 if STATE not in windows else 16]
    states = {each for each in pool.hashes() if len(each) > HASH_NBYTES}
    assert len(states) == (11 if STATE in windows else 0)


def test_drafts_are_left_out_where_a_state_could_not_be_taken_back() -> None:
    engine, _ = new_engine(60, 4, windows=(None, STATE))
    right = tuple(expected_tokens(prompt(6), 8, windows=(None, STATE)))
    sequence = new_sequence(prompt(6), 4, 8, stop_ids=NO_STOP, draft=right)
    engine.submit(sequence)
    while engine.has_work:
        engine.step()
        num_rows = sequence.num_slots // 4
        if sequence.num_computed % 4:  # else it has also the state at the end of the row before
            assert engine.pool.num_blocks - engine.pool.num_free == num_rows + (num_rows > 0)
    assert sequence.tokens[6:] == [*right] and not engine.scheduler.num_drafted
