"""The bundled model recalls facts out of KV blocks that another worker computed.

A wrong, missing or shifted block would show as a wrong fact: the question comes more than 1,000
tokens after it.
"""

from __future__ import annotations

import asyncio

import httpx

from disagg.config_checks import parse_config
from disagg.local import running
from tests.held_out import LONG_RECALL, held_out


async def test_planted_facts_come_back() -> None:
    turns = held_out()[LONG_RECALL]
    engine = {"num_threads": 1, "kv_cache_memory_bytes": 64 << 20}
    config = parse_config(
        {"tiers": [{"model": "demo-large", "engine": engine}], "cluster_key": "k"}
    )
    async with running(config) as cluster:
        transport = httpx.ASGITransport(app=cluster.ingress.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=100
        ) as client:

            async def ask(question: str) -> httpx.Response:
                body = {
                    "model": "demo-large",
                    "messages": [{"role": "user", "content": question}],
                    "temperature": 0,
                    "max_tokens": 32,
                }
                return await client.post("/v1/chat/completions", json=body)

            answers = await asyncio.gather(*(ask(turn.prompt) for turn in turns))
        said = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        num_pulled = sum(
            cluster.ingress.dispatcher.decision(answer.json()["id"])[0].route.prefill is not None
            for answer in answers
        )
        for worker in cluster.workers:
            await worker.check()
    num_right = sum(text == turn.label for text, turn in zip(said, turns, strict=True))
    assert num_right >= 0.9 * len(turns) > 9, said
    assert num_pulled > 0  # and not only computed where they are decoded
