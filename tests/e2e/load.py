"""Clients of a server that is changed meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

NUM_CLIENTS = 2
PAUSE_S = 0.3  # which leaves a processor to the processes that start meanwhile
MAX_TOKENS = 300  # so that something is always under way
PROMPTS = [
    f"{i}: a prompt of several blocks that are pulled, whoever computes them " for i in "abc"
]


class Load:
    """Clients that ask again and again, whole answers and streams in turn, and check each one."""

    def __init__(self, url: str, model: str, expected: dict[str, str]) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._url = url
        self._model = model
        self._expected = expected
        self._stopping = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int) -> None:
        # A connection of its own for each, as Serve's HAProxy is replaced meanwhile.
        headers = {"connection": "close"}
        async with httpx.AsyncClient(base_url=self._url, timeout=120, headers=headers) as client:
            while not self._stopping:
                prompt = PROMPTS[(number + self.num_answers) % len(PROMPTS)]
                try:
                    text = await (self._whole, self._streamed)[number % 2](client, prompt)
                except Exception as error:
                    self.failures.append(repr(error))
                else:
                    if text != self._expected[prompt]:
                        self.failures.append(f"{text!r} instead of {self._expected[prompt]!r}")
                self.num_answers += 1
                await asyncio.sleep(PAUSE_S)

    async def _whole(self, client: httpx.AsyncClient, prompt: str) -> str:
        answer = await client.post("/v1/chat/completions", json=self._body(prompt))
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    async def _streamed(self, client: httpx.AsyncClient, prompt: str) -> str:
        text, is_done = "", False
        async with client.stream(
            "POST", "/v1/chat/completions", json={**self._body(prompt), "stream": True}
        ) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
        assert is_done, f"a stream was cut after {text!r}"
        return text

    def _body(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
