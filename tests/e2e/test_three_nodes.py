"""A Ray cluster of three nodes: `disagg doctor` looks at it, then a YAML of deploy/ is served.

It is started as docs/install.md#two-machines says: with a token and our HAProxy. `serve deploy`
scales down and updates the application at constant load, then a node is drained, and nobody
notices. Then the ranks of a worker are on the other two nodes.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import openai
import psutil
import pytest
import yaml

from disagg.app.haproxy import haproxy_environment
from disagg.cli.main import main
from disagg.config import HttpConfig
from disagg.host import free_port
from disagg.tools.doctor.report import DoctorReport
from tests import plain_http
from tests.e2e.command import is_named, until
from tests.e2e.load import MAX_TOKENS, PROMPTS, Load
from tests.e2e.ray_nodes import RayNodes, ray_nodes, wait_until_ready
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import PROMPTS as STREAMED_PROMPTS
from tests.e2e.streams import assert_same_text, num_moves, streamed, streams_of, while_held

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

CHANGE_TIMEOUT_S = 240.0
DEPLOY = Path(__file__).parent.parent.parent / "deploy" / "serve"


@pytest.fixture(scope="module")
def environment(directory: Path) -> Iterator[dict[str, str]]:
    launcher = directory / "disagg-haproxy"  # as the package installs it
    words = "from disagg.app.haproxy_launcher import main_on_a_node as main; main()"
    launcher.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{words}' \"$@\"\n")
    launcher.chmod(0o700)
    # The paths of its sockets have 97 characters at most.
    with tempfile.TemporaryDirectory(prefix="h-", dir="/tmp") as short:
        yield {
            **haproxy_environment(Path(short), HttpConfig()),
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "DISAGG_TEST_HELD": f"{short}/held",
        }


@pytest.fixture(scope="module")
def nodes(directory: Path, environment: dict[str, str]) -> Iterator[RayNodes]:
    with ray_nodes(directory, ("prefill", "decode"), environment=environment) as nodes:
        yield nodes


def doctor(nodes: RayNodes, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    words = ["doctor", "--json", "--ray-address", f"127.0.0.1:{nodes.gcs_port}"]
    return subprocess.run(
        [sys.executable, "-m", "disagg.cli.main", *words],
        env={**os.environ, "HOME": "/nonexistent", **environment},
        capture_output=True,
    )


def test_who_has_no_token_is_not_let_in(nodes: RayNodes) -> None:
    done = doctor(nodes, {})
    assert done.returncode == 2 and b"requires a token" in done.stderr
    report = plain_http.get(f"http://127.0.0.1:{nodes.dashboard_port}/api/cluster_status")
    assert report.status_code == 401


def test_the_doctor_sees_every_node_and_every_pair(
    nodes: RayNodes, environment: dict[str, str]
) -> None:
    done = doctor(nodes, environment)
    report = msgspec.json.decode(done.stdout, type=DoctorReport)
    wrong = [each for each in report.findings() if each.status == "wrong"]
    assert done.returncode == 0, (wrong, done.stderr)
    assert len({node.name for node in report.nodes}) == 3
    for node in report.nodes:
        assert {"open files", "clock", "software"} <= {each.check for each in node.findings}
    between = [each for each in report.transfers if each.is_between_nodes]
    assert len({(each.source, each.reader) for each in between}) == 6
    assert len(report.transfers) == 6 + 2 * 3
    assert all(each.lane and each.bytes_per_s for each in report.transfers)


def test_the_doctor_finds_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ray-address", "127.0.0.1:1"]) == 2
    assert "No Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err


def adapted(name: str, model: Path, port: int) -> dict[str, Any]:
    """A file of deploy/serve for this machine: a tiny model, no GPUs, no Redis, its own port."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["proxy_location"] = "HeadOnly"  # three nodes share one address here
    arguments = config["applications"][0]["args"]
    arguments.update(
        cluster_key="a key of this test", redis_url=None, link_host="127.0.0.1", drain_s=20
    )
    del arguments["tenants"]  # limits over several ingresses need Redis
    del arguments["http"]["api_keys"]
    for tier in arguments["tiers"]:
        tier["model"] = str(model)
        tier["engine"] = {"dtype": "float32", "num_threads": 1}
        for pool in ("prefill", "decode"):
            tier[pool].update(num_gpus=0, num_replicas=1)
    arguments["tiers"][0]["decode"]["num_replicas"] = 2
    return config


