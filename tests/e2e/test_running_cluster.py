"""On a running cluster, which wants a token and has two GPUs (stood in for as in `gpus.py`).

`disagg serve --ray-address` is a guest that lets go of the cluster and cleans up.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from disagg.host import free_port
from tests import plain_http
from tests.e2e.command import Command, is_named, refusal_of, until
from tests.e2e.gpus import Opened, machine
from tests.e2e.ray_nodes import RayNodes, ray_nodes
from tests.e2e.single_engine import SingleEngine
from tests.e2e.test_lifecycle import takes_requests

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GUEST_PROMPT = "a prompt for a guest: "
GUEST_TOKENS = 16


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
    with ray_nodes(directory, (), num_gpus=2, environment={**machine(80, 80), **own}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def port() -> int:
    """Of the API: what Serve was started with holds for all that comes later."""
    return free_port()


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


def test_what_a_cluster_cannot_serve_is_refused_in_words(
    nodes: RayNodes, model: Path, token: Path, port: int, tmp_path: Path
) -> None:
    """Who has not its token, and who wants more GPUs or nodes than it has; the command itself is on
    a machine without a GPU. All at the same time."""
    own, wrong = {"RAY_AUTH_TOKEN_PATH": str(token)}, {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    over_nodes = "--prefill 0 --tensor-parallel-size 2 --nnodes 2"
    refusals: list[tuple[str, dict[str, str], str]] = [
        ("", {}, f"{nodes.address} requires a token"),
        ("", wrong, "does not accept the token in RAY_AUTH_TOKEN"),
        ("--prefill 2", own, "2 tiny-prefill, 1 tiny-decode need 3 GPUs, and the cluster has 2."),
        (over_nodes, own, "needs 2 nodes with 1 GPU each, and the cluster has 1 ("),
    ]
    begun = []
    for number, (flags, environment, words) in enumerate(refusals):
        (tmp_path / f"{number}").mkdir()
        arguments = f"{model} --ray-address {nodes.address} {flags}"
        command = Command(arguments, tmp_path / f"{number}", environment, port=port)
        begun.append((words, command))
    said = [(words, refusal_of(command)) for words, command in begun]
    assert [words in each for words, each in said] == [True] * len(said), said


def test_a_guest_leaves_serves_on_and_comes_back_to_clean_up(
    nodes: RayNodes,
    model: Path,
    reference: SingleEngine,
    directory: Path,
    token: Path,
    port: int,
    tmp_path: Path,
) -> None:
    flags = f"{model} --prefill 1 --decode 1 --dtype float32 --num-threads 1"
    own = {"RAY_AUTH_TOKEN_PATH": str(token)}
    command = Command(f"{flags} --ray-address {nodes.address}", tmp_path, own, port=port)
    try:
        command.wait_ready()
        assert "on 2 of 2 GPUs" in command.output()
        found = Opened(directory / "opened")
        assert [pool for pool, _ in found.gpus] == ["tiny-decode", "tiny-prefill"]
        assert sorted(gpu for _, gpu in found.gpus) == [0, 1]
        until(lambda: has_left(command, nodes), why=lambda: "it holds on to the cluster")
        assert list(applications(nodes)) == ["disagg"]
        own_home = tmp_path / "second"
        own_home.mkdir()
        second = f"{model} --ray-address {nodes.address}"
        said = refusal_of(Command(second, tmp_path, own))
        assert f"already runs on this cluster and listens on 127.0.0.1:{port}. Pass" in said
        said = refusal_of(Command(second, own_home, own, port=port))
        assert "already has an application named disagg (status RUNNING)" in said
        body = {
            "messages": [{"role": "user", "content": GUEST_PROMPT}],
            "temperature": 0,
            "max_tokens": GUEST_TOKENS,
        }
        answer = plain_http.post(f"{command.url}/v1/chat/completions", json=body).json()
        text = answer["choices"][0]["message"]["content"]
        assert text == reference.chat(GUEST_PROMPT, GUEST_TOKENS)
        replacing = f"{flags} --ray-address {nodes.address} --replace"
        interrupted_while_it_ends(command, Command(replacing, own_home, own, port=port))
        assert plain_http.post(f"{command.url}/v1/chat/completions", json=body).status_code == 200
    finally:
        command.process.send_signal(signal.SIGTERM)
        assert command.ended() == 0
    command.assert_only_own_lines()
    until(lambda: not applications(nodes), why=lambda: "it left its application behind")


def interrupted_while_it_ends(first: Command, second: Command) -> None:
    """Ctrl-C for a command that waits for the requests of another's application to finish."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    try:
        with socket.create_connection(("127.0.0.1", first.port)) as never_complete:
            never_complete.sendall(head + b"Content-Length: 99\r\n\r\n{")
            until(lambda: not takes_requests(first), why=second.output)
            second.process.send_signal(signal.SIGINT)
            assert second.ended() == 0
    finally:
        second.process.kill()
    assert second.events("kept_other"), second.output()
    until(lambda: takes_requests(first))


def test_weights_that_are_not_numbers(
    nodes: RayNodes, model: Path, token: Path, port: int, tmp_path: Path
) -> None:
    """Found only in the worker, when Ray runs already: the worker's words come out all the same."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    flags = f"{tmp_path} --prefill 0 --dtype float32 --num-threads 1"
    own = {"RAY_AUTH_TOKEN_PATH": str(token)}
    said = refusal_of(Command(f"{flags} --ray-address {nodes.address}", tmp_path, own, port=port))
    assert "model.norm.weight" in said and "NaN" in said
    until(lambda: not applications(nodes), why=lambda: "it left its application behind")


@pytest.mark.last(1)
def test_a_head_that_is_frozen(nodes: RayNodes, token: Path, tmp_path: Path) -> None:
    (head,) = [each for each in nodes.processes() if is_named(each, "gcs_server")]
    head.suspend()
    own = {"RAY_AUTH_TOKEN_PATH": str(token)}
    said = refusal_of(Command(f"demo-small --ray-address {nodes.address}", tmp_path, own))
    assert "did not answer within 5 s" in said
