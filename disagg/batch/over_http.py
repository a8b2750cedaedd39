"""Asks a server by HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import aiohttp

from disagg.batch.ask import BATCH_HEADERS, Patience
from disagg.batch.lines import BatchReply
from disagg.config_checks import is_loopback
from disagg.errors import Unavailable
from disagg.server_address import Address, address_of

CONNECT_TIMEOUT_S = 30.0


def open_session(
    address: Address,
    api_key: str | None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> aiohttp.ClientSession:
    """Connections to a server, as many as are needed, for requests with JSON.

    The environment's proxies apply, except to this machine.

    Args:
        timeout_s: for each request; None: how long an answer may take is the server's to say.
    """
    authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        headers={"content-type": "application/json", **headers, **authorization},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        trust_env=not is_loopback(address.host),
    )


@asynccontextmanager
async def asking(url: str, api_key: str | None = None) -> AsyncIterator[Patience]:
    """Ask the server at `url`, which may end with `/v1`, with batch priority; while it is full,
    requests wait.

    Raises:
        StartupError: it is not an http or https URL.
    """
    address = address_of(url)
    async with open_session(address, api_key, headers=BATCH_HEADERS) as session:

        async def ask(path: str, body: bytes) -> BatchReply:
            try:
                async with session.post(address.root + path, data=body) as reply:
                    named = {name.lower(): value for name, value in reply.headers.items()}
                    return BatchReply(reply.status, named, await reply.read())
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise Unavailable(
                    f"Cannot reach {url} ({error or type(error).__name__}); start a server with"
                    " `disagg serve`, or give its address with --url."
                ) from error

        yield Patience(ask)
