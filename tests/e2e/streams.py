"""Prompts of several lengths, and streams in the middle of which something is killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import openai

from tests import plain_http
from tests.e2e.single_engine import SingleEngine

PROMPTS = [
    "short",
    "a prompt of middle length, " * 5,
    "and one that needs many blocks, all of which are pulled: " * 6,
]
NUM_STREAMS = 8
TOKENS = 80
# Who takes a stream over computes its KV in another order. These answers are the same with weights
# that are off by 1e-5; with another text rounding decided one of them.
PROMPT = 2 * (
    "whoever reads stream {0} does not notice that a worker has died,"
    " for its text goes on as it was "
)


def streams_of(reference: SingleEngine) -> list[str]:
    """What all streams say if nothing is killed."""
    return [
        reference.chat(PROMPT.format(i), TOKENS, temperature=i % 2, seed=i)
        for i in range(NUM_STREAMS)
    ]


async def streamed(url: str, model: str, kill: Callable[[], None]) -> list[str]:
    """What all streams say. `kill` is called when the first one has said a few words: before anyone
    reads on, so that most of its answer is still to come."""
    num_kills = 0

    async def stream(client: openai.AsyncOpenAI, index: int) -> str:
        chunks = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT.format(index)}],
            temperature=index % 2,
            seed=index,
            max_tokens=TOKENS,
            stream=True,
        )
        nonlocal num_kills
        text = ""
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 8 and not num_kills:
                num_kills += 1
                kill()
        return text

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        texts = await asyncio.gather(*[stream(client, index) for index in range(NUM_STREAMS)])
    assert num_kills == 1
    return texts


def while_held(held: Path, kill: Callable[[], None]) -> Callable[[], None]:
    """`kill` for `streamed`, of a rank that ends no stream before.

    Args:
        held: what the server has as `DISAGG_TEST_HELD` (`stand_in/sitecustomize.py`).
    """
    held.touch()

    def kill_and_let_go() -> None:
        kill()
        held.unlink()

    return kill_and_let_go


def num_moves(url: str, model: str) -> float:
    """How many requests of a model were rerouted, as the ingresses count."""
    metrics = plain_http.get(f"{url}/metrics", timeout=60).text
    found = re.findall(r"^disagg_request_moves_total\{(.*)\} (\S+)$", metrics, re.M)
    return sum(float(number) for labels, number in found if f'model_name="{model}"' in labels)


def assert_same_text(
    client: openai.OpenAI, model: str, reference: SingleEngine, prompt: str, temperature: float = 0
) -> None:
    """What is served is what one engine answers."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=temperature,
        seed=7,
        max_tokens=24,
    )
    expected = reference.chat(prompt, 24, temperature=temperature, seed=7)
    assert answer.choices[0].message.content == expected
