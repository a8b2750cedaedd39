"""Asks an HTTP application in this process, as a client would by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from disagg.api.http.request import TENANT
from disagg.batch.lines import BatchReply

Message: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


async def ask_app(
    app: App, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None = None
) -> BatchReply:
    """The reply to one POST.

    Args:
        tenant: on whose behalf; None: of the API key in `headers`, as from outside.
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
        scope[TENANT] = tenant
    await app(scope, receive, send)
    start = replies[0]
    answered = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
    return BatchReply(
        start["status"], answered, b"".join(each.get("body", b"") for each in replies)
    )
