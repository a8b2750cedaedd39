"""Streaming completions over HTTP, as `disagg bench` reads them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from bench.peers.checkpoint import WORD
from bench.peers.children import NotRunning
from bench.peers.limits import MODEL
from disagg.server_address import Address
from disagg.tools.bench.endpoint import Endpoint, RequestTiming


async def complete(
    port: int, prompt: list[int], num_new: int, extra: Mapping[str, Any] | None = None
) -> RequestTiming:
    """Ask for a completion and read it to its end. Times are those of `perf_counter`.

    Raises:
        NotRunning: the answer has not `num_new` tokens; says what came instead.
    """
    body = {
        "model": MODEL,
        "prompt": " ".join(f"{WORD}{token}" for token in prompt),
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(extra or {}),
    }
    address = Address("http", "127.0.0.1", port, "")
    endpoint = Endpoint(address, "/v1/completions", now=time.perf_counter)
    timing = RequestTiming(due_s=time.perf_counter())
    await endpoint.ask(msgspec.json.encode(body), timing)
    await endpoint.close()
    if timing.error:
        raise NotRunning(f"{timing.error}: {timing.message}")
    if timing.num_output_tokens != num_new:
        raise NotRunning(f"{timing.num_output_tokens} tokens instead of {num_new}")
    return timing
