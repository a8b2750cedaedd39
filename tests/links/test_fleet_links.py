"""Links follow the membership, and workers hear of their peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from disagg.errors import WorkerLost
from disagg.kvtransfer.ticket import KVTicket
from disagg.links.fleet_links import FleetLinks, report_interval_s
from disagg.links.server import LinkClosed, LinkId
from disagg.messages import NO_STREAM, Peers, Prefetch, Start, TokenDelta
from tests.deltas import pull
from tests.links.fakes import (
    KEY,
    FakeWorker,
    RecordingObserver,
    fake_worker,
    make_record,
    make_request,
    until,
)


def gone_of(worker: FakeWorker) -> list[str]:
    return [worker_id for message in worker.of_type(Peers) for worker_id in message.gone]


@asynccontextmanager
async def fleet(
    *names: str,
) -> AsyncIterator[tuple[FleetLinks, RecordingObserver, list[FakeWorker]]]:
    """Links to workers of these names, all of them up."""
    observer = RecordingObserver()
    links = FleetLinks(key=KEY, ingress_id="ingress-0", observer=observer, rng=random.Random(1))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(links.close)
        workers = [
            await stack.enter_async_context(fake_worker(make_record(name))) for name in names
        ]
        links.update([worker.record for worker in workers])
        await until(lambda: len(observer.held) == len(names))
        yield links, observer, workers


def open_stream(links: FleetLinks, worker_id: str) -> AsyncGenerator[TokenDelta, None]:
    start = Start(NO_STREAM, make_request())
    return pull(lambda put: links.run(worker_id, start, put, timeout_s=60))


async def test_workers_hear_of_peers_that_have_left() -> None:
    """Else what each pull from them took is kept, and sent with every step, for ever."""
    async with fleet("a", "b", "c") as (links, _, (a, b, c)):
        links.update([a.record, c.record])  # it is still linked, and may come back
        links.update([a.record, b.record, c.record])
        links.update([a.record, c.record])
        await b.server.close()
        await until(lambda: "b" in gone_of(a) and "b" in gone_of(c))
        await c.server.close()
        await until(lambda: not links.link("c").is_up)
        links.update([a.record])
        await until(lambda: gone_of(a) == ["b", "c"])


async def test_workers_come_and_go_with_the_membership() -> None:
    async with fleet("a") as (links, observer, (a,)), fake_worker(make_record("b")) as b:
        assert set(observer.held) == {"a"}
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
    async with fleet("a", "b") as (links, observer, (a, b)):
        for worker in (a, b):
            worker.on_start = lambda link_id, start, worker=worker: worker.step(
                {link_id: [TokenDelta(start.stream_id, (4,), "stop")]}
            )
        links.update([])
        for name in ("a", "b"):
            async for delta in open_stream(links, name):
                assert delta.token_ids == (4,)
        links.update([a.record])
        links.update([a.record, b.record])
        assert set(observer.held) == {"a", "b"}
        assert observer.calls.count(("synced", "a")) == observer.calls.count(("synced", "b")) == 1


async def test_a_worker_that_left_the_membership_finishes_its_streams() -> None:
    async with fleet("a") as (links, _, (a,)):
        begun: list[tuple[LinkId, int]] = []
        a.on_start = lambda link_id, start: begun.append((link_id, start.stream_id))
        stream = open_stream(links, "a")
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
    async with fleet("a") as (links, observer, (a,)):
        links.update([])
        if is_listed_again:
            links.update([a.record])
        await a.server.close()
        await until(lambda: not observer.held)
        assert [record.worker_id for record in links.records] == ["a"] * is_listed_again


async def test_a_dead_worker_in_the_membership_is_not_routable() -> None:
    """It is tried again and again, until membership lets it go."""
    async with fleet("b") as (links, observer, (b,)):
        async with fake_worker(make_record("a")) as a:
            dead = a.record
        links.update([dead, b.record])
        await until(lambda: "Connect call failed" in links.link("a").last_error)
        assert set(observer.held) == {"b"}
        with pytest.raises(WorkerLost, match="not linked"):
            await anext(open_stream(links, "a"))
        links.update([b.record])
        with pytest.raises(WorkerLost, match="has left the fleet"):
            links.link("a")


async def test_a_restarted_worker_is_a_new_worker() -> None:
    async with fleet() as (links, observer, _), fake_worker(make_record("a")) as old:
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


async def test_a_worker_hears_how_to_reach_a_peer_before_what_names_it() -> None:
    """Each time: whether it knows the peer, in this epoch, is known only to the worker."""
    async with (
        fleet("a", "b") as (links, _, (a, b)),
        fake_worker(make_record("b", epoch=2)) as b_again,
    ):
        links.introduce("a", "b")
        links.update([a.record, b_again.record])
        for pair in (("a", "b"), ("a", "b"), ("a", "a"), ("a", "unknown"), ("unknown", "a")):
            links.introduce(*pair)
        links.prefetch("a", Prefetch(KVTicket("1/1", "b", 2, "toy/bs16", 16, (0,), (1,)), ()))
        await until(lambda: a.of_type(Prefetch))
        told = [peer for message in a.of_type(Peers) for peer in message.peers]
        assert told == [b.record.peer, b_again.record.peer, b_again.record.peer]
        assert not b_again.of_type(Peers)


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
    async with fleet("a") as (links, _, (a,)):
        absent = [make_record(f"absent{number}", port=1) for number in range(64)]
        links.update([a.record, *absent])
        await until(lambda: a.server._links[1].reports.interval_s == 0.0128)
        links.update([a.record])
        await until(lambda: a.server._links[1].reports.interval_s == 0.0)
