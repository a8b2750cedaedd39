"""Asks a server by HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from disagg.batch.ask import BATCH_HEADERS, Patience
from disagg.batch.lines import BatchReply
from disagg.config_checks import is_loopback
from disagg.errors import Unavailable
from disagg.server_address import address_of

CONNECT_TIMEOUT_S = 30.0


@asynccontextmanager
async def asking(url: str, api_key: str | None = None) -> AsyncIterator[Patience]:
    """Ask the server at `url`, which may end with `/v1`, with batch priority; while it is full,
    requests wait. How long an answer may take is the server's to say.

    The environment's proxies apply, except to this machine.

    Raises:
        StartupError: it is not an http or https URL.
    """
    address = address_of(url)
    base = f"{address.scheme}://{address.netloc}{address.prefix}"
    headers = dict(BATCH_HEADERS)
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_TIMEOUT_S),
        trust_env=not is_loopback(address.host),
    ) as session:

        async def ask(path: str, body: bytes) -> BatchReply:
            try:
                async with session.post(base + path, data=body) as reply:
                    named = {name.lower(): value for name, value in reply.headers.items()}
                    return BatchReply(reply.status, named, await reply.read())
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise Unavailable(
                    f"Cannot reach {url} ({error or type(error).__name__}); start a server with"
                    " `disagg serve`, or give its address with --url."
                ) from error

        yield Patience(ask)
