"""A client that goes away, wherever its request is, leaves nothing behind on any worker.

The whole system in one process; what happens inside a worker is in tests/worker/test_worker.py,
and what happens before any worker in tests/api/test_deadlines.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from disagg.api.http import reply
from disagg.worker.worker import Worker
from tests.api.apps import Exchange, never
from tests.links.fakes import until
from tests.test_local import LONG, body, cluster, until_empty

# "prefill", "decode": it waits for the engine of that worker.
PHASES = ["sent", "prefill", "decode", "streaming", "slow_reader"]


async def leave(phase: str, exchange: Exchange, held: Worker | None) -> None:
    """Hang up once the request is there; a slow reader is hung up on."""
    if held is not None:
        await until(held._thread._messages.qsize, 60)
    elif phase == "streaming":
        await until(lambda: len(exchange.sent) > 3, 60)
    elif phase == "sent":
        await asyncio.sleep(0)
    if phase != "slow_reader":
        exchange.hang_up()
    async with asyncio.timeout(60):
        await exchange.done


@pytest.mark.parametrize("phase", PHASES)
async def test_nothing_is_left(phase: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(model) as (running, client):
        go_on, is_held = threading.Event(), threading.Event()
        held: Worker | None = None

        def hold() -> None:
            is_held.set()
            assert go_on.wait(120)

        for worker in running.workers:
            if worker.record.role == phase:  # what comes waits for its engine
                held = worker
                worker._thread.post(hold)
                await until(is_held.is_set)
        asked: dict[str, Any] = body(LONG, 200, stream=True, ignore_eos=True)
        exchange = Exchange(running.ingress.app, asked)
        if phase == "slow_reader":
            monkeypatch.setattr(reply, "PING_AFTER_S", 0.05)

            async def block(message: MutableMapping[str, Any]) -> None:
                exchange.sent.append(message)
                if message.get("more_body"):
                    await never()

            exchange._send = block  # type: ignore[method-assign]
        await leave(phase, exchange, held)
        go_on.set()
        assert not any(b"[DONE]" in each.get("body", b"") for each in exchange.sent)
        for worker in running.workers:
            await until_empty(worker)
        text = (await client.get("/metrics")).text
        assert "disagg_requests_body_bytes 0.0" in text
        assert "disagg_request_disconnect_total 1.0" in text
