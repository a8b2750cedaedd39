"""A worker's death costs time and nothing else: the text is that of a single engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from disagg.config import EngineConfig
from tests.e2e.served import Served, served
from tests.e2e.single_engine import SingleEngine
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_STREAMS = 8
MAX_TOKENS = 200
# Who takes a stream over computes its KV in another order. In none of these answers do the two most
# likely tokens lie closer than 4e-4; with another text it was 1e-5, which rounding decides.
PROMPT = 2 * (
    "whoever reads stream {0} does not notice that a worker has died,"
    " for its text goes on as it was "
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> list[str]:
    engine = SingleEngine(model, EngineConfig(dtype="float32", num_threads=1))
    return [
        engine.chat(PROMPT.format(i), MAX_TOKENS, temperature=i % 2, seed=i)
        for i in range(NUM_STREAMS)
    ]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = "--served-model-name tiny --dtype float32 --num-threads 1 --prefill 1 --decode 2"
    with served([str(model), *flags.split()], tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_no_stream_notices(server: Served, reference: list[str], role: str) -> None:
    """Greedy and seeded streams go on elsewhere, from the token at which their worker died."""
    under_way = asyncio.Event()

    async def stream(client: openai.AsyncOpenAI, index: int) -> str:
        chunks = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPT.format(index)}],
            temperature=index % 2,
            seed=index,
            max_tokens=MAX_TOKENS,
            stream=True,
        )
        text = ""
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 8:
                under_way.set()
        return text

    victim = server.workers(role)[0]
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="-", max_retries=0
    ) as client:
        streams = [asyncio.create_task(stream(client, index)) for index in range(NUM_STREAMS)]
        await under_way.wait()
        victim.send_signal(signal.SIGKILL)
        assert await asyncio.gather(*streams) == reference
