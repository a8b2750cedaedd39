"""What every `ColdStore` does, held against both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.store.cold_tier import ColdStore
from disagg.store.redis_store import RedisStore
from tests.grids import examples
from tests.store.fake_store import FakeStore

_layouts = itertools.count()


@pytest.fixture(params=["memory", "redis"])
def new_store(
    request: pytest.FixtureRequest, shared_redis: EmbeddedRedis
) -> Iterator[Callable[[], ColdStore]]:
    opened: list[ColdStore] = []

    def new() -> ColdStore:
        store: ColdStore
        if request.param == "memory":
            store = FakeStore(1 << 20)
        else:
            store = RedisStore(shared_redis.url, f"contract-{next(_layouts)}", timeout_s=10)
        opened.append(store)
        return store

    yield new
    for store in opened:
        store.close()


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def test_what_was_put_comes_back(new_store: Callable[[], ColdStore]) -> None:
    store = new_store()
    blocks = {key(i): bytes([i]) * 1000 for i in range(5)}
    blocks[b"\r\n \x00\xff*$" + bytes(9)] = b"\r\n$-1\r\n" * 9
    store.put_many(list(blocks.items()))
    assert store.get_many(list(blocks)) == list(blocks.values())
    assert store.get_many([key(4), key(9), key(0)]) == [blocks[key(4)], None, blocks[key(0)]]


def test_a_later_put_wins(new_store: Callable[[], ColdStore]) -> None:
    store = new_store()
    store.put_many([(key(1), b"one")])
    store.put_many([(key(1), b"two"), (key(2), b"a"), (key(2), b"b")])
    assert store.get_many([key(1), key(2)]) == [b"two", b"b"]


def test_stores_do_not_see_each_other(new_store: Callable[[], ColdStore]) -> None:
    one, other = new_store(), new_store()
    one.put_many([(key(1), b"x")])
    assert other.get_many([key(1)]) == [None]
    assert other.contains([key(1)]) == [False]


@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 7), max_size=5), st.binary(max_size=40)), max_size=12
    )
)
@examples(13, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_behaves_like_a_dict(
    new_store: Callable[[], ColdStore], steps: list[tuple[list[int], bytes]]
) -> None:
    store = new_store()
    model: dict[bytes, bytes] = {}
    for numbers, block in steps:
        keys = [key(i) for i in numbers]
        assert store.contains(keys) == [name in model for name in keys]
        assert store.get_many(keys) == [model.get(name) for name in keys]
        store.put_many([(name, block) for name in keys])
        model.update(dict.fromkeys(keys, block))
