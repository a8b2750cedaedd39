"""The tier with a server behind it that dies, freezes and comes back."""

from __future__ import annotations

import os
import signal

import redis

from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.store.cold_tier import ColdTier, StoreThread
from disagg.store.redis_store import RedisStore
from tests.store.tiers import (
    NBYTES,
    block,
    fetched,
    finish,
    keep,
    names,
    offer,
    one_second_a_block,
    settle,
)
from tests.waiting import wait_until


def redis_tier(server: EmbeddedRedis, timeout_s: float) -> ColdTier:
    store = RedisStore(server.url, "tier", timeout_s=timeout_s)
    return ColdTier(StoreThread(store, NBYTES), one_second_a_block())


def test_redis_killed_and_started_again(own_redis: EmbeddedRedis) -> None:
    tier = redis_tier(own_redis, timeout_s=5)
    keep(tier, 0)
    os.kill(own_redis.pid, signal.SIGKILL)
    own_redis.stop()
    lost = fetched(tier, 0)
    assert lost.blocks == [] and lost.error is not None
    for i in range(50):
        offer(tier, i)
    assert (tier.stats.num_dropped, tier.queued_nbytes) == (50, 0)  # nothing piles up
    own_redis.start()

    def stored_again() -> bool:
        offer(tier, 0)
        settle(tier)
        return names(0)[0] in tier._known

    wait_until(stored_again)
    found = fetched(tier, 0, 1)
    assert found.blocks == [block(0)]
    assert tier.close(timeout_s=60)


def test_damaged_values_are_misses_and_counted(own_redis: EmbeddedRedis) -> None:
    tier = redis_tier(own_redis, timeout_s=5)
    keep(tier, 0)
    with redis.Redis.from_url(own_redis.url) as client:
        (key,) = client.keys(b"disagg:kv:*")
        client.setrange(key, 20, b"\xff\x00\xff")
    found = fetched(tier, 0)
    assert found.blocks == [] and tier.counts().num_damaged == 1
    assert tier.counts().num_misses == 1
    assert tier.close(timeout_s=60)


def test_a_frozen_redis_ends_a_fetch_and_lets_the_tier_close(own_redis: EmbeddedRedis) -> None:
    tier = redis_tier(own_redis, timeout_s=2.0)
    keep(tier, 0)
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        fetches = [tier.lookup(names(0)) for _ in range(20)]
        finish(tier, *fetches)
        assert all(fetch.blocks == [] and fetch.error for fetch in fetches)
        assert sum("did not answer" in (fetch.error or "") for fetch in fetches) < 20
        for i in range(200):
            offer(tier, i)
        assert tier.stats.num_dropped >= 199 and tier.queued_nbytes <= NBYTES
        assert tier.close(timeout_s=60)
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
