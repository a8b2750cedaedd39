"""Links follow the membership, and a worker knows a peer before a request names it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from disagg.errors import WorkerLost
from disagg.kvtransfer.ticket import KVTicket
from disagg.links import client
from disagg.links.fleet_links import FleetLinks, report_interval_s
from disagg.links.server import LinkClosed, LinkId
from disagg.messages import Peers, Prefetch, Start, TokenDelta
from tests.links.fakes import (
    KEY,
    FakeWorker,
    RecordingObserver,
    fake_worker,
    make_record,
    make_request,
    until,
)


def introduced(worker: FakeWorker) -> list[str]:
    return [peer.worker_id for message in worker.of_type(Peers) for peer in message.peers]


def gone_of(worker: FakeWorker) -> list[str]:
    return [worker_id for message in worker.of_type(Peers) for worker_id in message.gone]


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[FleetLinks, RecordingObserver]]:
    observer = RecordingObserver()
    links = FleetLinks(key=KEY, ingress_id="ingress-0", observer=observer, rng=random.Random(1))
    try:
        yield links, observer
    finally:
        await links.close()


def peers_of(worker: FakeWorker) -> set[str]:
    return set(introduced(worker))


async def test_workers_hear_of_peers_that_have_left() -> None:
    """Else what each pull from them took is kept, and sent with every step, for ever."""
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b")) as b,
        fake_worker(make_record("c")) as c,
    ):
        links.update([a.record, b.record, c.record])
        await until(lambda: len(observer.held) == 3)
        links.update([a.record, c.record])  # it is still linked, and may come back
        links.update([a.record, b.record, c.record])
        links.update([a.record, c.record])
        await b.server.close()
        await until(lambda: "b" in gone_of(a) and "b" in gone_of(c))
        await c.server.close()
        await until(lambda: not links.link("c").is_up)
        links.update([a.record])
        await until(lambda: gone_of(a) == ["b", "c"])


async def test_a_peer_that_comes_back_is_introduced_again() -> None:
    """The same worker: only its link ended, while a restarted controller did not know it."""
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b")) as b,
    ):
        links.update([a.record, b.record])
        await until(lambda: len(observer.held) == 2)
        links.introduce("a", "b")
        links.introduce("a", "b")  # is sent once
        await until(lambda: introduced(a) == ["b"])
        links.update([a.record])
        await b.server.close()
        await until(lambda: gone_of(a) == ["b"])
        links.update([a.record, b.record])
        links.introduce("a", "b")
        await until(lambda: introduced(a) == ["b", "b"])


async def test_workers_come_and_go_with_the_membership() -> None:
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b")) as b,
    ):
        links.update([a.record])
        await until(lambda: set(observer.held) == {"a"})
        links.update([a.record, b.record])
        await until(lambda: set(observer.held) == {"a", "b"})
        links.update([b.record])
        await a.server.close()
        await until(lambda: set(observer.held) == {"b"})
        with pytest.raises(WorkerLost, match="a has left the fleet"):
            links.link("a")
        assert links.link("b").is_up
        links.update([b.record])
        assert b.of_type(LinkClosed) == []


async def test_an_empty_membership_takes_no_living_worker_away() -> None:
    """A control plane that starts again may know nobody for a while."""
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b")) as b,
    ):
        for worker in (a, b):
            worker.on_start = lambda link_id, start, worker=worker: worker.step(
                {link_id: [TokenDelta(start.stream_id, (4,), "stop")]}
            )
        links.update([a.record, b.record])
        await until(lambda: len(observer.held) == 2)
        links.update([])
        for name in ("a", "b"):
            async for delta in links.stream(name, make_request(), timeout_s=60):
                assert delta.token_ids == (4,)
        links.update([a.record])
        links.update([a.record, b.record])
        assert set(observer.held) == {"a", "b"}
        assert observer.calls.count(("up", "a")) == observer.calls.count(("up", "b")) == 1


async def test_a_worker_that_left_the_membership_finishes_its_streams() -> None:
    async with fleet() as (links, observer), fake_worker(make_record("a")) as a:
        begun: list[tuple[LinkId, int]] = []
        a.on_start = lambda link_id, start: begun.append((link_id, start.stream_id))
        links.update([a.record])
        await until(lambda: observer.held)
        stream = links.stream("a", make_request(), timeout_s=60)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: begun)
        ((link_id, stream_id),) = begun
        links.update([])
        a.step({link_id: [TokenDelta(stream_id, (1,))]})
        assert (await first).token_ids == (1,)
        a.step({link_id: [TokenDelta(stream_id, (2,), "stop")]})
        assert [delta.token_ids async for delta in stream] == [(2,)]


@pytest.mark.parametrize("is_listed_again", [False, True])
async def test_the_end_of_its_link_is_the_end_of_a_worker_that_left(is_listed_again: bool) -> None:
    async with fleet() as (links, observer), fake_worker(make_record("a")) as a:
        links.update([a.record])
        await until(lambda: observer.held)
        links.update([])
        if is_listed_again:
            links.update([a.record])
        await a.server.close()
        await until(lambda: not observer.held)
        assert [record.worker_id for record in links.records] == ["a"] * is_listed_again


async def test_a_dead_worker_in_the_membership_is_not_routable() -> None:
    """It is tried again and again, until membership lets it go."""
    async with fleet() as (links, observer), fake_worker(make_record("b")) as b:
        async with fake_worker(make_record("a")) as a:
            dead = a.record
        links.update([dead, b.record])
        await until(lambda: "Connect call failed" in links.link("a").last_error)
        await until(lambda: set(observer.held) == {"b"})
        with pytest.raises(WorkerLost, match="not linked"):
            await anext(links.stream("a", make_request(), timeout_s=60))
        links.update([b.record])
        with pytest.raises(WorkerLost, match="has left the fleet"):
            links.link("a")


async def test_a_restarted_worker_is_a_new_worker() -> None:
    async with fleet() as (links, observer), fake_worker(make_record("a")) as old:
        old.held = [b"o" * 16]
        links.update([old.record])
        await until(lambda: observer.held)
        async with fake_worker(make_record("a", epoch=2)) as new:
            new.held = [b"n" * 16]
            links.update([new.record])
            assert observer.held == {}
            await until(lambda: observer.held)
            assert observer.held == {"a": {b"n" * 16}}
            assert observer.calls.count(("lost", "a")) == 1


def ticket_of(source_id: str) -> KVTicket:
    return KVTicket("1/1", source_id, 1, "toy/bs16", 16, (0,), (1,))


async def test_a_worker_hears_of_a_peer_when_it_needs_it_and_once() -> None:
    """If each heard of all others, a start with 1,000 workers would send 0.9 GB."""
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b", role="prefill")) as b,
        fake_worker(make_record("c", role="prefill")) as c,
    ):
        links.update([a.record, b.record, c.record])
        await until(lambda: len(observer.held) == 3)
        for _ in range(3):
            links.introduce("a", "b")
        for pair in (("a", "a"), ("a", "unknown"), ("unknown", "a")):
            links.introduce(*pair)
        links.prefetch("a", Prefetch(ticket_of("c"), ()))
        await until(lambda: a.of_type(Prefetch))
        assert [message.peers for message in a.of_type(Peers)] == [
            (b.record.peer,),
            (c.record.peer,),
        ]
        assert not b.of_type(Peers) and not c.of_type(Peers)


async def test_a_peer_is_known_before_a_start_that_names_it() -> None:
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b")) as b,
    ):
        links.update([a.record, b.record])
        await until(lambda: len(observer.held) == 2)
        a.on_start = lambda link_id, start: a.step(
            {link_id: [TokenDelta(start.stream_id, (4,), "stop")]}
        )
        async for delta in links.stream("a", make_request(), timeout_s=60, ticket=ticket_of("b")):
            assert delta.token_ids == (4,)
        kinds = [type(message) for _, message in a.received]
        assert kinds.index(Peers) < kinds.index(Start)
        assert peers_of(a) == {"b"}


async def test_a_restarted_peer_and_a_forgotten_one_are_introduced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "NUM_INTRODUCED", 2)
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b")) as b,
        fake_worker(make_record("b", epoch=2)) as b_again,
        fake_worker(make_record("c")) as c,
        fake_worker(make_record("d")) as d,
    ):
        links.update([a.record, b.record, c.record, d.record])
        await until(lambda: len(observer.held) == 4)
        links.introduce("a", "b")
        links.update([a.record, b_again.record, c.record, d.record])
        for source in ("b", "c", "b", "d", "b", "c"):
            links.introduce("a", source)
        links.prefetch("a", Prefetch(ticket_of("a"), ()))
        await until(lambda: a.of_type(Prefetch))
        told = [(p.worker_id, p.epoch) for message in a.of_type(Peers) for p in message.peers]
        assert told == [("b", 1), ("b", 2), ("c", 1), ("d", 1), ("c", 1)]


async def test_a_peer_in_use_is_introduced_again_after_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that hears of many peers from other ingresses may have forgotten it."""
    async with (
        fleet() as (links, observer),
        fake_worker(make_record("a")) as a,
        fake_worker(make_record("b")) as b,
    ):
        links.update([a.record, b.record])
        await until(lambda: len(observer.held) == 2)
        links.introduce("a", "b")
        monkeypatch.setattr(client, "INTRODUCED_S", 0.0)
        links.introduce("a", "b")
        await until(lambda: introduced(a) == ["b", "b"])


async def test_many_workers_report_less_often() -> None:
    numbers = (1, 64, 65, 128, 1000, 1024, 10_000)
    assert [report_interval_s(number) for number in numbers] == [
        0.0,
        0.0,
        0.0128,
        0.0128,
        0.1024,
        0.1024,
        0.5,
    ]
    async with fleet() as (links, _), fake_worker(make_record("a")) as a:
        absent = [make_record(f"absent{number}", port=1) for number in range(64)]
        links.update([a.record, *absent])
        await until(lambda: a.server._links and a.server._links[1]._reports.interval_s == 0.0128)
        links.update([a.record])
        await until(lambda: a.server._links[1]._reports.interval_s == 0.0)
