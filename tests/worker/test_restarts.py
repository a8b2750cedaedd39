"""A worker that was restarted is another worker, whatever it is called and wherever it listens."""

from __future__ import annotations

from disagg.ingress.dispatch import append_tokens
from tests.links.fakes import until
from tests.worker.rig import BLOCK_SIZE, Rig, rig
from tests.worker.test_worker import answer_to, make_request, prefilled, tokens


async def restart(r: Rig, worker_id: str, epoch: int) -> None:
    """The same worker in a new process; everybody learns of it."""
    await r.workers[worker_id].close()
    r.links[worker_id].close()
    await until(lambda: worker_id not in r.observer.held)
    await r.start("prefill", worker_id=worker_id, epoch=epoch)


async def test_tickets_of_the_old_epoch_are_refused_and_their_prompts_computed() -> None:
    async with rig("prefill", "decode") as r:
        moved, first = await prefilled(r, make_request())
        await restart(r, "prefill", epoch=2)
        same, again = await prefilled(r, make_request(prompt=tuple(range(40, 61))))
        assert first.ticket is not None and again.ticket is not None
        assert first.ticket.epoch == 1 and again.ticket.epoch == 2
        deltas = await r.all("decode", moved, ticket=first.ticket)
        assert [*first.token_ids, *tokens(deltas)] == answer_to(make_request())
        assert r.runners["decode"].num_computed >= len(moved.token_ids), "stale KV was taken"
        before = r.runners["decode"].num_computed
        deltas = await r.all("decode", same, ticket=again.ticket)
        assert r.runners["decode"].num_computed == before + len(tokens(deltas))
        await r.until_empty("prefill")
        await r.until_empty("decode")


async def test_a_worker_may_restart_again_and_again() -> None:
    """A reader is shown tickets of both lives each time, and takes KV for the living one only."""
    async with rig() as r:
        await r.start("prefill", worker_id="source")
        await r.start("decode")
        for epoch in range(2, 22):
            request = make_request(prompt=tuple(range(epoch, epoch + 21)))
            *_, stale = await r.all("source", request, hand_over=True)
            await restart(r, "source", epoch)
            *_, fresh = await r.all("source", request, hand_over=True)
            moved = append_tokens(request, list(fresh.token_ids), BLOCK_SIZE)
            for ticket in (stale.ticket, fresh.ticket):
                deltas = await r.all("decode", moved, ticket=ticket)
                assert [*fresh.token_ids, *tokens(deltas)] == answer_to(request)
        await r.until_empty("source")
        await r.until_empty("decode")
