"""Limits of one ingress, of several that share a board, and the two boards against each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.config import TenantConfig
from disagg.errors import RateLimited, StartupError, Unavailable
from disagg.store import limits as limits_module
from disagg.store.limits import (
    GONE_S,
    SILENT_S,
    SYNC_S,
    LimitBoard,
    Limits,
    keep_in_step,
)
from disagg.store.redis_store import RedisBoard
from tests.grids import examples
from tests.store.fake_board import FakeBoard
from tests.waiting import Clock


def new_limits(clock: Clock, **settings: Any) -> Limits:
    config = TenantConfig(**settings)
    return Limits(lambda name: config if name == "a" else TenantConfig(), clock=clock)


def num_admitted(limits: Limits, most: int = 1000) -> int:
    for number in range(most):
        try:
            limits.begin("a")
        except RateLimited:
            return number
    return most


@pytest.fixture(params=["memory", "redis"])
def board(request: pytest.FixtureRequest, shared_redis: EmbeddedRedis) -> Iterator[LimitBoard]:
    made: LimitBoard = FakeBoard()
    if request.param == "redis":
        made = RedisBoard(shared_redis.url, secret=request.node.name.encode())
    yield made
    made.close()


def look(board: LimitBoard, name: str, limits: Limits, gone: list[str] | None = None) -> list[str]:
    entries = dict(board.exchange(name, limits.entry(), gone or ()))
    assert entries.pop(name)
    return limits.apply(entries)


def test_who_has_no_limits_is_never_refused() -> None:
    limits = new_limits(Clock(), max_num_requests=1)
    for _ in range(100):
        limits.begin("b")
        limits.take_tokens("b", 1 << 40)
        limits.end("b", 1 << 40)
    assert limits.remaining("b") == {}


def test_requests_in_flight_are_counted_to_their_end() -> None:
    limits = new_limits(Clock(), max_num_requests=2)
    assert num_admitted(limits) == 2
    limits.end("a", 5)
    assert num_admitted(limits) == 1


def test_requests_per_minute_come_back_steadily() -> None:
    clock = Clock()
    limits = new_limits(clock, requests_per_minute=60)
    assert num_admitted(limits) == 60
    with pytest.raises(RateLimited) as caught:
        limits.begin("a")
    assert caught.value.retry_after_s == pytest.approx(1.0)
    left = limits.remaining("a")["requests"]
    assert (left.limit, left.remaining) == (60, 0)
    assert left.reset_s == pytest.approx(60.0)
    clock.now_s += 10.0
    assert num_admitted(limits) == 10
    clock.now_s += 1e6
    assert num_admitted(limits) == 60


def test_a_prompt_is_spent_at_once_and_its_answer_as_a_debt() -> None:
    clock = Clock()
    limits = new_limits(clock, tokens_per_minute=600, requests_per_minute=100)
    limits.begin("a")
    limits.take_tokens("a", 500)
    assert limits.remaining("a")["tokens"].remaining == 100
    limits.begin("a")
    with pytest.raises(RateLimited) as caught:
        limits.take_tokens("a", 150)
    assert caught.value.retry_after_s == pytest.approx(5.0)
    assert limits.remaining("a")["requests"].remaining == 99  # a refused one does not count
    limits.end("a", 0)
    limits.end("a", 400)
    with pytest.raises(RateLimited, match="600 tokens per minute") as caught:
        limits.begin("a")
    assert caught.value.retry_after_s == pytest.approx(30.1)
    clock.now_s += 31.0
    limits.begin("a")


def test_a_prompt_above_the_limit_of_a_minute_waits_for_a_full_one() -> None:
    clock = Clock()
    limits = new_limits(clock, tokens_per_minute=600)
    limits.begin("a")
    limits.take_tokens("a", 900)
    clock.now_s += 89.0
    with pytest.raises(RateLimited):
        limits.take_tokens("a", 900)
    clock.now_s += 1.0
    limits.take_tokens("a", 900)


def test_what_one_ingress_admits_the_others_know(board: LimitBoard) -> None:
    clock = Clock()
    one, two = (new_limits(clock, max_num_requests=6, requests_per_minute=60) for _ in "12")
    for name, each in (("one", one), ("two", two)):
        look(board, name, each)
    assert num_admitted(one, most=4) == 4
    one.take_tokens("a", 3)
    look(board, "one", one)
    look(board, "two", two)
    assert num_admitted(two) == 2
    assert two.remaining("a")["requests"].remaining == 54
    one.end("a", 0)
    look(board, "one", one)
    for _ in range(3):  # looking again means nothing
        look(board, "two", two)
    assert num_admitted(two) == 1
    assert two.remaining("a")["requests"].remaining == 53


def test_who_starts_later_does_not_pay_for_the_past(board: LimitBoard) -> None:
    clock = Clock()
    one = new_limits(clock, requests_per_minute=60)
    assert num_admitted(one) == 60
    look(board, "one", one)
    two = new_limits(clock, requests_per_minute=60)
    look(board, "two", two)
    assert num_admitted(two, most=3) == 3
    look(board, "two", two)
    look(board, "one", one)  # but one pays for two, whom it has never seen
    assert one.remaining("a")["requests"].reset_s > 60.0 - 1e-6


def test_an_ingress_that_is_silent_does_not_count_and_is_wiped_off(board: LimitBoard) -> None:
    clock = Clock()
    one, two = (new_limits(clock, max_num_requests=3) for _ in "12")
    assert num_admitted(one) == 3
    look(board, "one", one)
    look(board, "two", two)
    assert num_admitted(two) == 0
    clock.now_s += SILENT_S + 0.1
    assert look(board, "two", two) == []
    assert num_admitted(two) == 3
    clock.now_s += GONE_S
    assert look(board, "two", two) == ["one"]
    assert look(board, "two", two, ["one"]) == []
    assert set(board.exchange("three", new_limits(clock).entry())) == {"two", "three"}


def test_a_board_that_is_away_is_not_believed_for_ever() -> None:
    clock, board = Clock(), FakeBoard()
    one, two = (new_limits(clock, max_num_requests=2) for _ in "12")
    assert num_admitted(one) == 2
    look(board, "one", one)
    look(board, "two", two)
    assert num_admitted(two) == 0
    clock.now_s += SILENT_S + 0.1
    assert num_admitted(two) == 2


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\x92\x01\x81\xa1\xff\x93\x01\x01\x01", b"\x90"])
def test_what_makes_no_sense_is_wiped_off(board: LimitBoard, junk: bytes) -> None:
    limits = new_limits(Clock(), requests_per_minute=5)
    look(board, "one", limits)
    board.exchange("junk", junk)
    assert look(board, "one", limits) == ["junk"]
    assert num_admitted(limits) == 5


def test_a_figure_that_makes_no_sense_closes_nobody_out_for_longer_than_a_minute() -> None:
    clock, board = Clock(), FakeBoard()
    one, two = (new_limits(clock, requests_per_minute=60) for _ in "12")
    for name, each in (("one", one), ("two", two)):
        look(board, name, each)
    two._tenant("a").used.num_requests = 1 << 60  # type: ignore[union-attr]
    look(board, "two", two)
    look(board, "one", one)
    assert num_admitted(one) == 0
    clock.now_s += 60.0
    assert num_admitted(one) == 60


@examples(20)
@given(
    st.lists(
        st.tuples(st.sampled_from("012"), st.sampled_from(["ask", "look", "wait"])), max_size=120
    )
)
def test_several_ingresses_admit_no_more_than_is_said(steps: list[tuple[str, str]]) -> None:
    """At most what the limit gives, and what the others admit before the next look: a minute's
    worth for each of them at worst, which all pay back."""
    clock, board, per_minute = Clock(), FakeBoard(), 30
    ingresses = {name: new_limits(clock, requests_per_minute=per_minute) for name in "012"}
    for name, each in ingresses.items():
        look(board, name, each)
    total, began_s = 0, clock.now_s
    for name, what in steps:
        if what == "ask":
            total += num_admitted(ingresses[name], most=10)
        elif what == "look":
            look(board, name, ingresses[name])
        else:
            clock.now_s += SYNC_S
            for each_name, each in ingresses.items():
                look(board, each_name, each)
        fair = per_minute + (clock.now_s - began_s) * per_minute / 60.0
        assert total <= fair + 2 * per_minute + 1e-6
    for name, each in 2 * list(ingresses.items()):
        look(board, name, each)
    left = [each.remaining("a")["requests"].reset_s for each in ingresses.values()]
    # Once all have looked, all know the same, but for what a full bucket did not take meanwhile.
    assert max(left) - min(left) <= clock.now_s - began_s + 1e-6


async def test_ingresses_are_kept_in_step_beside_their_requests(
    board: LimitBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "SYNC_S", 0.01)
    clock = Clock()
    both = {name: new_limits(clock, max_num_requests=2) for name in ("one", "two")}
    tasks = [asyncio.create_task(keep_in_step(each, board, name)) for name, each in both.items()]
    assert num_admitted(both["one"]) == 2
    while num_admitted(both["two"], most=1):
        both["two"].end("a", 0)
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_board_that_is_away_is_said_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenants then have their limits once for each ingress: nobody knew."""
    monkeypatch.setattr(limits_module, "SYNC_S", 0.01)

    class Away(FakeBoard):
        is_away = True
        num_asked = 0
        threads: ClassVar[set[str]] = set()

        def exchange(
            self, ingress_id: str, entry: bytes, gone: Collection[str] = ()
        ) -> Mapping[str, bytes]:
            self.threads.add(threading.current_thread().name)
            self.num_asked += 1
            if self.is_away:
                raise Unavailable("The board is away.")
            return super().exchange(ingress_id, entry, gone)

    board, limits = Away(), new_limits(Clock(), requests_per_minute=5)
    task = asyncio.create_task(keep_in_step(limits, board, "one"))
    while limits.is_shared:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    while board.num_asked < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    board.is_away = False
    while not limits.is_shared:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    lost, back = (each.getMessage() for each in caplog.records)
    assert "grants the full limits" in lost and "again" in back
    assert all(name.startswith("limits") for name in board.threads), "prompts are read elsewhere"


async def test_no_request_waits_for_a_board_that_hangs(own_redis: EmbeddedRedis) -> None:
    board = RedisBoard(own_redis.url)
    limits = new_limits(Clock(), requests_per_minute=5)
    look(board, "one", limits)
    own_redis.stop()
    with pytest.raises(Unavailable):
        board.exchange("one", limits.entry())
    task = asyncio.create_task(keep_in_step(limits, board, "one"))
    while limits.is_shared:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert num_admitted(limits) == 5
    own_redis.start()
    assert not task.done()
    other = RedisBoard(own_redis.url)
    while "one" not in other.exchange("two", limits.entry()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    other.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_url_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(StartupError, match="Redis URL"):
        RedisBoard("http://nothing")
