"""The parts of the serving bench that need no Ray: a worker that keeps time, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from bench.paced_worker import MARKER, STEP_S, PacedRunner, paced_parts
from bench.serving_cluster import MODEL, config_for
from bench.serving_path import PROMPT, WAYS
from bench.sse_clients import Clients
from disagg import local
from disagg.engine.sequence import Sequence
from disagg.engine.step import StepPlan
from disagg.messages import GenerateRequest, SamplingParams
from disagg.time_model import StepFeatures

REQUEST = GenerateRequest(
    request_id="r",
    model=MODEL,
    token_ids=(1, 2, 3),
    num_prompt_tokens=3,
    hash_root=b"",
    block_hashes=(),
    sampling=SamplingParams(max_tokens=4),
    deadline_unix_s=0.0,
)


def test_steps_come_on_a_beat_and_late_ones_are_not_made_up_for() -> None:
    now = 100.0
    slept: list[float] = []
    runner = PacedRunner(7, lambda: now, slept.append)
    plan = StepPlan([Sequence(REQUEST) for _ in range(2)], [2, 3], 0, 5, StepFeatures())
    for elapsed in (0.0, 0.005, 10 * STEP_S, 0.0):
        now += elapsed
        unfinished, sampled = runner.run(plan)
        assert unfinished is None
        assert sampled is not None and sampled.token_id == 7
    assert slept == pytest.approx([0.0, STEP_S - 0.005, 0.0, STEP_S])


@asynccontextmanager
async def served_port() -> AsyncIterator[int]:
    """The application of the bench without Ray, with its paced worker, behind uvicorn."""
    async with local.running(config_for(port=0), build=paced_parts) as cluster:
        server = uvicorn.Server(uvicorn.Config(cluster.ingress.app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            port: int = server.servers[0].sockets[0].getsockname()[1]
            yield port
        finally:
            server.should_exit = True
            await serving


async def test_clients_count_every_token_of_one_request_after_another() -> None:
    way = WAYS[0]
    body = {**way.body, "prompt": PROMPT, "max_tokens": 5, "stream": True}
    async with served_port() as port:
        clients = Clients(port, way.path, body, MARKER)
        await clients.start(3, over_s=0.0)
        await clients.wait_first_tokens(10)
        async with asyncio.timeout(10):
            while clients.num_ended < 6:
                clients.check()
                await asyncio.sleep(0.01)
        clients.stop()
        assert 5 * clients.num_ended <= clients.num_tokens <= 5 * (clients.num_ended + 3)
        assert all(0 < wait_s < 10 for wait_s in clients.first_token_s)


async def test_clients_tell_why_a_request_was_refused() -> None:
    body = {"model": "nobody", "prompt": PROMPT, "max_tokens": 5, "stream": True}
    async with served_port() as port:
        clients = Clients(port, WAYS[0].path, body, MARKER)
        await clients.start(1, over_s=0.0)
        with pytest.raises(SystemExit, match="nobody"):
            await clients.wait_first_tokens(10)
        clients.stop()
