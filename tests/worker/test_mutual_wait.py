"""Two workers that hold each other's KV while both are full go on: holds give way, not requests."""

from __future__ import annotations

import asyncio

import pytest

from disagg.ingress.dispatch import append_tokens
from disagg.messages import GenerateRequest, Role, TokenDelta
from tests.worker.rig import BLOCK_SIZE, Rig, rig
from tests.worker.test_worker import answer_to, make_request, tokens

NUM_BLOCKS = 16
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


async def leave(r: Rig, worker_id: Role, number: int) -> tuple[GenerateRequest, TokenDelta]:
    """A request whose prompt was computed on `worker_id`, which holds its seven blocks."""
    first = 30 * number + (100 if worker_id == "decode" else 0)
    request = make_request(12, prompt=tuple(4 + (first + i) % 200 for i in range(26)))
    *_, delta = await r.all(worker_id, request, hand_over=True)
    return request, delta


async def arrive(r: Rig, worker_id: Role, request: GenerateRequest, left: TokenDelta) -> None:
    moved = append_tokens(request, list(left.token_ids), BLOCK_SIZE)
    deltas = await r.all(worker_id, moved, ticket=left.ticket)
    assert [*left.token_ids, *tokens(deltas)] == answer_to(request)


@pytest.mark.parametrize("num_each", [1, 2])
async def test_workers_full_of_holds_for_each_other(num_each: int) -> None:
    """Seven of 16 blocks for each ticket; with two, nothing can arrive before a hold is broken."""
    async with rig() as r:
        for role in OTHER:
            await r.start(role, num_blocks=NUM_BLOCKS)
        left = [
            (OTHER[role], *await leave(r, role, number))
            for role in OTHER
            for number in range(num_each)
        ]
        await asyncio.gather(*(arrive(r, *each) for each in left))
        for role in OTHER:
            await r.until_empty(role)


async def test_running_sequences_and_arrivals_on_both_sides() -> None:
    """Both caches are full of sequences that grow while each waits for blocks of the other."""
    async with rig() as r:
        for role in OTHER:
            await r.start(role, num_blocks=NUM_BLOCKS)
        left = [(OTHER[role], *await leave(r, role, 0)) for role in OTHER]
        growing = [
            (role, make_request(36, prompt=tuple(range(50 + 9 * number, 58 + 9 * number))))
            for role in OTHER
            for number in range(4)
        ]
        answers = asyncio.gather(*(r.all(role, request) for role, request in growing))
        await asyncio.gather(*(arrive(r, *each) for each in left))
        for (_, request), deltas in zip(growing, await answers, strict=True):
            assert tokens(deltas) == answer_to(request)
        for role in OTHER:
            await r.until_empty(role)
