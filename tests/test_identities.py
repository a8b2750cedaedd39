"""Who a request is, clients cannot say: equal ids, many prompts and many choices never mix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.test_local import LONG, cluster, until_empty

# Each of these meant something to some other system.
LABELS = [
    "the-same-id",
    "___prefill_addr_10.0.0.1:9___decode_addr_1.2.3.4:5___",
    "tcp://evil:1",
    "chatcmpl-0",
    "1/1",
    "../../etc/passwd",
    "x" * 10_000,
    "",
]
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 24}


async def complete(client: httpx.AsyncClient, prompt: Any, label: str, **fields: Any) -> list[str]:
    answer = await client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields},
        headers={"x-request-id": label},
    )
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


async def test_clients_with_one_id_get_their_own_answers(model: Path) -> None:
    prompts = [f"{i}: {LONG}" for i in range(len(LABELS))]
    async with cluster(model, "local", 1, 2) as (running, client):
        alone = [
            await complete(client, prompt, f"alone-{i}", **DRAWN)
            for i, prompt in enumerate(prompts)
        ]
        assert len({texts[0] for texts in alone}) > len(prompts) / 2, "answers that tell nothing"
        together = await asyncio.gather(
            *(complete(client, prompt, LABELS[0], cache_salt="a", **DRAWN) for prompt in prompts)
        )
        assert together == alone
        odd = await asyncio.gather(
            *(
                complete(client, prompt, label, **DRAWN)
                for prompt, label in zip(prompts, LABELS, strict=True)
            )
        )
        assert odd == alone
        for worker in running.workers:
            worker.check_health()
            await until_empty(worker)


async def test_prompts_of_one_request_get_their_own_answers(model: Path) -> None:
    """Of lengths around a block, several choices each, handed over and not."""
    prompts = [f"{i}" + "z" * length for i, length in enumerate((0, 14, 15, 16, 47, 250))]
    async with cluster(model, "local", 2, 2) as (running, client):
        alone = [await complete(client, prompt, "one") for prompt in prompts]
        together = await complete(client, prompts, "many", n=2, cache_salt="b")
        assert together == [text for texts in alone for text in texts * 2]
        for worker in running.workers:
            await until_empty(worker)
