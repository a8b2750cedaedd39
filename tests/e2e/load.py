"""Clients of a server that is changed meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

NUM_CLIENTS = 2
PAUSE_S = 0.6  # which leaves a processor to the processes that start meanwhile
MAX_TOKENS = 300  # so that something is always under way
PROMPTS = [
    f"{i}: a prompt of several blocks that are pulled, whoever computes them " for i in "abc"
]


class Load:
    """Clients that ask again and again, one for whole answers and one for streams, and check each
    answer."""

    def __init__(self, url: str, model: str, expected: dict[str, str]) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._url, self._model, self._expected = url, model, expected
        self._stopping = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int) -> None:
        # A connection of its own for each, as Serve's HAProxy is replaced meanwhile.
        async with openai.AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key="-",
            max_retries=0,
            timeout=120,
            default_headers={"connection": "close"},
        ) as client:
            while not self._stopping:
                prompt = PROMPTS[(number + self.num_answers) % len(PROMPTS)]
                try:
                    text = await self._text_of(client, prompt, streams=number % 2 == 1)
                except Exception as error:
                    self.failures.append(repr(error))
                else:
                    if text != self._expected[prompt]:
                        self.failures.append(f"{text!r} instead of {self._expected[prompt]!r}")
                self.num_answers += 1
                await asyncio.sleep(PAUSE_S)

    async def _text_of(self, client: openai.AsyncOpenAI, prompt: str, *, streams: bool) -> str:
        asked: Any = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if not streams:
            answer = await client.chat.completions.create(**asked)
            return answer.choices[0].message.content or ""
        text, is_done = "", False
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                is_done = choice.finish_reason is not None
        assert is_done, f"a stream was cut after {text!r}"
        return text
