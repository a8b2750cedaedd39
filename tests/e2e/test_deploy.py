"""`serve deploy` of the YAML in deploy/ on a Ray cluster of three nodes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from disagg.cli.ports import free_port
from disagg.config import EngineConfig, parse_config
from tests.e2e.single_engine import SingleEngine
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

DEPLOY = Path(__file__).parent.parent.parent / "deploy" / "serve"
BIN = Path(sys.executable).parent
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 2.0  # Ray's own processes wait for each other, some of them for ever


class RayNodes:
    """Ray nodes on this machine, each a tree of processes with files of its own."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self.gcs_port, self.dashboard_port = free_port(), free_port()
        self._environment = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",  # as `disagg serve` does
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start_head(self, num_gpus: int = 0) -> None:
        self._start(
            "--head",
            f"--num-gpus={num_gpus}",
            f"--port={self.gcs_port}",
            f"--dashboard-port={self.dashboard_port}",
            f"--temp-dir={self._directory}",
            "--num-cpus=1",
        )

    def start_node(self, resources: str) -> None:
        self._start(
            f"--address=127.0.0.1:{self.gcs_port}", "--num-cpus=1", f"--resources={resources}"
        )

    def _start(self, *flags: str) -> None:
        log = (self._directory / f"node-{len(self._nodes)}.log").open("wb")
        with log:
            node = subprocess.Popen(
                [BIN / "ray", "start", "--block", "--node-ip-address=127.0.0.1", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        self._nodes.append(node)
        self._wait_for_nodes(len(self._nodes))

    def _wait_for_nodes(self, num_nodes: int) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        url = f"http://127.0.0.1:{self.dashboard_port}/api/cluster_status"
        while time.monotonic() < deadline:
            assert all(node.poll() is None for node in self._nodes), self.logs()
            try:
                report = httpx.get(url, timeout=5).json()["data"]["clusterStatus"]
                if len(report["loadMetricsReport"]["usageByNode"]) >= num_nodes:
                    return
            except (httpx.HTTPError, KeyError, TypeError, ValueError):
                pass
            time.sleep(0.3)
        raise AssertionError(self.logs())

    def deploy(self, config: Path) -> None:
        address = f"http://127.0.0.1:{self.dashboard_port}"
        done = subprocess.run(
            [BIN / "serve", "deploy", config, "-a", address],
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self._directory.glob("node-*.log")))

    def stop(self) -> None:
        family = [
            process
            for node in self._nodes
            if node.poll() is None
            for process in [
                psutil.Process(node.pid),
                *psutil.Process(node.pid).children(recursive=True),
            ]
        ]
        for process in family:
            with suppress(psutil.NoSuchProcess):  # they end each other meanwhile
                process.terminate()
        _, left = psutil.wait_procs(family, STOP_TIMEOUT_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for node in self._nodes:
            node.wait(10)


@contextmanager
def ray_nodes(
    directory: Path,
    resources: tuple[str, ...],
    num_gpus: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RayNodes]:
    """A head with so many GPUs, and a node with each of `resources`."""
    nodes = RayNodes(directory, environment)
    try:
        nodes.start_head(num_gpus)
        for each in resources:
            nodes.start_node(json.dumps({each: 8}))
        yield nodes
    finally:
        nodes.stop()


def adapted(name: str, model: Path, port: int) -> dict[str, Any]:
    """A file of deploy/serve for this machine: a tiny model, no GPUs, no Redis, its own port."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["proxy_location"] = "HeadOnly"  # three nodes share one address here
    arguments = config["applications"][0]["args"]
    arguments.update(redis_url=None, link_host="127.0.0.1", drain_s=1)
    del arguments["tenants"]  # limits over several ingresses need Redis
    del arguments["http"]["api_keys"]
    for tier in arguments["tiers"]:
        tier["model"] = str(model)
        tier["engine"] = {"dtype": "float32", "num_threads": 1}
        for pool in ("prefill", "decode"):
            tier[pool].update(num_gpus=0, num_replicas=1)
    return config


def wait_until_ready(url: str, nodes: RayNodes) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    last = ""
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/ready", timeout=5)
            last = answer.text
            pools = answer.json()["pools"].values() if answer.status_code == 200 else ()
            if pools and all(pool["num_prefill"] and pool["num_decode"] for pool in pools):
                return
        except (httpx.HTTPError, ValueError) as error:
            last = str(error)
        time.sleep(0.5)
    raise AssertionError(f"not ready: {last}\n{nodes.logs()}")


def decision_of(url: str, request_id: str) -> str:
    """How a request was routed: known to the one of several ingresses that served it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # until the proxy happens to ask that one
        answer = httpx.get(f"{url}/debug/requests/{request_id}", timeout=30)
        if answer.status_code == 200:
            return answer.text
        time.sleep(0.05)
    raise AssertionError(answer.text)


@pytest.mark.parametrize("name", ["laptop.yaml", "npmd.yaml"])
def test_files_in_deploy_are_valid(name: str) -> None:
    config = yaml.safe_load((DEPLOY / name).read_text())
    parse_config(config["applications"][0]["args"])


def test_the_cluster_file_is_valid() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((DEPLOY.parent / "ray" / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    node_types = config["available_node_types"]
    assert node_types["head"]["resources"] == {"CPU": 0}
    assert all(node_types[role]["resources"]["GPU"] for role in ("prefill", "decode"))


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_commands_of_the_cluster_file_start_ray(kind: str) -> None:
    """Ray's own parser takes them, and the head keeps its tables where its successor finds them."""
    from ray.scripts.scripts import start

    config = yaml.safe_load((DEPLOY.parent / "ray" / "cluster.yaml").read_text())
    exports, _, command = config[f"{kind}_start_ray_commands"][-1].partition(";")
    variables = dict(each.split("=") for each in shlex.split(exports)[1:])
    assert ("RAY_REDIS_ADDRESS" in variables) == (kind == "head")  # workers ask the head
    assert float(variables["RAY_gcs_rpc_server_reconnect_timeout_s"]) > 60
    arguments = shlex.split(command)
    assert arguments[:2] == ["ray", "start"]
    parsed = start.make_context("start", arguments[2:]).params
    assert parsed["head"] == (kind == "head")
    assert bool(parsed["redis_password"]) == (kind == "head")


def test_tiers_on_three_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    reference = SingleEngine(model, EngineConfig(dtype="float32", num_threads=1))
    directory = tmp_path_factory.mktemp("ray")
    port = free_port()
    config = directory / "serve.yaml"
    config.write_text(yaml.safe_dump(adapted("npmd.yaml", model, port)))
    with ray_nodes(directory, ("prefill", "decode")) as nodes:
        nodes.deploy(config)
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, nodes)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert {model.id for model in client.models.list()} == {"small", "large", "auto"}
            for tier in ("small", "large"):
                prompt = f"a long prompt for {tier}, so that it is handed over: " * 5
                answer = client.chat.completions.create(
                    model=tier,
                    messages=[{"role": "user", "content": prompt}],
                    temperature=0,
                    max_tokens=16,
                )
                assert answer.choices[0].message.content == reference.chat(prompt, 16)
                assert f'"prefill":"{tier}-prefill' in decision_of(url, answer.id)
