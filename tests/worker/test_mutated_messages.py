"""Whatever an ingress says, a worker answers, refuses or hangs up, and serves the next request."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any, cast

import msgspec
import pytest

from disagg.ingress.request_state import append_tokens
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import (
    Cancel,
    GenerateRequest,
    Peers,
    Prefetch,
    Release,
    Start,
    ToWorker,
    decode_to_worker,
    encode,
)
from disagg.worker import kv_export
from tests.links.test_server import RawIngress
from tests.worker.members import Member, World
from tests.worker.mutations import mutated
from tests.worker.plays import Play, Trip, request_of
from tests.worker.rig import KEY, rig
from tests.worker.test_worker import answer_to, make_request, tokens

NUM_MESSAGES = 10_000
BLOCK_SIZE = 4


@pytest.fixture
def short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes for the tickets here."""
    monkeypatch.setattr(kv_export, "HOLD_TTL_S", 0.5)


class Pair:
    """A source of tickets, and a worker that is told nonsense by one link after another."""

    def __init__(self) -> None:
        self._world = World(Play(BLOCK_SIZE, (64,) * 4, ()))
        self._source, self.worker = Member(self._world, 0), Member(self._world, 1)
        for member in (self._source, self.worker):
            member.core.add_peers([self._source.transport.peer, self.worker.transport.peer])
        self._num_prefilled = 0
        self.link_id, self.last_stream_id = 1, 0
        self.ends: Counter[str] = Counter()

    def prefilled(self) -> tuple[GenerateRequest, KVTicket]:
        """A request, and the ticket that it left the source with."""
        self._num_prefilled += 1
        prompt = tuple(4 + (self._num_prefilled * 7 + i) % 50 for i in range(21))
        request = request_of(Trip(0, prompt, 6, deadline_s=1e12), "request", BLOCK_SIZE)
        self._source.core.start(1, Start(self._num_prefilled, request, True), self._world.now)
        while True:
            for delta in self._source.turn().get(1, ()):
                if delta.ticket is not None:
                    return append_tokens(request, list(delta.token_ids), BLOCK_SIZE), delta.ticket

    def good(self, request: GenerateRequest, ticket: KVTicket, rng: random.Random) -> ToWorker:
        next_id = self.last_stream_id + 1
        messages: list[ToWorker] = [
            Start(next_id, request, False, ticket),
            Start(next_id, request, True),
            Start(next_id, request),
            Cancel(self.last_stream_id),
            Release(f"{self.link_id}/{self.last_stream_id}"),
            Prefetch(ticket, request.block_hashes),
            Peers((self._source.transport.peer,)),
        ]
        return rng.choice(messages)

    def tell(self, message: ToWorker) -> None:
        """What `LinkServer` and `Worker` do with a message; then a turn of the engine."""
        core = self.worker.core
        match message:
            case Start(stream_id=stream_id):
                if stream_id <= self.last_stream_id:  # the server hangs up
                    core.close_link(self.link_id, self._world.now)
                    self.link_id += 1
                self.last_stream_id = stream_id
                core.start(self.link_id, message, self._world.now)
            case Prefetch():
                core.prefetch(message, self._world.now)
            case Cancel(stream_id=stream_id):
                core.cancel(self.link_id, stream_id, self._world.now)
            case Release(ticket_id=ticket_id):
                core.release(ticket_id)
            case Peers(peers=peers, gone=gone):
                core.add_peers(peers)
                core.forget_peers(gone)
        core.check()
        self.turn()

    def turn(self, seconds: float = 0.01) -> None:
        self._world.now += seconds
        for delta in self.worker.turn().get(self.link_id, ()):
            if delta.is_last:
                self.ends["error" if delta.error else "answer"] += 1


def test_mutated_messages_harm_nobody() -> None:
    """Not the engine, not its blocks, and not the request after them."""
    pair, rng = Pair(), random.Random(0)
    taken: Counter[str] = Counter()
    request, ticket = pair.prefilled()
    for i in range(NUM_MESSAGES):
        if i % 20 == 0:
            request, ticket = pair.prefilled()
        try:
            message = decode_to_worker(mutated(encode(pair.good(request, ticket, rng)), rng))
        except msgspec.DecodeError:
            continue
        taken[type(message).__name__] += 1
        pair.tell(message)
    assert all(taken[kind] > 100 for kind in ("Start", "Cancel", "Release", "Peers")), taken
    assert all(pair.ends[end] > 50 for end in ("answer", "error")), pair.ends
    pair.worker.core.close_link(pair.link_id, pair._world.now)
    for _ in range(4):
        pair.turn(seconds=30.0)
    assert pair.worker.is_empty()
    request, ticket = pair.prefilled()
    pair.ends.clear()
    pair.link_id += 1
    pair.last_stream_id = 0
    pair.tell(Start(1, request, False, ticket))
    for _ in range(40):
        pair.turn()
    assert pair.ends == {"answer": 1}


async def hung_up(ingress: RawIngress) -> None:
    """The worker ended the link, whatever it had said before."""
    async with asyncio.timeout(120):
        with contextlib.suppress(ConnectionResetError):
            await ingress._reader.read()


@pytest.mark.usefixtures("short_holds")
async def test_a_worker_hangs_up_on_nonsense_and_goes_on_with_others() -> None:
    """The same over sockets, to a worker with an engine thread and a stream of somebody else."""
    rng = random.Random(1)
    async with rig() as r:
        await r.start("decode", num_blocks=256)
        worker = r.workers["decode"]
        kept = asyncio.create_task(r.all("decode", make_request(max_tokens=600)))
        num_hung_up = 0
        for _ in range(150):
            async with RawIngress(cast(Any, worker)) as ingress:
                await ingress.greet(KEY.encode())
                good = (Start(1, make_request(max_tokens=3)), Cancel(1), Release("1/1"), Peers(()))
                raw = mutated(encode(rng.choice(good)), rng)
                ingress.write_raw(len(raw).to_bytes(4, "little") + raw)
                try:
                    decode_to_worker(raw)
                except msgspec.DecodeError:
                    await hung_up(ingress)
                    num_hung_up += 1
        assert num_hung_up > 50
        assert tokens(await kept) == answer_to(make_request(max_tokens=600))
        worker.check_health()
        await r.until_empty("decode")


@pytest.mark.usefixtures("short_holds")
async def test_a_stream_id_is_used_once() -> None:
    """Sequences and tickets are named after it."""
    async with rig("decode") as r:
        async with RawIngress(cast(Any, r.workers["decode"])) as ingress:
            await ingress.greet(KEY.encode())
            start = Start(7, make_request(max_tokens=3), hand_over=True)
            for message in (start, start):
                ingress.write(message)
            await hung_up(ingress)
        assert tokens(await r.all("decode", make_request())) == answer_to(make_request())
        await r.until_empty("decode")
