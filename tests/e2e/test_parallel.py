"""A decode worker of two ranks with whole experts behind HTTP: text and ends are one engine's.

KV goes by NIXL from a prefill worker of one rank. The other way round, from two ranks of a dense
model to one, is in `test_serve.py`; pools of other sizes, and starts that fail, are in
`tests/test_local_ranks.py`.
"""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.command import DONE, Command, Streams, until, with_stand_in
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import (
    PROMPTS,
    assert_same_text,
    has_moved,
    streamed,
    streams_of,
    while_held,
)
from tests.e2e.test_serve import num_pulls, second_rank, until_pulled
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

LONG = 1500  # tokens of a stream that is to be under way when a signal arrives
HELD = "held"  # as `while_held` wants it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As that of the other tests, with three experts, and a context for long streams."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(directory, max_model_len=2048, has_experts=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def server(model: Path, home: Path) -> Iterator[Command]:
    flags = "--served-model-name tiny --dtype float32 --num-threads 1 --no-redis"
    pools = "--prefill 1 --decode 1 --decode-tensor-parallel-size 2 --enable-expert-parallel"
    environment = {
        "PYTHONPATH": with_stand_in(),
        "DISAGG_TEST_HAND_OVER": "300",
        "DISAGG_TEST_HELD": f"{home / HELD}",
    }
    command = Command(f"{model} {flags} {pools}", home, environment)
    with command.killed_at_the_end():
        command.wait_ready()
        yield command


def test_text_is_one_engines(server: Command, reference: SingleEngine) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        ask = functools.partial(assert_same_text, client, "tiny", reference)
        for prompt, temperature in itertools.product(PROMPTS, (0.0, 1.0)):
            ask(prompt, temperature)
        numbers = itertools.count()
        until_pulled(server, lambda: ask(f"{next(numbers)}: " + PROMPTS[-1]))
    assert not num_pulls(server, "failed") + num_pulls(server, "torn")


async def test_no_stream_notices_that_a_rank_was_killed(
    server: Command, reference: SingleEngine, home: Path
) -> None:
    """Its worker ends with it, and streams go on elsewhere. Serve starts another worker, which is
    not waited for."""
    expected = streams_of(reference)
    (worker,) = server.named("tiny-decode")
    kill = while_held(home / HELD, second_rank(worker).kill)
    assert await streamed(server.url, "tiny", kill) == expected
    assert has_moved(server.url)
    until(lambda: not worker.is_running(), why=lambda: f"{worker} has outlived its rank")


def test_sigterm_lets_streams_end(server: Command) -> None:
    """Last in this file: the status is 0, and no process of a rank is left."""
    streams = Streams(server.url, [LONG] * 4, "tiny")
    server.process.send_signal(signal.SIGTERM)
    assert streams.wait() == [DONE] * 4
    assert server.ended() == 0
    (line,) = server.events("drained")
    assert line["num_ended"] > 0, "all streams ended before the signal arrived"
    server.assert_nothing_left()
