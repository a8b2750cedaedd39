"""On a running cluster: `disagg serve --ray-address` is a guest that lets go of it and cleans up.

`serve deploy` scales down and updates the application at constant load, and nobody notices.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from disagg.cli.ports import free_port
from disagg.config import EngineConfig
from tests import plain_http
from tests.e2e.ray_nodes import RayNodes, ray_nodes, wait_until_ready
from tests.e2e.served import Served, served
from tests.e2e.single_engine import SingleEngine
from tests.faults.system import until
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_CLIENTS = 4
PAUSE_S = 0.1  # which leaves a processor to the processes that start meanwhile
MAX_TOKENS = 120
PROMPTS = [
    f"{i}: a prompt of several blocks that are pulled, whoever computes them " for i in "abc"
]
CHANGE_TIMEOUT_S = 240.0
GUEST_PROMPT = "a prompt for a guest: "
GUEST_TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> SingleEngine:
    return SingleEngine(model, EngineConfig(dtype="float32", num_threads=1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def nodes(directory: Path) -> Iterator[RayNodes]:
    with ray_nodes(directory, ()) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def port() -> int:
    """Of the API: what Serve was started with holds for all that comes later."""
    return free_port()


def is_guest(server: Served, nodes: RayNodes) -> bool:
    """Whether the cluster counts the command itself among those that use it."""
    jobs = plain_http.get(f"http://127.0.0.1:{nodes.dashboard_port}/api/jobs/", timeout=10).json()
    return any(
        job["status"] == "RUNNING" and str(server.process.pid) == str(job["driver_info"]["pid"])
        for job in jobs
        if job["driver_info"] is not None
    )


def applications(nodes: RayNodes) -> dict[str, object]:
    url = f"http://127.0.0.1:{nodes.dashboard_port}/api/serve/applications/"
    found: dict[str, object] = plain_http.get(url, timeout=10).json()["applications"]
    return found


def test_a_guest_leaves_serves_on_and_comes_back_to_clean_up(
    nodes: RayNodes, model: Path, reference: SingleEngine, directory: Path, port: int
) -> None:
    flags = ["--prefill", "1", "--decode", "1", "--dtype", "float32", "--num-threads", "1"]
    address = ["--ray-address", f"127.0.0.1:{nodes.gcs_port}"]
    environment = {"RAY_AUTH_MODE": "disabled"}
    with served([str(model), *flags, *address], directory, environment, port=port) as server:
        until(lambda: not is_guest(server, nodes), 120, lambda: "it holds on to the cluster")
        assert list(applications(nodes)) == ["disagg"]
        body = {
            "messages": [{"role": "user", "content": GUEST_PROMPT}],
            "temperature": 0,
            "max_tokens": GUEST_TOKENS,
        }
        answer = plain_http.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        text = answer["choices"][0]["message"]["content"]
        assert text == reference.chat(GUEST_PROMPT, GUEST_TOKENS)
    until(lambda: not applications(nodes), 120, lambda: "it left its application behind")


def application(model: Path, port: int) -> dict[str, Any]:
    tier = {
        "model": str(model),
        "served_model_name": "tiny",
        "engine": {"dtype": "float32", "num_threads": 1, "max_num_seqs": 16},
        "prefill": {"num_replicas": 1},
        "decode": {"num_replicas": 2},
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "disagg",
                "route_prefix": "/",
                "import_path": "disagg.app.build:build",
                "args": {
                    "cluster_key": "a key of this test",
                    "cold_tier_nbytes": 0,
                    "link_host": "127.0.0.1",
                    "drain_s": 20,
                    "tiers": [tier],
                },
            }
        ],
    }


class Load:
    """Clients that ask again and again, whole answers and streams in turn, and check each one."""

    def __init__(self, url: str, expected: dict[str, str]) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._url = url
        self._expected = expected
        self._stopping = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
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
        answer = await client.post("/v1/chat/completions", json=body(prompt))
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    async def _streamed(self, client: httpx.AsyncClient, prompt: str) -> str:
        text, is_done = "", False
        async with client.stream(
            "POST", "/v1/chat/completions", json={**body(prompt), "stream": True}
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


def body(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}


async def workers(url: str) -> set[str]:
    """The ids of all workers that the ingress routes to."""
    async with httpx.AsyncClient(timeout=30) as client:
        metrics = (await client.get(f"{url}/metrics")).text
    return set(re.findall(r'disagg_worker_kv_cache_usage_perc\{[^}]*worker_id="([^"]+)"', metrics))


async def changed(
    nodes: RayNodes, path: Path, config: dict[str, Any], url: str, is_so: Callable[[set[str]], bool]
) -> set[str]:
    """Deploy `config` and wait until the workers are as they should be."""
    await asyncio.to_thread(path.write_text, yaml.safe_dump(config))
    await asyncio.to_thread(nodes.deploy, path)
    deadline = time.monotonic() + CHANGE_TIMEOUT_S
    while True:
        now = await workers(url)
        if is_so(now):
            return now
        assert time.monotonic() < deadline, f"{now}\n{nodes.logs()}"
        await asyncio.sleep(0.5)


def with_decodes(config: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    """An override of Serve's, which starts and stops replicas and leaves the others alone."""
    scaled = copy.deepcopy(config)
    scaled["applications"][0]["deployments"] = [
        {"name": "tiny-decode", "num_replicas": num_replicas}
    ]
    return scaled


async def test_no_request_notices_a_change(
    nodes: RayNodes, model: Path, reference: SingleEngine, directory: Path, port: int
) -> None:
    expected = {prompt: reference.chat(prompt, MAX_TOKENS) for prompt in PROMPTS}
    url = f"http://127.0.0.1:{port}"
    path = directory / "serve.yaml"
    config = application(model, port)
    path.write_text(yaml.safe_dump(config))
    nodes.deploy(path)
    wait_until_ready(url, nodes)
    old = await changed(nodes, path, config, url, lambda now: len(now) == 3)
    async with Load(url, expected) as load:
        fewer = await changed(nodes, path, with_decodes(config, 1), url, lambda now: len(now) == 2)
        assert fewer < old, "scaling down restarted workers"
        num_before = load.num_answers
        updated = with_decodes(config, 1)
        updated["applications"][0]["args"]["tiers"][0]["engine"]["max_num_seqs"] = 8
        await changed(nodes, path, updated, url, lambda now: len(now) == 2 and not now & old)
        assert load.num_answers > num_before
    assert load.failures == []
