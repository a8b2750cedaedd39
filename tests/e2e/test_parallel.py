"""Workers of two ranks behind HTTP: their text is one engine's, also where the other pool has one.

One server has both ways: `out` prefills on one rank and decodes on two, `back` the other way
round. KV goes by NIXL from process to process. What needs no Ray is in `tests/test_local_ranks.py`,
such as two ranks in both pools and a start that fails.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
import yaml

from disagg.cli.ports import free_port
from tests import plain_http
from tests.e2e.command import Command, until
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import PROMPTS, streamed, streams_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SIZES = {"out": (1, 2), "back": (2, 1)}  # ranks of a prefill and of a decode worker


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    directory, port = tmp_path_factory.mktemp("parallel"), free_port()
    tiers = [
        {
            "model": str(model),
            "served_model_name": name,
            "prefill": {"num_replicas": 1, "tensor_parallel_size": num_prefill_ranks},
            "decode": {"num_replicas": 1, "tensor_parallel_size": num_decode_ranks},
            "engine": {"dtype": "float32", "num_threads": 1},
        }
        for name, (num_prefill_ranks, num_decode_ranks) in SIZES.items()
    ]
    config = {"tiers": tiers, "http": {"port": port}, "cold_tier_nbytes": 0}
    file = directory / "parallel.yaml"
    file.write_text(yaml.safe_dump(config))
    command = Command(f"--config {file}", directory, port=port)
    with command.killed_at_the_end():
        command.wait_ready()
        yield command


def ranks(server: Command, name: str, role: str) -> tuple[psutil.Process, psutil.Process]:
    """The two processes of the worker of a pool."""
    (first,) = server.named(f"{name}-{role}")
    (second,) = [each for each in first.children() if "disagg.worker.rank" in each.cmdline()]
    return first, second


def num_pulls(server: Command, name: str, outcome: str) -> float:
    text = plain_http.get(f"{server.url}/metrics").text
    found = re.findall(r"^disagg_worker_kv_pulls_total\{(.*)\} ([\d.e+]+)$", text, re.M)
    own = (f'model_name="{name}"', f'outcome="{outcome}"')
    return sum(float(number) for labels, number in found if all(word in labels for word in own))


@pytest.mark.parametrize("name", SIZES)
def test_text_is_one_engines(server: Command, reference: SingleEngine, name: str) -> None:
    """Asked until KV was pulled: a worker that measured slow first steps gets no prompt yet."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(prompt: str, temperature: float) -> None:
            answer = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": prompt}],
                temperature=temperature,
                seed=7,
                max_tokens=24,
            )
            expected = reference.chat(prompt, 24, temperature=temperature, seed=7)
            assert answer.choices[0].message.content == expected

        for prompt in PROMPTS:
            for temperature in (0.0, 1.0):
                ask(prompt, temperature)
        numbers = itertools.count()

        def pulled() -> bool:
            if num_pulls(server, name, "ok"):
                return True
            ask(f"{next(numbers)}: " + PROMPTS[-1], 0.0)
            return False

        until(pulled, why=lambda: "nothing was pulled")
    assert not num_pulls(server, name, "failed") + num_pulls(server, name, "torn")


@pytest.mark.parametrize(("name", "role"), [("out", "decode"), ("back", "prefill")])
async def test_no_stream_notices_that_a_rank_was_killed(
    server: Command, reference: SingleEngine, name: str, role: str
) -> None:
    """Its worker ends, and streams go on elsewhere. Last in this file: Serve starts another worker,
    which is not waited for."""
    expected = streams_of(reference)
    first, second = ranks(server, name, role)
    assert await streamed(server.url, name, second.kill) == expected
    until(lambda: not first.is_running(), why=lambda: f"{first} has outlived its rank")
