"""A plain Ray Serve application to compare our links with: an ingress that streams by a handle.

It is written as in Serve's documentation: a FastAPI ingress, a `DeploymentHandle` with
`stream=True`, an async generator in the worker. It sends the same tokens at the same pace in the
same OpenAI chunks as ours. All streams of a worker advance together, as in an engine.
"""

# mypy: disable-error-code="untyped-decorator"

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from bench.paced_worker import MARKER, STEP_S

NAME = "stock"
http = FastAPI()


class StockWorker:
    """Gives one token to every stream each step."""

    def __init__(self) -> None:
        self._beat = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._step())

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + STEP_S, loop.time())
            await asyncio.sleep(next_s - loop.time())
            beat, self._beat = self._beat, asyncio.Event()
            beat.set()

    async def generate(self, num_tokens: int) -> AsyncIterator[str]:
        for _ in range(num_tokens):
            await self._beat.wait()
            yield MARKER


@serve.ingress(http)
class StockIngress:
    def __init__(self, worker: DeploymentHandle) -> None:
        self._worker = worker.options(stream=True)

    @http.post("/completions")
    async def complete(self, body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(self._events(body["max_tokens"]), media_type="text/event-stream")

    async def _events(self, num_tokens: int) -> AsyncIterator[str]:
        async for text in self._worker.generate.remote(num_tokens):
            chunk = {
                "id": "cmpl-0",
                "object": "text_completion",
                "created": 0,
                "model": NAME,
                "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}],
            }
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"


def application() -> Application:
    worker = serve.deployment(
        name="worker", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )(StockWorker)
    ingress = serve.deployment(
        name="ingress", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )(StockIngress)
    return ingress.bind(worker.bind())
