"""On a running cluster, which wants a token and has two GPUs (stood in for as in `test_gpus.py`).

`disagg serve --ray-address` is a guest that lets go of the cluster and cleans up. `serve deploy`
scales down and updates the application at constant load, and nobody notices.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from safetensors.torch import load_file, save_file

from disagg.cli.ports import free_port
from tests import plain_http
from tests.e2e.command import Command, is_named, refusal_of, until
from tests.e2e.ray_nodes import RayNodes, ray_nodes, wait_until_ready
from tests.e2e.single_engine import SingleEngine
from tests.e2e.test_bad_start import refusal
from tests.e2e.test_gpus import Opened, machine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_CLIENTS = 2
PAUSE_S = 0.1  # which leaves a processor to the processes that start meanwhile
MAX_TOKENS = 120
PROMPTS = [
    f"{i}: a prompt of several blocks that are pulled, whoever computes them " for i in "abc"
]
CHANGE_TIMEOUT_S = 240.0
GUEST_PROMPT = "a prompt for a guest: "
GUEST_TOKENS = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def token(directory: Path) -> Path:
    """A file with the cluster's token."""
    file = directory / "auth_token"
    file.write_text(secrets.token_hex(32))
    return file


@pytest.fixture(scope="module")
def nodes(directory: Path, token: Path) -> Iterator[RayNodes]:
    """With two GPUs, which Ray is told to hide from nobody."""
    (directory / "opened").mkdir()
    own = {
        "DISAGG_TEST_OPENED": str(directory / "opened"),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token.read_text(),
    }
    with ray_nodes(directory, (), num_gpus=2, environment=machine(80, 80, **own)) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def port() -> int:
    """Of the API: what Serve was started with holds for all that comes later."""
    return free_port()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def of_cluster(nodes: RayNodes, path: str) -> Any:
    """What its dashboard says."""
    url = f"http://127.0.0.1:{nodes.dashboard_port}/api/{path}/"
    return plain_http.get(url, timeout=60, headers=nodes.headers).json()


def has_left(command: Command, nodes: RayNodes) -> bool:
    """Whether the cluster counts the command no more among those that use it."""
    own = {str(each.pid) for each in command.family()}
    jobs = [each for each in of_cluster(nodes, "jobs") if each["driver_info"] is not None]
    states = [each["status"] for each in jobs if str(each["driver_info"]["pid"]) in own]
    assert states, "it never was a guest"
    return "RUNNING" not in states


def applications(nodes: RayNodes) -> dict[str, object]:
    found: dict[str, object] = of_cluster(nodes, "serve/applications")["applications"]
    return found


def test_a_cluster_that_wants_a_token(nodes: RayNodes, home: Path) -> None:
    arguments = f"demo-small --ray-address {nodes.address}"
    said = refusal_of(Command(arguments, home))
    assert f"{nodes.address} wants its token" in said and "RAY_AUTH_TOKEN" in said
    wrong = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    said = refusal_of(Command(arguments, home, wrong))
    assert "does not take the token in RAY_AUTH_TOKEN" in said


def test_fewer_gpus_than_workers_are_refused(nodes: RayNodes, model: Path, token: Path) -> None:
    """The command itself is on a machine without one."""
    flags = ["--ray-address", nodes.address, "--prefill", "2"]
    said = refusal(str(model), *flags, environment={"RAY_AUTH_TOKEN_PATH": str(token)})
    assert "2 tiny-prefill, 1 tiny-decode need 3 GPUs, and the cluster has 2." in said


def test_a_guest_leaves_serves_on_and_comes_back_to_clean_up(
    nodes: RayNodes,
    model: Path,
    reference: SingleEngine,
    directory: Path,
    token: Path,
    port: int,
    home: Path,
) -> None:
    flags = f"{model} --prefill 1 --decode 1 --dtype float32 --num-threads 1"
    own = {"RAY_AUTH_TOKEN_PATH": str(token)}
    command = Command(f"{flags} --ray-address {nodes.address}", home, own, port=port)
    try:
        command.wait_ready()
        assert "on 2 of 2 GPUs" in command.output()
        found = Opened(directory / "opened")
        assert [pool for pool, _ in found.gpus] == ["tiny-decode", "tiny-prefill"]
        assert sorted(gpu for _, gpu in found.gpus) == [0, 1]
        until(lambda: has_left(command, nodes), why=lambda: "it holds on to the cluster")
        assert list(applications(nodes)) == ["disagg"]
        body = {
            "messages": [{"role": "user", "content": GUEST_PROMPT}],
            "temperature": 0,
            "max_tokens": GUEST_TOKENS,
        }
        answer = plain_http.post(f"{command.url}/v1/chat/completions", json=body).json()
        text = answer["choices"][0]["message"]["content"]
        assert text == reference.chat(GUEST_PROMPT, GUEST_TOKENS)
        command.process.send_signal(signal.SIGTERM)
    finally:
        assert command.ended() == 0
    command.assert_only_own_lines()
    until(lambda: not applications(nodes), why=lambda: "it left its application behind")


def test_weights_that_are_not_numbers(
    nodes: RayNodes, model: Path, token: Path, tmp_path: Path
) -> None:
    """Found only in the worker, when Ray runs already: the worker's words come out all the same."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    flags = ["--prefill", "0", "--dtype", "float32", "--num-threads", "1"]
    said = refusal(
        str(tmp_path),
        *flags,
        *("--ray-address", nodes.address),
        environment={"RAY_AUTH_TOKEN_PATH": str(token)},
    )
    assert "model.norm.weight" in said and "NaN" in said
    until(lambda: not applications(nodes), why=lambda: "it left its application behind")


def application(model: Path, port: int) -> dict[str, Any]:
    tier = {
        "model": str(model),
        "served_model_name": "tiny",
        "engine": {"dtype": "float32", "num_threads": 1, "max_num_seqs": 16},
        "prefill": {"num_replicas": 1, "num_gpus": 0},
        "decode": {"num_replicas": 2, "num_gpus": 0},
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
    return await workers_that_are(nodes, url, is_so)


async def workers_that_are(
    nodes: RayNodes, url: str, is_so: Callable[[set[str]], bool]
) -> set[str]:
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
    old = await workers_that_are(nodes, url, lambda now: len(now) == 3)
    async with Load(url, expected) as load:
        fewer = await changed(nodes, path, with_decodes(config, 1), url, lambda now: len(now) == 2)
        assert fewer < old, "scaling down restarted workers"
        num_before = load.num_answers
        updated = with_decodes(config, 1)
        updated["applications"][0]["args"]["tiers"][0]["engine"]["max_num_seqs"] = 8
        await changed(nodes, path, updated, url, lambda now: len(now) == 2 and not now & old)
        assert load.num_answers > num_before
    assert load.failures == []


def test_a_head_that_is_frozen(nodes: RayNodes, token: Path, home: Path) -> None:
    """Last of those with this cluster."""
    (head,) = [each for each in nodes.processes() if is_named(each, "gcs_server")]
    head.suspend()
    own = {"RAY_AUTH_TOKEN_PATH": str(token)}
    said = refusal_of(Command(f"demo-small --ray-address {nodes.address}", home, own))
    assert "does not answer within 5 s" in said
