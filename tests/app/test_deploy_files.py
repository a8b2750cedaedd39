"""The files under deploy/ say what Serve, Ray and our own configuration accept."""

from __future__ import annotations

import argparse
import configparser
import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.app.build import build
from disagg.capacity.gpus import gpu_of
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.shapes import SHAPES
from disagg.cli.serve_arguments import add_arguments
from disagg.config_checks import filled_in
from disagg.errors import StartupError
from disagg.worker.vllm.arguments import VERSIONS
from tests.pods import check_pods, config_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERAY = DEPLOY / "kuberay" / "rayservice.yaml"
DOCKERFILE = DEPLOY / "kuberay" / "Dockerfile"
SERVE_FILES = sorted((DEPLOY / "serve").glob("*.yaml"))


def _load(path: Path) -> Any:
    """The first document of a file."""
    return next(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_serve_files(path: Path) -> None:
    assert config_of(_load(path), {}).tiers


@pytest.mark.parametrize(
    ("name", "longest_tokens", "ranks", "gpu", "weights"),
    [
        ("llama-3-70b", 8192, (2, 4), "h100", "bf16"),
        ("gpt-oss-120b", 65536, (1, 2), "h100", "bf16"),
        ("deepseek-r1", 65536, (8, 8), "h200", "fp8-block"),
    ],
)
def test_models_fit_the_gpus_of_their_workers(
    name: str, longest_tokens: int, ranks: tuple[int, int], gpu: str, weights: str
) -> None:
    (tier,) = config_of(_load(DEPLOY / "serve" / f"{name}.yaml"), {}).tiers
    every = placements(Placement(SHAPES[name], gpu_of(gpu), weights=weights), longest_tokens)
    sizes = {each.num_gpus for each in every}
    for pool in (tier.prefill, tier.decode):
        assert tier.num_ranks(pool) in sizes
    assert (tier.num_ranks(tier.prefill), tier.num_ranks(tier.decode)) == ranks


def test_pods_have_what_their_workers_ask_for() -> None:
    assert check_pods(_load(KUBERAY)).redis_url == "secret"
    beside = _load(KUBERAY.with_name("vllm-rayservice.yaml"))
    (tier,) = check_pods(beside).tiers
    assert tier.engine.backend == "vllm"
    ours, theirs = (each["spec"]["rayClusterConfig"] for each in (_load(KUBERAY), beside))
    assert ours["rayVersion"] == theirs["rayVersion"]
    for group in (theirs["headGroupSpec"], *theirs["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]  # those of the NetworkPolicy
        assert labels == ours["headGroupSpec"]["template"]["metadata"]["labels"]
        assert group["template"]["spec"]["containers"][0]["image"] == "disagg-vllm"


def test_each_redis_is_the_one_that_pods_ask() -> None:
    """Ray's tables are never evicted; evicted KV is, once it fills its server."""
    every = list(yaml.safe_load_all((DEPLOY / "kuberay" / "redis.yaml").read_text()))
    services = {each["metadata"]["name"] for each in every if each["kind"] == "Service"}
    assert services == {"redis", "redis-kv"}
    policies = {}
    for each in every:
        if each["kind"] != "Service":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            words = " ".join(container["args"])
            policies[each["metadata"]["name"]] = re.findall(r"--maxmemory-policy (\S+)", words)
    assert policies == {"redis": ["noeviction"], "redis-kv": ["volatile-lru"]}
    cluster = _load(KUBERAY)["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"
    assert "@redis-kv:6379/0" in KUBERAY.read_text()


def test_strangers_reach_the_api_of_pods_and_no_other_port() -> None:
    service, policy = yaml.safe_load_all(KUBERAY.read_text())
    assert policy["kind"] == "NetworkPolicy" and policy["spec"]["policyTypes"] == ["Ingress"]
    own = policy["spec"]["podSelector"]["matchLabels"]
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert own.items() <= group["template"]["metadata"]["labels"].items()
    (scraped,) = [
        rule["ports"] for rule in policy["spec"]["ingress"] if "ports" in rule and "from" in rule
    ]
    monitor = _load(DEPLOY / "monitoring" / "podmonitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"] == own
    (endpoint,) = monitor["podMetricsEndpoints"]
    for group in cluster["workerGroupSpecs"]:
        ports = group["template"]["spec"]["containers"][0]["ports"]
        (port,) = [each["containerPort"] for each in ports if each["name"] == endpoint["port"]]
        assert scraped[0]["port"] <= port <= scraped[0]["endPort"]
    to_all = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert to_all == [[{"protocol": "TCP", "port": 8000}]]
    assert all(
        source["podSelector"]
        for rule in policy["spec"]["ingress"]
        for source in rule.get("from", ())
    )


def test_serve_reads_the_same_settings_on_nodes_and_on_pods() -> None:
    nodes, pods = _load(DEPLOY / "ray" / "cluster.yaml"), _load(KUBERAY)
    head = pods["spec"]["rayClusterConfig"]["headGroupSpec"]
    of_pods = {
        each["name"]: each["value"]
        for each in head["template"]["spec"]["containers"][0]["env"]
        if each["name"].startswith("RAY_")
    }
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = nodes[commands][-1]
        for name, value in of_pods.items():
            assert f"{name}={value}" in start


def test_every_cluster_wants_a_token_and_has_our_haproxy() -> None:
    nodes, pods = _load(DEPLOY / "ray" / "cluster.yaml"), _load(KUBERAY)
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = nodes[commands][-1]
        assert "RAY_AUTH_MODE=token" in start
        assert 'RAY_SERVE_HAPROXY_BINARY_PATH="$(command -v disagg-haproxy)"' in start
    assert "/home/ubuntu/.ray/auth_token" in nodes["file_mounts"]
    assert nodes["auth"]["ssh_user"] == "ubuntu"
    assert pods["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert "BINARY_PATH=/home/ray/anaconda3/bin/disagg-haproxy" in DOCKERFILE.read_text()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["disagg-haproxy"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_image_has_the_versions_that_are_tested() -> None:
    words = DOCKERFILE.read_text()
    assert re.search(r"^COPY .*\bconstraints\.txt .*/disagg/$", words, re.MULTILINE)
    assert "pip install --no-cache-dir -c /disagg/constraints.txt /disagg" in words
    pinned = dict(
        re.findall(r"^(\S+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert f"FROM rayproject/ray:{pinned['ray']}-" in words
    beside_vllm = DOCKERFILE.with_name("vllm.Dockerfile").read_text()
    assert f'"ray[serve]=={pinned["ray"]}"' in beside_vllm
    assert f"FROM vllm/vllm-openai:v{VERSIONS[0]}." in beside_vllm
    assert _load(KUBERAY)["spec"]["rayClusterConfig"]["rayVersion"] == pinned["ray"]


def test_nodes_have_the_versions_that_are_tested() -> None:
    """In an environment of its own, from files that the user of the nodes may write."""
    config = _load(DEPLOY / "ray" / "cluster.yaml")
    mounts = config["file_mounts"]
    assert mounts["/home/ubuntu/constraints.txt"] == "constraints.txt"
    assert all(each.startswith("/home/ubuntu/") for each in mounts)
    assert all(
        (ROOT / each).exists() for each in mounts.values() if each[0] != "~" and each != "dist"
    )
    (install,) = [each for each in config["setup_commands"] if "pip install" in each]
    assert "pip install -c ~/constraints.txt ~/wheels/disagg-*.whl" in install
    assert "python3 -m venv ~/disagg" in install
    assert 'PATH="$HOME/disagg/bin:$PATH"' in config["setup_commands"][-1]


def test_hashes_are_of_the_versions_that_are_tested() -> None:
    """requirements.txt begins with the command that makes it anew."""
    text = (ROOT / "requirements.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    assert len(re.findall(r"^[\w.-]+==\S+.*\\\n    --hash=sha256:", text, re.MULTILINE)) == len(
        locked
    )
    tested = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    tested = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    assert {name: tested.get(name, version) for name, version in locked.items()} == locked
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        re.split(r"[\[<>=;]", each)[0].strip().replace("_", "-") for each in project["dependencies"]
    }
    assert named <= set(locked)


def test_the_cluster_file_is_valid() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = _load(DEPLOY / "ray" / "cluster.yaml")
    validate_config(prepare_config(config))
    node_types = config["available_node_types"]
    assert node_types["head"]["resources"] == {"CPU": 0}
    assert all(node_types[role]["resources"]["GPU"] for role in ("prefill", "decode"))


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_commands_of_the_cluster_file_start_ray(kind: str) -> None:
    """Ray's own parser takes them, and the head keeps its tables where its successor finds them."""
    from ray.scripts.scripts import start

    config = _load(DEPLOY / "ray" / "cluster.yaml")
    exports, limit, command = config[f"{kind}_start_ray_commands"][-1].split(";")
    assert limit.strip() == "ulimit -n 65536"  # as in Ray's own defaults
    variables = dict(each.split("=") for each in shlex.split(exports)[1:])
    assert ("RAY_REDIS_ADDRESS" in variables) == (kind == "head")  # workers ask the head
    assert float(variables["RAY_gcs_rpc_server_reconnect_timeout_s"]) > 60
    arguments = shlex.split(command)
    assert arguments[:2] == ["ray", "start"]
    parsed = start.make_context("start", arguments[2:]).params
    assert parsed["head"] == (kind == "head")
    assert bool(parsed["redis_password"]) == (kind == "head")


def test_a_variable_that_is_not_set_is_named() -> None:
    raw = {"http": {"api_key": "env:A_KEY"}, "tiers": ["as it is", 3]}
    assert filled_in(raw, {"A_KEY": "k"}) == {"http": {"api_key": "k"}, "tiers": ["as it is", 3]}
    with pytest.raises(StartupError, match="A_KEY"):
        filled_in(raw, {"ANOTHER": "k"})


def test_limits_that_ingresses_cannot_share_are_refused() -> None:
    args = {
        "cluster_key": "a key of this test",
        "tiers": [{"model": "demo-small"}],
        "http": {"api_keys": {"a": "k"}},
        "tenants": {"a": {"requests_per_minute": 5}},
        "num_ingress": 2,
    }
    with pytest.raises(StartupError, match="set redis_url"):
        build(args)


def test_the_service_of_systemd() -> None:
    """Its command is one, and has time to let streams end before systemd kills it."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "disagg.service")
    service = unit["Service"]
    _, verb, *words = shlex.split(service["ExecStart"])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert verb == "serve"
    assert parser.parse_args(words).drain_s < float(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"
    # A user without a home has places for logs, models and compiled kernels.
    lines = (DEPLOY / "systemd" / "disagg.service").read_text().splitlines()
    words = [line.partition("=")[2] for line in lines if line.startswith("Environment=")]
    places = dict(each.split("=") for each in " ".join(words).split())
    assert places["XDG_STATE_HOME"] + "/" + service["StateDirectory"] == "/var/lib/disagg"
    assert places["XDG_CACHE_HOME"] + "/" + service["CacheDirectory"] == "/var/cache/disagg"
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert places[name].startswith("/var/cache/disagg/")


@pytest.mark.parametrize("key", ["short", "change-me-at-the-first-start"])
def test_a_weak_secret_is_refused_where_serve_builds(key: str) -> None:
    with pytest.raises(StartupError, match=r"openssl rand -hex 32"):
        build({"tiers": [{"model": "demo-small"}], "cluster_key": key})
