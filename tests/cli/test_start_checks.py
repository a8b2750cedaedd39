"""A machine on which Ray would fail late is refused at once, in numbers."""

from __future__ import annotations

import argparse
import math
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from disagg.cli import start_checks
from disagg.cli.main import at_fault
from disagg.cli.reports import Order
from disagg.config import HttpConfig
from disagg.config_checks import parse_config
from disagg.errors import NotEnoughMemory, StartupError
from disagg.host import free_port
from disagg.ingress.core import IngressCore
from tests.tiny_model import write_tiny_model


class Usage(NamedTuple):
    free: int


@pytest.mark.parametrize(
    ("full", "words"),
    [("/dev/shm", "/dev/shm has only 3 MiB left"), ("/tmp", "/tmp has only 3 MiB left")],
)
def test_a_full_disk_or_small_shared_memory(
    monkeypatch: pytest.MonkeyPatch, full: str, words: str
) -> None:
    def usage(path: Path) -> Usage:
        return Usage((3 << 20) if str(path).startswith(full) else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(StartupError, match=words):
        start_checks.check_machine(Path("/tmp/disagg-x"))


def test_few_open_files_are_raised_where_the_system_allows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits, asked = (256, 4096), []
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(
        resource, "getrlimit", lambda what: limits if what == resource.RLIMIT_NOFILE else unlimited
    )
    monkeypatch.setattr(resource, "setrlimit", lambda what, both: asked.append(both))
    start_checks.check_machine(tmp_path)
    assert asked == [(4096, 4096)]
    limits = (256, 512)
    with pytest.raises(StartupError, match="open files is 256"):
        start_checks.check_machine(tmp_path)


def test_a_limit_of_address_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`ulimit -v 3000000`, with which Ray's start comes to a standstill."""
    limit = {resource.RLIMIT_AS: (3_000_000 << 10,) * 2}
    monkeypatch.setattr(resource, "getrlimit", lambda what: limit.get(what, (1 << 20,) * 2))
    with pytest.raises(StartupError, match="only 2929 MiB of address space"):
        start_checks.check_machine(tmp_path)


@pytest.mark.parametrize(
    ("http", "words"),
    [
        (HttpConfig(host="192.0.2.1"), "Cannot listen on 192"),
        (
            HttpConfig(host="x" * 300),
            "'xxx.* is not an address of this machine: it is not a valid host name",
        ),
        (HttpConfig(port=0), "choose one from 1 to 65535"),
    ],
)
def test_an_address_that_cannot_be(http: HttpConfig, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        start_checks.check_port(http)


@pytest.mark.parametrize(
    "engine",
    [
        {"kv_cache_memory_bytes": 1 << 60},
        {"num_gpu_blocks_override": 1 << 50},
        {"max_num_batched_tokens": 1 << 50},
        {"kv_offloading_size": 1e6},
    ],
)
def test_more_memory_than_the_machine_has(engine: dict[str, float]) -> None:
    raw = {"tiers": [{"model": "demo-small", "engine": {**engine, "device": "cpu"}}]}
    with pytest.raises(NotEnoughMemory, match=r"The workers would take .* GB of memory .* has"):
        start_checks.check_models(parse_config({**raw, "cluster_key": "of-a-test"}))


CHECKS_A_MODEL = """
import sys

from disagg.cli.start_checks import check_models
from disagg.config_checks import parse_config

engine = {"device": "cpu", "kv_cache_dtype": "fp8"}
tiers = [{"model": "demo-small", "engine": engine}]
check_models(parse_config({"tiers": tiers, "cluster_key": "of-a-test"}))
assert "torch" not in sys.modules
"""


def test_a_start_on_a_cpu_checks_its_models_without_torch() -> None:
    """Loading it would be two of the seconds until the first signs of life."""
    done = subprocess.run([sys.executable, "-c", CHECKS_A_MODEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", [{"drain_s": math.inf}, {"drain_s": -1.0}])
def test_a_time_that_never_ends_is_none(what: dict[str, float]) -> None:
    with pytest.raises(StartupError, match=r"Expected `float` .* at `\$.drain_s`"):
        parse_config({"tiers": [{"model": "demo-small"}], "cluster_key": "of-a-test", **what})


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"Cannot listen on 127.0.0.1:{port}: Address alr"):
            start_checks.check_port(HttpConfig(port=port))


def test_two_starts_at_once_on_one_address() -> None:
    """Both find it free, and HAProxy would share it."""
    http = HttpConfig(port=free_port())
    with start_checks.hold_port(http):
        start_checks.check_port(http)
        with pytest.raises(StartupError, match="Another `disagg serve` already uses"):
            start_checks.hold_port(http)
        start_checks.hold_port(HttpConfig(host="::1", port=http.port)).close()
    start_checks.hold_port(http).close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cluster_key": "short"}, "can be guessed"),
        ({"http": {"host": "0.0.0.0"}}, "Any client that reaches 0.0.0.0"),
        ({"http": {"allowed_origins": ["*"]}}, "Any website could use this server"),
        ({"transfer_interface": "eth77"}, "'eth77', and this machine has no such"),
        *(
            ({"redis_url": url}, "The Redis URL is invalid")
            for url in ("localhost:6379", "redis://host:99999", "redis://[::1", "")
        ),
    ],
)
def test_what_is_refused_before_anything_is_started(fields: dict[str, Any], words: str) -> None:
    """On a cluster, too, but for interfaces, which are its nodes' own."""
    for ray_address in (None, "127.0.0.1:1") if "transfer_interface" not in fields else (None,):
        with pytest.raises(StartupError, match=words):
            start_checks.check_before_ray(order_of(ray_address, **fields))


def order_of(ray_address: str | None = None, **fields: Any) -> Order:
    raw = {"tiers": [{"model": "demo-small"}], "cluster_key": 64 * "k", **fields}
    return Order(
        config=parse_config(raw),
        raw_config=raw,
        directory="/tmp",
        log_directory="/tmp",
        ray_address=ray_address,
        haproxy=True,
    )


def test_a_store_that_is_away() -> None:
    url, port = f"redis://127.0.0.1:{free_port()}", free_port()
    start_checks.check_before_ray(order_of(redis_url=url, http={"port": port}))


def test_a_running_serve_keeps_its_address() -> None:
    config = parse_config({"tiers": [{"model": "demo-small"}], "cluster_key": 64 * "k"})
    start_checks.check_serve_address(config, ("127.0.0.1", 8000))
    for running in (("127.0.0.1", 8001), ("10.0.0.1", 8000)):
        with pytest.raises(StartupError, match=f"listens on {running[0]}:{running[1]}. Pass"):
            start_checks.check_serve_address(config, running)
    with pytest.raises(StartupError, match=r"Any client that reaches 0\.0\.0\.0 could use"):
        start_checks.check_serve_address(config, ("0.0.0.0", 8000))


def test_workers_over_nodes_need_a_cluster() -> None:
    tier = {"model": "demo-small", "engine": {"tensor_parallel_size": 2}, "decode": {"nnodes": 2}}
    config = parse_config({"tiers": [tier], "cluster_key": "key"})
    with pytest.raises(StartupError, match=r"workers of 'demo-small' .* nnodes = 2, but"):
        start_checks.check_one_node(config)


def test_only_flags_that_a_command_has_are_named_as_at_fault() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--api-key")
    action = parser.add_subparsers().add_parser("calibrate")
    action.add_argument("--prompts")
    found = {
        param: at_fault(StartupError("It cannot be.", param=param), parser)
        for param in ("api_key", "prompts", "model", "cluster_key", "api")
    }
    named = {"api_key": " (--api-key)", "prompts": " (--prompts)"}
    assert found == {"model": "", "cluster_key": "", "api": "", **named}


def test_what_clients_cannot_use_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the command, and by ingresses, which are all there is under KubeRay."""
    model = write_tiny_model(tmp_path / "tiny")
    takes_tools = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(takes_tools)
    tier: dict[str, Any] = {"model": str(model), "engine": {"kv_cache_memory_bytes": 1 << 20}}
    for parser, expected in (("", 1), ("none", 0), ("hermes", 0)):
        raw = {"tiers": [{**tier, "tool_call_parser": parser}], "cluster_key": "of-a-test"}
        said: list[str] = []
        start_checks.check_models(parse_config(raw), tell=said.append)
        IngressCore(parse_config(raw), "ingress")
        logged = [record.getMessage() for record in caplog.records]
        about_calls = [each for each in said if "--tool-call-parser" in each]
        assert len(about_calls) == expected and set(about_calls) <= set(logged)
        assert about_calls or not logged
        caplog.clear()
