"""The application in process, behind `httpx2` and behind the real OpenAI client."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai

from disagg.api.http.app import AsgiApp, HttpApp, Readiness
from disagg.api.http.batches import BatchApi
from disagg.api.http.metrics import ApiMetrics
from disagg.api.http.monitoring import Monitoring
from disagg.api.http.quota import Quota
from disagg.api.running_job import Generate
from disagg.api.served_model import ServedModel
from disagg.api.service import Service
from disagg.api_keys import DEFAULT_TENANT
from disagg.batch.store import BatchStore
from disagg.config import HttpConfig, TenantConfig
from disagg.store.limits import Limits
from tests.api.fakes import FakeGenerate, NoAdapters, served_model
from tests.waiting import until as until

URL = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
READY = Readiness(ready=True, pools={"tiny": {"prefill": 1, "decode": 1}})


def unlimited() -> Quota:
    nobody = TenantConfig()
    limits = Limits(lambda name: nobody, clock=time.monotonic)
    return Quota(lambda name: nobody, lambda name: DEFAULT_TENANT, limits)


def make_app(
    generate: Generate | None = None,
    *models: ServedModel,
    config: HttpConfig | None = None,
    timeout_s: float = 30.0,
    **options: Any,
) -> HttpApp:
    """An app whose time stands still and whose ids and seeds count up."""
    table = {model.name: model for model in models or (served_model(),)}
    counter = itertools.count(1)
    service = Service(
        table,
        generate or FakeGenerate(),
        NoAdapters(),
        default_timeout_s=timeout_s,
        clock=lambda: 1000.0,
        random_bits=lambda num_bits: next(counter),
    )
    ids = itertools.count(1)
    options.setdefault("readiness", lambda: READY)
    metrics = options.setdefault("metrics", ApiMetrics())
    options.setdefault("monitoring", Monitoring(metrics))
    options.setdefault("quota", unlimited())
    return HttpApp(service, config or HttpConfig(), new_id=lambda: f"id{next(ids)}", **options)


def app_with_files(directory: Path, **config: Any) -> HttpApp:
    """An app with files and batches, which nobody runs."""
    settings = HttpConfig(files_directory=str(directory), **config)
    store = BatchStore(directory, settings.files_nbytes)
    return make_app(config=settings, batches=BatchApi(store, settings, time.time))


@asynccontextmanager
async def http_client(app: AsgiApp) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=True)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@asynccontextmanager
async def openai_client(
    app: AsgiApp, *, api_key: str = "none", max_retries: int = 0
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with http_client(app) as transport:
        client = openai.AsyncOpenAI(
            api_key=api_key,
            base_url="http://test/v1",
            http_client=transport,
            max_retries=max_retries,
        )
        yield client


async def chat(app: AsgiApp, **fields: Any) -> Any:
    """The answer to "hi", through OpenAI's client."""
    async with openai_client(app) as client:
        return await client.chat.completions.create(model="tiny", messages=HI, **fields)


async def chat_chunks(app: AsgiApp, **fields: Any) -> list[Any]:
    """The same as a stream."""
    async with openai_client(app) as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": HI, "stream": True} | fields
        return [chunk async for chunk in await client.chat.completions.create(**asked)]


async def complete(app: AsgiApp, prompt: Any = "a", **fields: Any) -> Any:
    async with openai_client(app) as client:
        return await client.completions.create(model="tiny", prompt=prompt, **fields)


class Exchange:
    """One raw ASGI exchange whose client can go away, which `httpx` cannot play.

    stops_at: whether the client stops reading at a message.
    """

    def __init__(
        self,
        app: AsgiApp,
        body: dict[str, Any],
        headers: Mapping[str, str] | None = None,
        stops_at: Callable[[Mapping[str, Any]], bool] = lambda message: False,
    ) -> None:
        self._stops_at = stops_at
        self.sent: list[MutableMapping[str, Any]] = []
        self.arrived = asyncio.Event()
        self._incoming: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": URL,
            "headers": [
                (b"host", b"test"),
                (b"content-type", b"application/json"),
                *(
                    (name.lower().encode(), value.encode())
                    for name, value in (headers or {}).items()
                ),
            ],
        }
        self.done = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: AsgiApp, scope: MutableMapping[str, Any]) -> None:
        await app(scope, self._incoming.get, self._send)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        self.arrived.set()
        if self._stops_at(message):
            await never()

    async def until_text(self, part: str) -> None:
        while part not in self.text:
            await self.arrived.wait()
            self.arrived.clear()

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()
