"""LoRA adapters behind HTTP, with prefill and decode apart: text is that of the merged models.

KV goes by NIXL. Adapters are used from the start, loaded, replaced and unloaded while the server
runs, through two ingresses.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from disagg.config import EngineConfig
from tests.e2e.command import Command, with_stand_in
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import PROMPTS, assert_same_text
from tests.e2e.test_serve import num_pulls, until_pulled
from tests.tiny_model import write_tiny_adapters

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_adapters(tmp_path_factory.mktemp("adapters"), NAMES)


@pytest.fixture(scope="module")
def server(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    flags = "--served-model-name tiny --dtype float32 --num-threads 1 --no-redis --ingress 2"
    modules = f"--lora-modules red={place / 'red'} green={place / 'green'}"
    home = tmp_path_factory.mktemp("lora")
    environment = {"PYTHONPATH": with_stand_in(), "DISAGG_TEST_HAND_OVER": "300"}
    arguments = f"{place / 'tiny'} {flags} --enable-lora --max-loras 2 {modules}"
    command = Command(arguments, home, environment)
    with command.killed_at_the_end():
        command.wait_ready()
        yield command


@pytest.fixture(scope="module")
def engines(place: Path) -> dict[str, SingleEngine]:
    config = EngineConfig(dtype="float32", num_threads=1)
    merged = {name: SingleEngine(place / f"merged-{name}", config) for name in NAMES}
    return {"tiny": SingleEngine(place / "tiny", config), **merged}


def test_adapters_answer_as_merged_models(
    server: Command, engines: dict[str, SingleEngine]
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        listed = {model.id for model in client.models.list()}
        assert listed == {"tiny", "red", "green"}
        numbers = itertools.count()
        for model in ("red", "tiny", "green"):
            ask = functools.partial(assert_same_text, client, model, engines[model])
            for prompt, temperature in itertools.product(PROMPTS, (0.0, 1.0)):
                ask(prompt, temperature)
            until_pulled(server, functools.partial(_ask_new, ask, numbers))
    assert not num_pulls(server, "failed") + num_pulls(server, "torn")


def _ask_new(ask: Callable[[str], object], numbers: Iterator[int]) -> None:
    """Ask what nobody has asked, so that its prompt is computed elsewhere."""
    ask(f"{next(numbers)}: " + PROMPTS[-1])


def test_adapters_are_loaded_replaced_and_unloaded(
    server: Command, engines: dict[str, SingleEngine], place: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(place / "blue", tmp_path / "mine")
    of_it = {"lora_name": "mine", "lora_path": str(path)}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        httpx.Client(base_url=server.url, timeout=60) as raw,
    ):
        loaded = raw.post("/v1/load_lora_adapter", json=of_it)
        assert loaded.status_code == 200, loaded.text
        for _ in range(4):  # by either ingress
            assert_same_text(client, "mine", engines["blue"], PROMPTS[-1], 0.0)
        shutil.copytree(place / "red", path, dirs_exist_ok=True)
        again = raw.post("/v1/load_lora_adapter", json={**of_it, "load_inplace": True})
        assert again.status_code == 200, again.text
        for _ in range(4):
            assert_same_text(client, "mine", engines["red"], PROMPTS[-1], 0.0)
        gone = raw.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert gone.status_code == 200, gone.text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="mine", prompt="x", max_tokens=1)
        refused = raw.post("/v1/load_lora_adapter", json={**of_it, "lora_path": str(tmp_path)})
        assert refused.status_code == 400 and "is no LoRA adapter" in refused.text
