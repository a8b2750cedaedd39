"""The whole system as users start it, once for all tests here: Ray, HAProxy, Redis, NIXL, HTTP.

Two ingresses. A dense model with LoRA adapters, one of whose layers has a window: a prefill worker
of two ranks, two decode workers. A model with experts: a prefill worker, and a decode worker of two
ranks with whole experts. What is served is what one engine answers; with an adapter, one engine
with the merged model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import openai
import pytest

from disagg.config import EngineConfig
from disagg.host import free_port
from tests.e2e.command import Command
from tests.e2e.served.operate import ADAPTERS, UNLUCKY_SEED, WINDOW
from tests.e2e.single_engine import SingleEngine
from tests.otlp_collector import OtlpCollector
from tests.tiny_model import write_tiny_adapters, write_tiny_model

ENGINE = {"dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directories of both models, of adapters, and of the models with adapters merged."""
    place = write_tiny_adapters(tmp_path_factory.mktemp("models"), ADAPTERS, window=WINDOW)
    write_tiny_model(place / "experts", has_experts=True)
    return place


@pytest.fixture(scope="package")
def engines(place: Path) -> Mapping[str, SingleEngine]:
    """By the name of a model or an adapter."""
    merged = {name: place / f"merged-{name}" for name in ADAPTERS}
    directories = {"tiny": place / "tiny", "experts": place / "experts", **merged}
    config = EngineConfig(dtype="float32", num_threads=1)
    return {name: SingleEngine(each, config) for name, each in directories.items()}


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="package")
def server(place: Path, home: Path, collector: OtlpCollector) -> Iterator[Command]:
    port = free_port()
    config = {
        "http": {"port": port},
        "num_ingress": 2,
        "tiers": [
            {
                "model": str(place / "tiny"),
                "engine": {**ENGINE, "enable_lora": True, "max_loras": 2},
                "lora_modules": {name: str(place / name) for name in ("red", "green")},
                "prefill": {"tensor_parallel_size": 2},
                "decode": {"num_replicas": 2},
            },
            {
                "model": str(place / "experts"),
                "engine": {**ENGINE, "enable_expert_parallel": True},
                "decode": {"tensor_parallel_size": 2},
            },
        ],
    }
    file = home / "serve.yaml"
    file.write_text(json.dumps(config))
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "DISAGG_TEST_HAND_OVER": "300",  # the prompts that are to be pulled
        "DISAGG_TEST_HELD": str(home / "held"),
        "DISAGG_TEST_UNLUCKY_SEED": f"{UNLUCKY_SEED}",
    }
    command = Command(f"--config {file}", home, environment, port=port)
    with command.killed_at_the_end():
        command.wait_ready()
        yield command


@pytest.fixture
def client(server: Command) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
