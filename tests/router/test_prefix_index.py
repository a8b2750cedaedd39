"""The index agrees with sets of names kept per worker, and never grows past its bound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.blocks import BlockHash
from disagg.messages import KVEvent
from disagg.router import prefix_index
from disagg.router.prefix_index import ENTRY_NBYTES, PrefixIndex

NAMES = [bytes([i]) * 16 for i in range(12)]
WORKERS = ["a", "b", "c"]

name_lists = st.lists(st.sampled_from(NAMES), max_size=6).map(tuple)
changes = st.one_of(
    st.tuples(st.sampled_from(["snapshot", "stored", "removed"]), name_lists),
    st.tuples(st.sampled_from(["cleared", "drop"]), st.just(())),
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
    max_num_bits=st.integers(0, 4),
)
def test_it_agrees_with_plain_sets(
    steps: list[tuple[str, tuple[str, tuple[BlockHash, ...]]]],
    queries: list[tuple[BlockHash, ...]],
    max_num_bits: int,
) -> None:
    index = PrefixIndex()
    truth: dict[str, set[BlockHash]] = {}
    default, prefix_index.MAX_NUM_BITS = prefix_index.MAX_NUM_BITS, max_num_bits
    try:
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
                    elif kind == "removed":
                        held.difference_update(names)
                    else:
                        held.clear()
    finally:
        prefix_index.MAX_NUM_BITS = default
    for names in queries:
        expected = {worker_id: leading(held, names) for worker_id, held in truth.items()}
        assert index.match(names) == {k: depth for k, depth in expected.items() if depth}


def test_it_is_bounded_and_keeps_what_is_asked_for() -> None:
    index = PrefixIndex(max_nbytes=100 * ENTRY_NBYTES)
    asked = [b"asked" + bytes([i]) for i in range(10)]
    index.snapshot("a", asked)
    for turn in range(50):
        index.apply("a", [KVEvent("stored", tuple(b"%d-%d" % (turn, i) for i in range(30)))])
        assert index.nbytes <= 100 * ENTRY_NBYTES
        assert index.match(asked) == {"a": 10}


def test_a_prefix_loses_its_tail_first() -> None:
    index = PrefixIndex(max_nbytes=10 * ENTRY_NBYTES)
    chain = [b"chain" + bytes([i]) for i in range(10)]
    index.snapshot("a", chain)
    index.match(chain)
    index.apply("a", [KVEvent("stored", (b"x", b"y", b"z"))])
    assert index.match(chain) == {"a": 7}


def test_restarts_do_not_use_up_bits() -> None:
    index = PrefixIndex()
    index.snapshot("stays", NAMES)
    for _ in range(3 * prefix_index.MAX_NUM_BITS):
        index.snapshot("restarts", NAMES[:4])
    assert index.match(NAMES) == {"stays": 12, "restarts": 4}
    index.drop("stays")
    assert index.match(NAMES) == {"restarts": 4}


def test_names_that_only_lost_workers_held_leave_with_the_last_holder() -> None:
    index = PrefixIndex()
    index.snapshot("lost", NAMES)
    index.snapshot("stays", NAMES)
    index.drop("lost")
    index.apply("stays", [KVEvent("removed", tuple(NAMES))])
    assert index.nbytes == 0


def test_nobody_holds_nothing() -> None:
    index = PrefixIndex()
    assert index.match(NAMES) == {}
    index.snapshot("a", NAMES)
    assert index.match(()) == {}