# Of Serve's server in a replica, and of the one that every process of Ray has.
CALLS = ("/ray.serve.ASGIService/HandleRequest", "/ray.rpc.CoreWorkerService/PushTask")


def answers_of_grpc(address: tuple[str, int], token: str) -> set[str]:
    """What is said to `CALLS` with that token; empty: no gRPC is spoken there."""
    answers = set()
    host = "127.0.0.1" if address[0] in ("::", "0.0.0.0") else address[0].removeprefix("::ffff:")
    options = [("grpc.enable_http_proxy", 0)]  # it is on this machine
    with grpc.insecure_channel(f"{host}:{address[1]}", options) as channel:
        for name in CALLS:
            call = channel.unary_unary(name)
            try:
                call(b"", metadata=[("authorization", f"Bearer {token}")], timeout=5)
            except grpc.RpcError as error:
                answers.add(error.code().name)
            else:
                answers.add("OK")
    return answers - {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


def check_strangers(nodes: RayNodes, environment: dict[str, str]) -> None:
    """Replicas unpickle for holders of the token alone, and HAProxy has the limits of disagg."""
    num_replicas = 0
    for process in nodes.processes():
        if not is_named(process, "ServeReplica"):
            continue
        num_replicas += 1
        addresses = {
            each.laddr
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }
        for _ in range(3):  # a busy process may be silent for once
            found = {str(each): answers_of_grpc(each, "") for each in addresses}
            answers = [each for each in found.values() if each]
            if len(answers) == len(CALLS):
                break
        assert len(answers) == len(CALLS), (process.name(), found)
        assert all(each == {"UNAUTHENTICATED", "UNIMPLEMENTED"} for each in answers), found
    assert num_replicas == 2 + 3 + 2  # ingresses, and the workers of two tiers
    haproxy = Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
    (config,) = haproxy.glob("*/haproxy.cfg")
    # Serve writes it anew for each change, and then starts an HAProxy, which mends it.
    until(lambda: "timeout http-request 10s" in config.read_text(), timeout_s=120)


def decision_of(url: str, request_id: str) -> str:
    """How a request was routed: known to the one of several ingresses that served it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # until the proxy happens to ask that one
        answer = plain_http.get(f"{url}/debug/requests/{request_id}", timeout=30)
        if answer.status_code == 200:
            return answer.text
        time.sleep(0.05)
    raise AssertionError(answer.text)


@pytest.fixture(scope="module")
def deployed(nodes: RayNodes, directory: Path, model: Path) -> tuple[dict[str, Any], Path, str]:
    """The application's configuration, its file, and where it answers."""
    port = free_port()
    config, path, url = (
        adapted("npmd.yaml", model, port),
        directory / "serve.yaml",
        f"http://127.0.0.1:{port}",
    )
    path.write_text(yaml.safe_dump(config))
    nodes.deploy(path)
    wait_until_ready(url, nodes)
    return config, path, url


def test_tiers_on_three_nodes(
    nodes: RayNodes,
    environment: dict[str, str],
    deployed: tuple[dict[str, Any], Path, str],
    reference: SingleEngine,
) -> None:
    _, _, url = deployed
    check_strangers(nodes, environment)
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


def workers(url: str) -> set[str]:
    """The ids of all workers that an ingress routes to."""
    metrics = plain_http.get(f"{url}/metrics", timeout=60).text
    return set(re.findall(r'disagg_worker_kv_cache_usage_perc\{[^}]*worker_id="([^"]+)"', metrics))


def replicas(nodes: RayNodes, words: str = "ServeReplica:disagg") -> set[psutil.Process]:
    """The processes of ingresses and workers, or of those with these words in their title."""
    return {each for each in nodes.processes() if is_named(each, words)}


def with_decodes(config: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    """An override of Serve's, which starts and stops replicas and leaves the others alone."""
    scaled = copy.deepcopy(config)
    scaled["applications"][0]["deployments"] = [
        {"name": "small-decode", "num_replicas": num_replicas}
    ]
    return scaled


def updated(config: dict[str, Any]) -> dict[str, Any]:
    """One tier less, and other settings of the one that stays, whose workers may run anywhere."""
    new = copy.deepcopy(config)
    arguments = new["applications"][0]["args"]
    del arguments["cascade"], arguments["tiers"][1:]
    (tier,) = arguments["tiers"]
    tier["engine"]["max_num_seqs"] = 8
    for pool in ("prefill", "decode"):
        tier[pool]["resources"] = {}
    return new


def replicas_of(nodes: RayNodes, number: int) -> list[psutil.Process]:
    return [each for each in nodes.processes_of(number) if is_named(each, "ServeReplica:disagg")]


async def changed(
    nodes: RayNodes, path: Path, config: dict[str, Any], is_so: Callable[[], bool]
) -> None:
    """Deploy `config` and wait until it is so."""
    await asyncio.to_thread(path.write_text, yaml.safe_dump(config))
    await asyncio.to_thread(nodes.deploy, path)
    deadline = time.monotonic() + CHANGE_TIMEOUT_S
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < deadline, nodes.logs()
        await asyncio.sleep(0.5)


@pytest.mark.last(1)
async def test_no_request_notices_a_change(
    nodes: RayNodes, deployed: tuple[dict[str, Any], Path, str], reference: SingleEngine
) -> None:
    config, path, url = deployed
    expected = {prompt: reference.chat(prompt, MAX_TOKENS) for prompt in PROMPTS}
    until(lambda: len(workers(url)) == 3 + 2)
    old, old_processes = workers(url), replicas(nodes)
    assert len(old_processes) == 2 + 3 + 2  # ingresses, and the workers of two tiers
    async with Load(url, "small", expected) as load:
        scaled = with_decodes(config, 1)
        await changed(nodes, path, scaled, lambda: len(workers(url)) == 2 + 2)
        assert workers(url) < old, "scaling down restarted workers"
        num_before = load.num_answers

        def is_new() -> bool:
            now = workers(url)
            return len(now) == 2 and not now & old and not replicas(nodes) & old_processes

        await changed(nodes, path, updated(scaled), is_new)
        assert load.num_answers > num_before
        drained = max((1, 2), key=lambda number: len(replicas_of(nodes, number)))  # not the head
        assert replicas_of(nodes, drained), "nobody would notice that this node is drained"
        await asyncio.to_thread(nodes.drain, drained)
        await asyncio.to_thread(until, lambda: not replicas_of(nodes, drained), CHANGE_TIMEOUT_S)
    assert load.failures == []
    assert len(replicas(nodes, "disagg:Ingress")) == 2


def over_nodes(config: dict[str, Any]) -> dict[str, Any]:
    """Its decode worker has two ranks, each on a node of its own."""
    new = updated(config)
    (tier,) = new["applications"][0]["args"]["tiers"]
    tier["engine"]["num_threads"] = 1
    tier["decode"].update(num_replicas=1, tensor_parallel_size=2, nnodes=2)
    return new


@pytest.mark.last(2)
async def test_a_worker_over_two_nodes(
    nodes: RayNodes,
    environment: dict[str, str],
    deployed: tuple[dict[str, Any], Path, str],
    reference: SingleEngine,
) -> None:
    """Its text is one engine's, and it ends with the rank of the other node. Serve starts another
    one, which is not waited for."""
    config, path, url = deployed
    old = workers(url)
    new = over_nodes(config)
    await changed(nodes, path, new, lambda: len(workers(url) - old) == 2 == len(workers(url)))
    (rank,) = replicas(nodes, "RankActor.run")
    decodes = replicas(nodes, "small-decode")
    first = max(decodes, key=psutil.Process.create_time)  # older ones may still drain
    assert rank.ppid() != first.ppid()  # those of two nodes of Ray
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for prompt, temperature in itertools.product(STREAMED_PROMPTS, (0.0, 1.0)):
            assert_same_text(client, "small", reference, prompt, temperature)
    assert not num_moves(url, "small")
    expected = streams_of(reference)
    kill = while_held(Path(environment["DISAGG_TEST_HELD"]), rank.kill)
    assert await streamed(url, "small", kill) == expected
    until(lambda: num_moves(url, "small"))
