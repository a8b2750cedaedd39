"""Asks an HTTP application in this process, as a client would by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from disagg.api.http.request import TENANT, TIMEOUT_S
from disagg.batch.ask import BATCH_HEADERS, Ask
from disagg.batch.lines import BatchReply
from disagg.batch.queue import AskFor

Message: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


async def ask_app(
    app: App,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    tenant: str | None = None,
    timeout_s: float = 0.0,
) -> BatchReply:
    """The reply to one POST.

    Args:
        tenant: on whose behalf; None: of the API key in `headers`, as from outside.
        timeout_s: time limit in place of the server's; 0: the server's.
    """
    waiting = [{"type": "http.request", "body": body}]
    replies: list[Message] = []

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()  # this client does not go away
        return waiting.pop()

    async def send(message: Message) -> None:
        replies.append(message)

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: Message = {"type": "http", "method": "POST", "path": path}
    scope["headers"] = [(b"host", b"local"), *named]
    if tenant is not None:
        scope[TENANT], scope[TIMEOUT_S] = tenant, timeout_s
    await app(scope, receive, send)
    start = replies[0]
    answered = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
    return BatchReply(
        start["status"], answered, b"".join(each.get("body", b"") for each in replies)
    )


def asking_for(app: App, now: Callable[[], float]) -> AskFor:
    """Sends requests of batches, with batch priority.

    Args:
        now: returns Unix time in seconds.
    """

    def ask_for(tenant: str, until_unix_s: float) -> Ask:
        def ask(path: str, body: bytes) -> Awaitable[BatchReply]:
            left_s = max(1.0, until_unix_s - now())
            return ask_app(app, path, body, BATCH_HEADERS, tenant, left_s)

        return ask

    return ask_for
