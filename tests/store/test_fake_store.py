from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.fake_store import FakeStore


def test_the_least_recently_used_go_first() -> None:
    store = FakeStore(30)
    store.put_many([(b"a", bytes(10)), (b"b", bytes(10)), (b"c", bytes(10))])
    store.get_many([b"a"])
    store.put_many([(b"d", bytes(10))])
    assert [block is not None for block in store.get_many([b"a", b"b", b"c", b"d"])] == [
        True,
        False,
        True,
        True,
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=50))
def test_it_stays_within_its_bytes(puts: list[tuple[int, int]]) -> None:
    store = FakeStore(64)
    for number, size in puts:
        store.put_many([(bytes([number]), bytes(size))])
        found = store.get_many([bytes([i]) for i in range(6)])
        assert store.nbytes == sum(len(block) for block in found if block is not None) <= 64
