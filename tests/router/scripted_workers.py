"""Fake workers that do what a script says, and a dispatcher in front of them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import (
    DeadlineExceeded,
    DisaggError,
    WorkerLost,
)
from disagg.ingress.dispatch import Dispatcher
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import (
    GenerateRequest,
    Prefetch,
    PutDelta,
    StageTimes,
    Start,
    TokenDelta,
    WireError,
)
from disagg.router.fleet import Fleet
from disagg.router.worker_view import RequestLoad
from tests.deltas import answers
from tests.router.fakes import BLOCK_SIZE, make_status


def token_at(position: int) -> int:
    """What any correct worker generates at a position: a function of the position only."""
    return 1000 + position


@dataclass
class Call:
    worker_id: str
    request: GenerateRequest
    timeout_s: float
    hand_over: bool
    ticket: KVTicket | None
    is_closed_early: bool = False


@dataclass
class Script:
    """What happens on one visit. Deltas carry up to `tokens_per_delta` tokens.

    `then` happens after `after` tokens of the visit: "lost" (the link ends), "vanish" (the stream
    just stops), "stuck" (no further word) or an error that the worker answers.
    """

    after: int = 1 << 30
    then: str | DisaggError = "lost"
    tokens_per_delta: int = 1
    with_last_tokens: bool = False  # the error comes in the delta of the last tokens
    num_early: int = 0  # tickets for parts of the prompt, if it is to be handed over
    times: StageTimes | None = None


@dataclass
class ScriptedWorkers:
    """Plays one script per visit, then behaves well. Knows whose ticket is good for what."""

    scripts: deque[Script] = field(default_factory=deque)
    calls: list[Call] = field(default_factory=list)
    released: list[KVTicket] = field(default_factory=list)
    prefetched: list[tuple[str, Prefetch]] = field(default_factory=list)
    introduced: list[tuple[str, str]] = field(default_factory=list)  # reader and source
    on_failure: Callable[[str], None] | None = None
    stuck: asyncio.Event = field(default_factory=asyncio.Event)  # one says no further word

    async def run(self, worker_id: str, start: Start, put: PutDelta, *, timeout_s: float) -> None:
        if start.ticket is not None:
            self._check_introduced(worker_id, start.ticket)
        call = Call(worker_id, start.request, timeout_s, start.hand_over, start.ticket)
        self.calls.append(call)
        script = self.scripts.popleft() if self.scripts else Script()
        try:
            async with asyncio.timeout(timeout_s):
                async for delta in self._play(call, script):
                    put(delta)
        except TimeoutError:
            raise DeadlineExceeded("Too late.") from None
        except asyncio.CancelledError:
            call.is_closed_early = True
            raise

    def release(self, ticket: KVTicket) -> None:
        self.released.append(ticket)

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        self._check_introduced(worker_id, asked.ticket)
        self.prefetched.append((worker_id, asked))

    def introduce(self, worker_id: str, source_id: str) -> None:
        self.introduced.append((worker_id, source_id))

    def _check_introduced(self, worker_id: str, ticket: KVTicket) -> None:
        assert (worker_id, ticket.source_id) in self.introduced, "it cannot reach the source"

    async def _play(self, call: Call, script: Script) -> AsyncGenerator[TokenDelta, None]:
        request = call.request
        if call.hand_over and not request.token_ids:
            deltas = [prefix_ticket_of(call)] if script.after else await self._fail(call, script)
            for delta in deltas:
                yield delta
            return
        position = len(request.token_ids)
        end = request.num_prompt_tokens + request.sampling.max_tokens
        stop = min(end, position + 1) if call.hand_over else end
        num_left = script.after
        for num_blocks in range(1, 1 + script.num_early * call.hand_over):
            await asyncio.sleep(0)
            yield TokenDelta(1, (), early_ticket=early_ticket_of(call, num_blocks))
        while position < stop:
            await asyncio.sleep(0)
            if num_left <= 0:
                for delta in await self._fail(call, script):
                    yield delta
                return
            count = min(script.tokens_per_delta, num_left, stop - position)
            tokens = tuple(token_at(position + i) for i in range(count))
            position, num_left = position + count, num_left - count
            is_end = position == end
            error = None
            if num_left <= 0 and script.with_last_tokens and isinstance(script.then, DisaggError):
                error = WireError.from_error(script.then)
            elif call.hand_over and not is_end:
                yield TokenDelta(1, tokens, num_cached_tokens=7, times=script.times)
                yield TokenDelta(1, (), ticket=ticket_of(call.worker_id, request))
                return
            finish = "length" if is_end and error is None else None
            yield TokenDelta(
                1,
                tokens,
                finish,  # type: ignore[arg-type]
                num_cached_tokens=5,
                error=error,
                times=script.times,
            )
            if error is not None:
                return

    async def _fail(self, call: Call, script: Script) -> list[TokenDelta]:
        if self.on_failure is not None:
            self.on_failure(call.worker_id)
        if isinstance(script.then, DisaggError):
            return [TokenDelta(1, (), error=WireError.from_error(script.then))]
        if script.then == "vanish":
            return []
        if script.then == "stuck":
            self.stuck.set()
            await asyncio.Event().wait()
        raise WorkerLost(f"Worker {call.worker_id} was lost.")


def ticket_of(worker_id: str, request: GenerateRequest) -> KVTicket:
    num_tokens = len(request.token_ids)
    return KVTicket(request.request_id, worker_id, 1, "toy/bs16", num_tokens, (0,), (0,))


def early_ticket_of(call: Call, num_blocks: int) -> KVTicket:
    name, some = f"{call.request.request_id}+{num_blocks}", tuple(range(num_blocks))
    return KVTicket(name, call.worker_id, 1, "toy/bs16", BLOCK_SIZE * num_blocks, some, some)


def prefix_ticket_of(call: Call) -> TokenDelta:
    """All that was asked for."""
    names = call.request.block_hashes
    num_tokens, name = BLOCK_SIZE * len(names), call.request.request_id
    return TokenDelta(
        1, (), ticket=KVTicket(name, call.worker_id, 1, "toy/bs16", num_tokens, (0,), (0,))
    )


class Clock:
    """Unix time as far as a dispatcher is concerned; follows the running loop."""

    def __call__(self) -> float:
        return asyncio.get_running_loop().time()


def make_dispatcher(workers: ScriptedWorkers, fleet: Fleet, **options: Any) -> Dispatcher:
    options = {"patience_s": 0.2} | options
    rng = random.Random(3)
    return Dispatcher(workers, fleet, now=Clock(), rng=rng, **options)


def keep_busy(fleet: Fleet, *worker_ids: str) -> Fleet:
    """Make decode workers too busy to prefill for themselves."""
    for worker_id in worker_ids:
        status = make_status(num_running=16, num_context_tokens=16_000)
        fleet.worker_stepped(worker_id, (), status)
    return fleet


async def collect(dispatcher: Dispatcher, request: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in answers(dispatcher, request)]


async def play(
    request: GenerateRequest,
    fleet: Fleet,
    *scripts: Script,
    on_failure: Callable[[str], None] | None = None,
    **options: Any,
) -> ScriptedWorkers:
    """The workers of a fleet after they have answered a request, whole in spite of all."""
    workers = ScriptedWorkers(deque(scripts), on_failure=on_failure)
    dispatcher = make_dispatcher(workers, fleet, **options)
    assert_complete(await collect(dispatcher, request), request)
    assert_nothing_reserved(fleet)
    return workers


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def assert_complete(deltas: list[TokenDelta], request: GenerateRequest) -> None:
    start, count = request.num_prompt_tokens, request.sampling.max_tokens
    assert tokens_of(deltas) == [token_at(start + i) for i in range(count)]
    assert [delta.is_last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].finish_reason == "length"
    assert all(delta.ticket is None and delta.error is None for delta in deltas)
    assert all(delta.num_cached_tokens == 0 for delta in deltas[1:])


def assert_nothing_reserved(fleet: Fleet) -> None:
    for worker_id in fleet.view().workers:
        assert fleet._ledger.coming_to(worker_id) == RequestLoad()
