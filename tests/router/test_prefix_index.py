"""The index agrees with sets of names kept per worker, never grows past its bound, and keeps
nothing of workers that are gone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.blocks import BlockHash
from disagg.kv_groups import STATE_MARK
from disagg.messages import KVEvent
from disagg.router import prefix_index
from disagg.router.prefix_index import BLOCK_NBYTES, PrefixIndex
from tests.router.fakes import held_by

WORKERS = ["a", "b", "c"]
NUM_BOUNDED = 20_000
NUM_SHARDS, MAX_MASKS = 16, 200


@pytest.fixture(autouse=True, scope="module")
def few_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "NUM_SHARDS", NUM_SHARDS)
        patch.setattr(prefix_index, "MAX_MASKS", MAX_MASKS)
        yield


# Two prompts that begin alike: names of their blocks.
NAMES = [bytes([i]) * 16 for i in range(12)]
OTHER = [*NAMES[:4], *(bytes([i]) * 16 for i in range(100, 106))]

# Leading blocks of both prompts: a worker never has a block without those before it.
held_blocks = st.tuples(st.integers(0, len(NAMES)), st.integers(0, len(OTHER)))
changes = st.one_of(
    st.tuples(st.sampled_from(["snapshot", "stored", "removed"]), held_blocks),
    st.tuples(st.just("drop"), st.just((0, 0))),
)


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(WORKERS), changes), max_size=40),
    num_reports=st.sampled_from([0, 1, NUM_SHARDS]),
)
def test_it_agrees_with_plain_sets(
    steps: list[tuple[str, tuple[str, tuple[int, int]]]], num_reports: int
) -> None:
    index = PrefixIndex()
    truth: dict[str, set[BlockHash]] = {}
    for worker_id, (kind, (num, num_other)) in steps:
        begins = {*NAMES[:num], *OTHER[:num_other]}
        if kind == "snapshot":
            index.snapshot(worker_id, begins)
            truth[worker_id] = begins
        elif kind == "drop":
            index.drop(worker_id)
            truth.pop(worker_id, None)
        else:
            held = truth.get(worker_id, set())
            # Blocks that were stored before come again, and those behind others leave first.
            after = held | begins if kind == "stored" else held & begins
            names = begins if kind == "stored" else held - begins
            index.apply(worker_id, [KVEvent(kind, (*names, b"0" * 16))])  # type: ignore[arg-type]
            index.apply(worker_id, [KVEvent("removed", (b"0" * 16,))])
            if worker_id in truth:
                truth[worker_id] = after
        report(index, truth, num_reports)
        for prompt in (NAMES, OTHER, NAMES[:0]):
            depths = {each: len(held & {*prompt}) for each, held in truth.items()}
            assert held_by(index, prompt) == {
                each: depth for each, depth in depths.items() if depth
            }
    report(index, [*truth, "c"] if truth else [], 2 * NUM_SHARDS)
    if truth:
        assert index.num_blocks == len(set().union(*truth.values()))


def report(index: PrefixIndex, workers: Iterable[str], num_times: int) -> None:
    """Workers that report again and again, without news."""
    for worker_id in workers:
        for _ in range(num_times):
            index.apply(worker_id, [])


@settings(deadline=None)
@given(
    held=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 12), min_size=1),
    among=st.sets(st.sampled_from("abcdefgh")),
    turn=st.floats(0, 1),
    most=st.integers(1, 8),
)
def test_of_some_workers_it_names_those_that_hold_most_first(
    held: dict[str, int], among: set[str], turn: float, most: int
) -> None:
    index = PrefixIndex()
    for worker_id, num_blocks in held.items():
        index.snapshot(worker_id, NAMES[:num_blocks])
    found, names = index.find(NAMES), {index.bit(name): name for name in held}
    chosen = [names[bit] for bit in found.deepest(sum(map(index.bit, among)), most, turn)]
    depths = sorted((held.get(name, 0) for name in among), reverse=True)
    assert [held[name] for name in chosen] == [depth for depth in depths if depth][:most]
    assert len(set(chosen)) == len(chosen) and among.issuperset(chosen)


@given(
    rows=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 12), min_size=1),
    states=st.dictionaries(st.sampled_from("abcd"), st.sets(st.integers(0, 11))),
)
def test_with_recurrent_states_a_worker_has_what_it_can_go_on_from(
    rows: dict[str, int], states: dict[str, set[int]]
) -> None:
    """Rows without a state are not of use, nor is a state whose rows are gone."""
    index, truth = PrefixIndex(), dict[str, int]()
    for worker_id, num_rows in rows.items():
        index.snapshot(worker_id, NAMES[:num_rows])
        own = states.get(worker_id, set())
        index.apply(worker_id, [KVEvent("stored", tuple(NAMES[row] + STATE_MARK for row in own))])
        truth[worker_id] = max((row + 1 for row in own if row < num_rows), default=0)
    held = {name: depth for name, depth in truth.items() if depth}
    assert held_by(index, NAMES, has_states=True) == held
    assert held_by(index, NAMES) == {name: number for name, number in rows.items() if number}
    found, names = index.find(NAMES, has_states=True), {index.bit(name): name for name in rows}
    chosen = [names[bit] for bit in found.deepest(sum(names), len(rows), 0.0)]
    assert [truth[name] for name in chosen] == sorted(held.values(), reverse=True)


def test_where_equal_workers_begin_is_drawn() -> None:
    index = PrefixIndex()
    for worker_id in "abcd":
        index.snapshot(worker_id, NAMES)
    found, bits = index.find(NAMES), [*map(index.bit, "abcd")]
    firsts = [found.deepest(sum(bits), 1, turn) for turn in (0.0, 0.3, 0.6, 0.9)]
    assert sorted(firsts) == sorted([bit] for bit in bits)


def bounded() -> PrefixIndex:
    index = PrefixIndex(NUM_BOUNDED * BLOCK_NBYTES)
    assert index.max_num_blocks == NUM_BOUNDED
    return index


def random_names(rng: random.Random, num_names: int) -> list[BlockHash]:
    return [rng.randbytes(16) for _ in range(num_names)]


def test_what_several_workers_have_leaves_after_what_one_has() -> None:
    index, rng = bounded(), random.Random(1)
    common, own = random_names(rng, 5000), random_names(rng, 5000)
    for worker_id in "ab":
        index.snapshot(worker_id, common)
    index.apply("a", [KVEvent("stored", tuple(own))])
    index.apply("a", [KVEvent("stored", tuple(random_names(rng, 16_000)))])
    assert sum(len(held_by(index, [name])) == 2 for name in common) > 4000
    assert sum(bool(held_by(index, [name])) for name in own) < 500
    for _ in range(30):  # all blocks are of several
        names = tuple(random_names(rng, 1000))
        for worker_id in "ab":
            index.apply(worker_id, [KVEvent("stored", names)])
            assert index.num_blocks <= NUM_BOUNDED
        assert sum(len(held_by(index, [name])) == 2 for name in names) > 900


def test_its_bytes_are_bounded_under_new_prefixes_for_ever() -> None:
    index, rng = bounded(), random.Random(2)
    before = index.nbytes
    index.snapshot("a", ())
    sizes = []
    for _ in range(100):
        index.apply("a", [KVEvent("stored", tuple(random_names(rng, 2000)))])
        sizes.append(index.nbytes)
        assert index.num_blocks <= NUM_BOUNDED
    assert max(sizes) <= before + NUM_BOUNDED * BLOCK_NBYTES
    assert index.num_blocks > 0.95 * NUM_BOUNDED


def test_restarts_use_up_neither_bits_nor_bytes() -> None:
    index, rng = PrefixIndex(), random.Random(3)
    stays, restarts = random_names(rng, 300), random_names(rng, 300)
    index.snapshot("stays", stays)
    index.snapshot("restarts", [*stays[:4], *restarts])
    report(index, ["stays"], 2 * NUM_SHARDS)
    before = index.nbytes
    for _ in range(20):
        index.snapshot("restarts", [*stays[:4], *restarts])
        report(index, ["stays"], 2 * NUM_SHARDS)
        assert index.nbytes < 1.2 * before
    assert index.num_bits <= 4  # a name's own, and one that is swept out
    assert held_by(index, stays) == {"stays": 300, "restarts": 4}


def test_restarts_that_come_faster_than_bits_are_swept_out() -> None:
    index, rng = PrefixIndex(), random.Random(4)
    names = random_names(rng, 300)
    index.snapshot("stays", names)
    for _ in range(5 * NUM_SHARDS):
        index.snapshot("restarts", names[:4])
    assert index.num_bits <= 2 * NUM_SHARDS + 2
    assert held_by(index, names) == {"stays": 300, "restarts": 4}


@pytest.mark.parametrize("others", [("stays",), ()])
def test_nothing_is_kept_of_a_worker_that_left(others: tuple[str, ...]) -> None:
    index, rng = PrefixIndex(), random.Random(5)
    common, own = random_names(rng, 200), random_names(rng, 20_000)
    for worker_id in others:
        index.snapshot(worker_id, common)
    before, num_before = index.nbytes, index.num_blocks
    index.snapshot("leaves", [*common, *own])
    assert index.nbytes > before + 20_000 * 20
    index.drop("leaves")
    held = dict.fromkeys(others, 200)
    assert held_by(index, common) == held and held_by(index, own[:1]) == {}
    index.snapshot("new", ())
    report(index, ["new"], NUM_SHARDS)
    assert index.num_blocks == num_before
    assert index.nbytes <= before + 1000  # the masks of two workers
    assert held_by(index, common) == held


def test_names_that_only_lost_workers_held_leave_with_the_last_holder() -> None:
    index = PrefixIndex()
    index.snapshot("lost", NAMES)
    index.snapshot("stays", NAMES)
    index.drop("lost")
    index.apply("stays", [KVEvent("removed", tuple(NAMES))])
    assert index.num_blocks == 0


def test_few_blocks_of_lost_workers_are_gone_after_few_reports() -> None:
    """So figures of a small or idle fleet are soon right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "NUM_SHARDS", 1024)
        index, rng = PrefixIndex(), random.Random(6)
        index.snapshot("stays", NAMES)
        index.snapshot("lost", [*NAMES, *random_names(rng, 500)])
        index.drop("lost")
        report(index, ["stays"], 1024 // prefix_index.SHARDS_AT_ONCE)
        assert index.num_blocks == len(NAMES)


def test_names_of_lost_workers_make_room_first_and_are_not_counted_as_evicted() -> None:
    index, rng = bounded(), random.Random(10)
    before = index.nbytes
    index.snapshot("stays", ())
    index.snapshot("leaves", random_names(rng, NUM_BOUNDED))
    index.drop("leaves")
    index.apply("stays", [KVEvent("stored", tuple(random_names(rng, NUM_BOUNDED)))])
    assert index.nbytes <= before + NUM_BOUNDED * BLOCK_NBYTES
    assert index.num_evicted < 0.1 * NUM_BOUNDED


def test_masks_beyond_those_that_are_shared_are_right_too() -> None:
    index, rng = PrefixIndex(), random.Random(13)
    workers = [f"w{i}" for i in range(20)]
    names = random_names(rng, 5 * MAX_MASKS)
    for number, worker_id in enumerate(workers):
        index.snapshot(worker_id, (name for i, name in enumerate(names) if i >> number & 1))
    for place in range(0, len(names), 7):
        holders = {worker_id for number, worker_id in enumerate(workers) if place >> number & 1}
        assert held_by(index, [names[place]]).keys() == holders


def test_it_counts_what_it_forgets_for_want_of_room() -> None:
    index, rng = bounded(), random.Random(8)
    index.snapshot("a", random_names(rng, NUM_BOUNDED))
    assert (index.num_blocks, index.num_evicted) == (NUM_BOUNDED, 0)
    index.apply("a", [KVEvent("stored", tuple(random_names(rng, 100)))])
    assert index.num_evicted == NUM_BOUNDED + 100 - index.num_blocks > 0
