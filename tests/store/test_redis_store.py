"""Redis that is away, slow, restarted, or says what is not so."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.errors import StartupError, Unavailable
from disagg.models.share import Share
from disagg.store.redis_store import RedisStore, _Server
from tests.grids import examples
from tests.waiting import Clock

A, B = b"a" * 16, b"b" * 16
BLOCK = bytes(range(256)) * 16


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(clock: Clock) -> Iterator[Callable[..., RedisStore]]:
    opened: list[RedisStore] = []

    def open_store(url: str, layout: str = "layout", timeout_s: float = 1.0) -> RedisStore:
        opened.append(RedisStore(url, layout, timeout_s=timeout_s, clock=clock))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def client(own_redis: EmbeddedRedis) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(own_redis.url)
    yield client
    client.close()


Opener = Callable[..., RedisStore]


def names_in(client: redis.Redis) -> list[bytes]:
    return [name for name in client.keys(b"*") if isinstance(name, bytes)]


def assert_away(store: RedisStore) -> str:
    with pytest.raises(Unavailable) as caught:
        store.get_many([A])
    return caught.value.message


def test_a_killed_server_fails_fast_and_a_restarted_one_is_found(
    own_redis: EmbeddedRedis, open_store: Opener, clock: Clock
) -> None:
    store = open_store(own_redis.url)
    store.put_many([(A, BLOCK)])
    os.kill(own_redis.pid, signal.SIGKILL)
    own_redis.stop()
    assert "did not answer" in assert_away(store)
    own_redis.start()
    # It is back, but nobody looks before the pause is over: the network was not touched.
    assert "next attempt is in 0.2" in assert_away(store)
    with pytest.raises(Unavailable):
        store.put_many([(A, BLOCK)])
    with pytest.raises(Unavailable):
        store.contains([A])
    clock.now_s += 0.25
    assert store.get_many([A]) == [None]
    store.put_many([(A, BLOCK)])
    assert store.get_many([A]) == [BLOCK]


def test_pauses_double_up_to_a_limit_and_a_success_ends_them(clock: Clock) -> None:
    server, pauses = _Server("redis://127.0.0.1:1", 1.0, clock), list[float]()

    def fail() -> None:
        with pytest.raises(Unavailable, match="did not answer"), server.guarded():
            raise OSError("away")

    for _ in range(8):
        fail()
        with pytest.raises(Unavailable, match="the next attempt is in"), server.guarded():
            pass
        pauses.append(server._retry_at_s - clock.now_s)
        clock.now_s += pauses[-1]
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    with server.guarded():
        pass
    fail()
    assert server._retry_at_s - clock.now_s == 0.25


def test_a_frozen_server_is_left_alone_after_one_timeout(
    own_redis: EmbeddedRedis, open_store: Opener, clock: Clock
) -> None:
    store = open_store(own_redis.url)
    store.put_many([(A, BLOCK)])
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        assert "TimeoutError" in assert_away(store)
        assert "next attempt" in assert_away(store)
        clock.now_s += 0.25
        assert "did not answer" in assert_away(store)
        assert "next attempt is in 0.5 s" in assert_away(store)
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    clock.now_s += 0.5
    # The answers to the questions that timed out are not taken for this one's.
    assert store.get_many([B, A]) == [None, BLOCK]


def test_a_server_that_never_was(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(f"unix://{tmp_path}/no.socket")
    assert "No such file" in assert_away(store)


def test_a_wrong_password_is_told(
    own_redis: EmbeddedRedis, open_store: Opener, client: redis.Redis
) -> None:
    client.config_set("requirepass", "right")
    store = open_store(f"unix://:wrong@{own_redis.socket}")
    assert "AuthenticationError" in assert_away(store)


def test_a_full_server_that_does_not_evict_is_away_for_puts(
    own_redis: EmbeddedRedis, open_store: Opener, client: redis.Redis
) -> None:
    store = open_store(own_redis.url)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    with pytest.raises(Unavailable, match="maxmemory") as caught:
        store.put_many([(A, BLOCK)])
    assert len(caught.value.message) < 200  # the block is not quoted


def test_a_server_that_is_no_primary_any_more_is_left(
    own_redis: EmbeddedRedis, open_store: Opener, clock: Clock, client: redis.Redis
) -> None:
    """Its name may lead to another one by now; a connection that lasts would never tell."""
    store = open_store(own_redis.url, timeout_s=10)
    store.put_many([(A, BLOCK)])
    num_clients = len(client.client_list())
    client.replicaof("127.0.0.1", 1)
    with pytest.raises(Unavailable, match="ReadOnlyError"):
        store.put_many([(B, BLOCK)])
    while len(client.client_list()) != num_clients - 1:  # until the server has noticed
        time.sleep(0.01)
    client.replicaof("NO", "ONE")
    clock.now_s += 0.25
    store.put_many([(B, BLOCK)])
    assert store.get_many([A, B]) == [BLOCK, BLOCK]


def test_a_url_that_makes_no_sense_is_refused_at_once(open_store: Opener) -> None:
    with pytest.raises(StartupError, match="Redis URL"):
        open_store("http://example.org")


def flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: b"",
        lambda value: value[:7],
        lambda value: value[:16],
        lambda value: value[:-1],
        lambda value: value + b"\0",
        lambda value: value[16:],
        lambda value: flip(value, 0),
        lambda value: flip(value, 16),
        lambda value: flip(value, len(value) - 1),
    ],
)
def test_a_damaged_value_is_a_miss_and_goes(
    damage: Callable[[bytes], bytes],
    own_redis: EmbeddedRedis,
    open_store: Opener,
    client: redis.Redis,
) -> None:
    store = open_store(own_redis.url, timeout_s=10)
    store.put_many([(A, BLOCK), (B, BLOCK)])
    (name,) = [name for name in client.keys(b"disagg:kv:*:" + A) if client.get(name)]
    value = client.get(name)
    assert isinstance(value, bytes)
    client.set(name, damage(value))
    assert store.get_many([A, B]) == [None, BLOCK]
    assert store.num_damaged == 1
    assert store.contains([A]) == [False]


def test_a_value_under_another_name_is_not_taken(
    own_redis: EmbeddedRedis, open_store: Opener, client: redis.Redis
) -> None:
    store = open_store(own_redis.url)
    store.put_many([(A, BLOCK)])
    (name,) = names_in(client)
    client.rename(name, name.removesuffix(A) + B)
    assert store.get_many([B]) == [None]


def test_a_value_of_another_type_is_a_miss(
    own_redis: EmbeddedRedis, open_store: Opener, client: redis.Redis
) -> None:
    store = open_store(own_redis.url)
    store.put_many([(A, BLOCK)])
    (name,) = names_in(client)
    client.delete(name)
    client.hset(name, "field", "value")
    assert store.get_many([A]) == [None]


def test_names_and_values_depend_on_layout_and_secret(
    own_redis: EmbeddedRedis, client: redis.Redis
) -> None:
    stores = [
        RedisStore(own_redis.url, layout, secret=secret, timeout_s=10)
        for layout in ("float16", "float32")
        for secret in (b"mine", b"theirs")
    ]
    for number, store in enumerate(stores):
        assert store.get_many([A]) == [None]
        store.put_many([(A, bytes([number]))])
    assert [store.get_many([A]) for store in stores] == [[bytes([i])] for i in range(4)]
    names = names_in(client)
    values = {client.get(name) for name in names}
    assert len(names) == len(values) == 4
    assert all(name.startswith(b"disagg:kv:") and name.endswith(b":" + A) for name in names)
    for store in stores:
        store.close()


def test_values_have_a_time_to_live(own_redis: EmbeddedRedis, client: redis.Redis) -> None:
    store = RedisStore(own_redis.url, "layout", ttl_s=100, timeout_s=10)
    store.put_many([(A, BLOCK)])
    (name,) = names_in(client)
    assert 0 < client.pttl(name) <= 100_000
    store.close()


_layouts = itertools.count()

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8]).flatmap(
    lambda heads: st.tuples(
        st.just(heads),
        *2 * [st.sampled_from([n for n in range(1, 17) if heads % n == 0 or n % heads == 0])],
    )
)


def parts(num_heads: int, num_ranks: int, blocks: list[bytes]) -> list[tuple[range, list[bytes]]]:
    """Of each rank: its heads, and its parts of blocks."""
    found = []
    for rank in range(num_ranks):
        heads = range(*Share(rank, num_ranks).kv_heads(num_heads))
        size = len(blocks[0]) // num_heads
        own = slice(heads.start * size, heads.stop * size)
        found.append((heads, [each[own] for each in blocks]))
    return found


@given(SIZES, st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
@examples(13, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranks_find_what_ranks_of_another_number_stored_and_nothing_before_all_have(
    shared_redis: EmbeddedRedis,
    sizes: tuple[int, int, int],
    head_nbytes: int,
    num_blocks: int,
    rng: object,
) -> None:
    num_heads, num_writing, num_reading = sizes
    layout = f"ranked-{next(_layouts)}"

    def stores(num_ranks: int) -> list[RedisStore]:
        return [
            RedisStore(
                shared_redis.url,
                layout,
                pieces=range(*Share(rank, num_ranks).kv_heads(num_heads)),
                num_pieces=num_heads,
                timeout_s=10,
            )
            for rank in range(num_ranks)
        ]

    nbytes = num_heads * head_nbytes
    blocks = [rng.randbytes(nbytes) for _ in range(num_blocks)]  # type: ignore[attr-defined]
    keys = [i.to_bytes(16, "little") for i in range(num_blocks)]
    writing, reading = stores(num_writing), stores(num_reading)
    put: set[int] = set()
    for store, (heads, own) in zip(writing, parts(num_heads, num_writing, blocks), strict=True):
        is_all = put == set(range(num_heads))
        assert all(each.contains(keys) == [is_all] * num_blocks for each in reading)
        store.put_many(list(zip(keys, own, strict=True)))
        put.update(heads)
    for store, (_, own) in zip(reading, parts(num_heads, num_reading, blocks), strict=True):
        assert store.contains([*keys, bytes([99]) * 16]) == [True] * num_blocks + [False]
        assert store.get_many(keys) == own
    for store in (*writing, *reading):
        store.close()
