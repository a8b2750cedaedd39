"""The index agrees with sets of names kept per worker, never grows past its bound, and keeps
nothing of workers that are gone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.blocks import BlockHash
from disagg.kernels.cpu.library import BLOCK_NAMES
from disagg.messages import KVEvent
from disagg.router.block_names import NUM_SHARDS, BlockNames, CompiledNames, DictNames
from disagg.router.prefix_index import NUM_SETS_BEFORE_SWEEP, SETS_AT_ONCE, PrefixIndex
from tests.kernels.compiled import can_compile, loaded

NAMES = [bytes([i]) * 16 for i in range(12)]
WORKERS = ["a", "b", "c"]

name_lists = st.lists(st.sampled_from(NAMES), max_size=6).map(tuple)
NewNames: TypeAlias = Callable[[int], BlockNames]  # for so many bytes
NUM_BOUNDED = 20_000


@pytest.fixture(scope="module", params=["dicts", "compiled"] if can_compile() else ["dicts"])
def new_names(request: pytest.FixtureRequest) -> NewNames:
    if request.param == "dicts":
        return DictNames
    return partial(CompiledNames, library=loaded(BLOCK_NAMES))


changes = st.one_of(
    st.tuples(st.sampled_from(["snapshot", "stored", "removed"]), name_lists),
    st.tuples(st.just("drop"), st.just(())),
)


def leading(held: set[BlockHash], names: tuple[BlockHash, ...]) -> int:
    depth = 0
    while depth < len(names) and names[depth] in held:
        depth += 1
    return depth


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(WORKERS), changes), max_size=40),
    queries=st.lists(name_lists, min_size=1, max_size=5),
    sweeps=st.sampled_from([0, 1, NUM_SHARDS]),
)
def test_it_agrees_with_plain_sets(
    steps: list[tuple[str, tuple[str, tuple[BlockHash, ...]]]],
    queries: list[tuple[BlockHash, ...]],
    sweeps: int,
    new_names: NewNames,
) -> None:
    index = PrefixIndex(new_names=new_names)
    truth: dict[str, set[BlockHash]] = {}
    for worker_id, (kind, names) in steps:
        if kind == "snapshot":
            index.snapshot(worker_id, names)
            truth[worker_id] = set(names)
        elif kind == "drop":
            index.drop(worker_id)
            truth.pop(worker_id, None)
        else:
            index.apply(worker_id, [KVEvent(kind, names)])  # type: ignore[arg-type]
            held = truth.get(worker_id)
            if held is not None:
                if kind == "stored":
                    held.update(names)
                else:
                    held.difference_update(names)
        report(index, truth, sweeps)
        for names in queries:
            expected = {worker_id: leading(held, names) for worker_id, held in truth.items()}
            assert index.match(names) == {k: depth for k, depth in expected.items() if depth}
    if truth:
        report(index, truth, 2 * NUM_SHARDS)
        assert index.num_blocks == len(set().union(*truth.values()))
    else:
        assert index.num_blocks == 0


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
)
def test_of_some_workers_it_names_those_that_hold_most_first(
    held: dict[str, int], among: set[str], turn: float, new_names: NewNames
) -> None:
    index = PrefixIndex(new_names=new_names)
    for worker_id, num_blocks in held.items():
        index.snapshot(worker_id, NAMES[:num_blocks])
    mask = sum(1 << place for place in index.places(*among))
    found = index.find(NAMES)
    places = index.deepest(found, mask, turn, 8)
    assert {*places} == {*index.places(*(name for name in among if held.get(name)))}
    depths = [found.depths[place] for place in places]
    assert depths == sorted(depths, reverse=True)
    for name in among & held.keys():
        assert found.depths[index.places(name)[0]] == held[name]
    few = index.deepest(found, mask, turn, 2)
    assert [found.depths[place] for place in few] == depths[:2]


def test_where_equal_workers_begin_is_drawn(new_names: NewNames) -> None:
    index = PrefixIndex(new_names=new_names)
    for worker_id in "abcd":
        index.snapshot(worker_id, NAMES)
    found, places = index.find(NAMES), index.places(*"abcd")
    mask = sum(1 << place for place in places)
    firsts = [index.deepest(found, mask, turn, 1)[0] for turn in (0.0, 0.3, 0.6, 0.9)]
    assert sorted(firsts) == sorted(places)


def bounded(new_names: NewNames) -> PrefixIndex:
    index = PrefixIndex(NUM_BOUNDED * new_names(0).ENTRY_NBYTES, new_names)
    assert index.max_num_blocks == NUM_BOUNDED
    return index


def random_names(rng: random.Random, num_names: int) -> list[BlockHash]:
    return [rng.randbytes(16) for _ in range(num_names)]


def test_it_is_bounded_and_keeps_what_is_asked_for_again_and_again(new_names: NewNames) -> None:
    index, rng = bounded(new_names), random.Random(0)
    asked = random_names(rng, 2000)
    index.snapshot("a", asked)
    for _ in range(20):
        index.apply("a", [KVEvent("stored", tuple(random_names(rng, 5000)))])
        assert index.num_blocks <= 20_000
        assert index.match(asked) == {"a": 2000}


def test_what_was_asked_for_leaves_after_what_was_not(new_names: NewNames) -> None:
    index, rng = bounded(new_names), random.Random(1)
    asked, unasked = random_names(rng, 5000), random_names(rng, 5000)
    index.snapshot("a", [*asked, *unasked])
    index.match(asked)
    index.apply("a", [KVEvent("stored", tuple(random_names(rng, 16_000)))])
    assert index.match(asked) == {"a": 5000}
    assert sum(bool(index.match([name])) for name in unasked) < 500
    for _ in range(4):  # nobody asks again
        index.apply("a", [KVEvent("stored", tuple(random_names(rng, 10_000)))])
    assert index.match(asked) == {}


def test_its_bytes_are_bounded_under_new_prefixes_for_ever(new_names: NewNames) -> None:
    max_nbytes = NUM_BOUNDED * new_names(0).ENTRY_NBYTES
    index, rng = bounded(new_names), random.Random(2)
    before = index.nbytes
    index.snapshot("a", ())
    sizes = []
    for _ in range(100):
        index.apply("a", [KVEvent("stored", tuple(random_names(rng, 2000)))])
        sizes.append(index.nbytes)
        assert index.num_blocks <= 20_000
    assert max(sizes) <= before + max_nbytes
    assert index.num_blocks > 19_000


def test_restarts_use_up_neither_bits_nor_bytes(new_names: NewNames) -> None:
    index, rng = PrefixIndex(new_names=new_names), random.Random(3)
    stays, restarts = random_names(rng, 300), random_names(rng, 300)
    index.snapshot("stays", stays)
    index.snapshot("restarts", [*stays[:4], *restarts])
    report(index, ["stays"], 2 * NUM_SHARDS)
    before = index.nbytes
    for _ in range(50):
        index.snapshot("restarts", [*stays[:4], *restarts])
        report(index, ["stays"], 2 * NUM_SHARDS)
        assert index.nbytes < 1.2 * before
    assert index.num_bits <= 4  # a name's own, and one that is swept out
    assert index.match(stays) == {"stays": 300, "restarts": 4}


def test_restarts_that_come_faster_than_bits_are_swept_out(new_names: NewNames) -> None:
    index, rng = PrefixIndex(new_names=new_names), random.Random(4)
    names = random_names(rng, 300)
    index.snapshot("stays", names)
    for _ in range(5 * NUM_SHARDS):
        index.snapshot("restarts", names[:4])
    assert index.num_bits <= 2 * NUM_SHARDS + 2
    assert index.match(names) == {"stays": 300, "restarts": 4}


def test_nothing_is_kept_of_a_worker_that_left(new_names: NewNames) -> None:
    index, rng = PrefixIndex(new_names=new_names), random.Random(5)
    common, own = random_names(rng, 200), random_names(rng, 20_000)
    index.snapshot("stays", common)
    before = index.nbytes
    index.snapshot("leaves", [*common, *own])
    assert index.nbytes > before + 20_000 * 20
    index.drop("leaves")
    assert index.match(common) == {"stays": 200}
    assert index.match(own[:1]) == {}
    report(index, ["stays"], NUM_SHARDS + 1)
    assert index.num_blocks == 200
    assert index.nbytes <= before
    assert index.match(common) == {"stays": 200}


def test_nothing_is_kept_when_the_last_worker_leaves(new_names: NewNames) -> None:
    index, rng = PrefixIndex(new_names=new_names), random.Random(6)
    empty = index.nbytes
    for worker_id in "ab":
        index.snapshot(worker_id, random_names(rng, 1000))
    for worker_id in "ab":
        index.drop(worker_id)
    assert (index.num_blocks, index.nbytes) == (0, empty)
    index.snapshot("a", NAMES)
    assert index.match(NAMES) == {"a": 12}


def test_names_that_only_lost_workers_held_leave_with_the_last_holder(new_names: NewNames) -> None:
    index = PrefixIndex(new_names=new_names)
    index.snapshot("lost", NAMES)
    index.snapshot("stays", NAMES)
    index.drop("lost")
    index.apply("stays", [KVEvent("removed", tuple(NAMES))])
    assert index.num_blocks == 0


def test_nobody_holds_nothing(new_names: NewNames) -> None:
    index = PrefixIndex(new_names=new_names)
    assert index.match(NAMES) == {}
    index.snapshot("a", NAMES)
    assert index.match(()) == {}


def test_sets_of_workers_that_no_block_has_any_more_are_forgotten(new_names: NewNames) -> None:
    index, rng = PrefixIndex(new_names=new_names), random.Random(7)
    workers = [f"w{i}" for i in range(16)]
    names = random_names(rng, 40)
    for worker_id in workers:
        index.snapshot(worker_id, ())
    for _ in range(1000):
        for worker_id in workers:
            kind = rng.choice(("stored", "removed"))
            index.apply(worker_id, [KVEvent(kind, tuple(rng.sample(names, 5)))])  # type: ignore[arg-type]
    assert index.num_sets < 2 * NUM_SETS_BEFORE_SWEEP


def test_names_of_lost_workers_count_until_they_are_gone(new_names: NewNames) -> None:
    """Else the index would have twice the memory while they are purged."""
    index, rng = bounded(new_names), random.Random(10)
    before = index.nbytes
    index.snapshot("stays", ())
    index.snapshot("leaves", random_names(rng, NUM_BOUNDED))
    index.drop("leaves")
    report(index, ["stays"], 3)
    assert index.num_blocks == 0  # they count no more, and most are still there
    index.apply("stays", [KVEvent("stored", tuple(random_names(rng, NUM_BOUNDED)))])
    assert index.nbytes <= before + NUM_BOUNDED * new_names(0).ENTRY_NBYTES
    assert index.num_blocks + index.num_evicted == NUM_BOUNDED
    assert index.num_evicted < 0.1 * NUM_BOUNDED


def test_it_is_bounded_in_sets_of_workers(new_names: NewNames) -> None:
    """Beyond, it knows of fewer workers than have a name, and never of one that has it not."""
    index, rng = PrefixIndex(0, lambda _: new_names(1 << 24)), random.Random(13)
    workers = [f"w{i}" for i in range(40)]
    names = random_names(rng, 3 * NUM_SETS_BEFORE_SWEEP)
    held: dict[str, set[BlockHash]] = {worker_id: set() for worker_id in workers}
    sizes: list[int] = []
    for worker_id in workers:
        index.snapshot(worker_id, ())
    for worker_id in workers:
        held[worker_id].update(rng.sample(names, len(names) // 4))
        index.apply(worker_id, [KVEvent("stored", tuple(sorted(held[worker_id])))])
        sizes.append(index.num_sets)
    most = NUM_SETS_BEFORE_SWEEP + len(workers)  # those of one worker always have room
    assert NUM_SETS_BEFORE_SWEEP <= max(sizes) <= most and index.num_evicted == 0
    gone = {worker_id: rng.sample(sorted(held[worker_id]), 1000) for worker_id in workers}
    for worker_id in workers:
        held[worker_id].difference_update(gone[worker_id])
        index.apply(worker_id, [KVEvent("removed", tuple(gone[worker_id]))])
        assert index.num_sets <= most
    for name in names:
        assert all(name in held[worker_id] for worker_id in index.match([name]))
    assert 0 < index.num_evicted < len(names)
    for worker_id in workers:
        index.apply(worker_id, [KVEvent("removed", tuple(held[worker_id]))])
    assert index.num_blocks == 0
    report(index, workers[:1], NUM_SETS_BEFORE_SWEEP // SETS_AT_ONCE)
    for worker_id in workers:
        index.apply(worker_id, [KVEvent("stored", tuple(NAMES))])
    assert index.match(NAMES) == dict.fromkeys(workers, len(NAMES)), "there is room again"


def test_memory_that_is_refused_to_a_set_ends_nothing(
    new_names: NewNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = PrefixIndex(new_names=new_names)
    index.snapshot("a", NAMES)
    index.snapshot("b", NAMES[:4])

    def refuse(number: int, mask: int) -> NoReturn:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(index._names, "keep", refuse)
        index.snapshot("c", NAMES)
        assert index.match(NAMES) == {"a": 12, "b": 4}
        index.apply("a", [KVEvent("removed", (NAMES[3],))])  # b has it alone: a new set
        assert index.match(NAMES) == {"a": 3, "b": 3}
    assert index.num_evicted == 1
    index.snapshot("c", NAMES)
    assert index.match(NAMES) == {"a": 3, "b": 3, "c": 12}


def test_it_counts_what_it_forgets_for_want_of_room(new_names: NewNames) -> None:
    index, rng = bounded(new_names), random.Random(8)
    index.snapshot("a", random_names(rng, 20_000))
    assert (index.num_blocks, index.num_evicted) == (20_000, 0)
    index.apply("a", [KVEvent("stored", tuple(random_names(rng, 100)))])
    assert index.num_evicted == 20_100 - index.num_blocks > 0
