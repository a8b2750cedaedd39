"""`get`, `post` and `stream` of httpx with one client, for tests that poll a server.

Each call of `httpx.get` makes a client that reads all certificates: 23 ms of a processor's time
instead of 1. A connection is for one request, so that nobody meets one whose server has died.
A server on a busy machine may take long to answer.
"""

from __future__ import annotations

import httpx

_CLIENT = httpx.Client(
    timeout=60, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
)
get, post, stream = _CLIENT.get, _CLIENT.post, _CLIENT.stream
