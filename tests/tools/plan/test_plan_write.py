"""`disagg plan --write`: what is advised is what Serve, KubeRay and our own checks read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.capacity.deployment import Written, files_of
from disagg.capacity.device_plan import plan_devices
from disagg.capacity.gpus import CPU_CORE, GPUS
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.shapes import SHAPES, read_shape
from disagg.capacity.sizing import FleetPlan, Pool
from disagg.capacity.worker_steps import step_sizes
from disagg.capacity.workload import Slo, Workload
from disagg.cli.main import main
from disagg.cli.serve_arguments import add_arguments
from disagg.cli.serve_config import layers_of
from disagg.devices import Device, Gpus
from disagg.errors import StartupError
from tests.pods import check_pods, config_of
from tests.tools.plan.test_plan import refused

SECRETS = {"DISAGG_CLUSTER_KEY": "a key of this test", "DISAGG_API_KEY": "another-key"}
APART = (
    *("llama-3-8b", "--requests-per-s", "200", "--input-tokens", "2000", "--output-tokens", "100"),
    *("--ttft", "0.5", "--tpot", "0.015", "--tensor-parallel-size", "1"),
)
DEPLOYED = Path(__file__).parents[3] / "deploy" / "kuberay" / "rayservice.yaml"


def written(
    directory: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The plan, the Serve YAML, and the documents of the KubeRay file."""
    assert main(["plan", *words, "--no-play", "--write", str(directory), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    serve = yaml.safe_load((directory / "serve.yaml").read_text())
    return plan, serve, list(yaml.safe_load_all((directory / "rayservice.yaml").read_text()))


def test_files_say_what_is_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "new" / "fleet"
    plan, serve, kuberay = written(to, capsys, *APART, "--link", "nvlink")
    assert plan["disaggregate"]
    config = config_of(serve, SECRETS)
    (tier,) = config.tiers
    prefill, decode = plan["apart"]["pools"]
    assert (tier.prefill.num_replicas, tier.decode.num_replicas) == (
        prefill["num_workers"],
        decode["num_workers"],
    )
    assert tier.prefill.num_gpus == tier.decode.num_gpus == tier.engine.tensor_parallel_size == 1
    assert (tier.ttft_slo_s, tier.tpot_slo_s) == (0.5, 0.015)
    sizes = (tier.engine.max_num_seqs, tier.engine.max_num_batched_tokens)
    assert sizes == step_sizes(SHAPES["llama-3-8b"], "NVIDIA H100")
    assert tier.model == "meta-llama/Meta-Llama-3-8B"
    assert tier.engine.max_model_len is None  # KV of the model's longest request fits
    assert config.transfer_prior is not None and config.transfer_prior.bytes_per_s == 400e9
    service, policy = kuberay
    (on_pods,) = check_pods(service).tiers
    assert on_pods.model == "/models/Meta-Llama-3-8B"
    for field in ("engine", "ttft_slo_s", "tpot_slo_s", "name"):
        assert getattr(on_pods, field) == getattr(tier, field)
    assert on_pods.decode.num_replicas == tier.decode.num_replicas
    # The devices that the fleet costs are those that its workers take.
    gpus = Gpus((Device("", "NVIDIA H100 80GB HBM3"),) * plan["apart"]["num_gpus"], "the cluster")
    assert plan_devices(config, gpus).config == config
    assert policy == list(yaml.safe_load_all(DEPLOYED.read_text()))[1]


def test_pods_are_those_of_the_deployed_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for Redis, autoscaling, and the numbers of the fleet."""
    _, _, (ours, _) = written(tmp_path, capsys, *APART)
    theirs = next(yaml.safe_load_all(DEPLOYED.read_text()))
    pods = {}
    for name, file in (("ours", ours), ("theirs", theirs)):
        cluster = file["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            for container in group["template"]["spec"]["containers"]:
                container["env"] = [e for e in container["env"] if "REDIS" not in e["name"]]
        for group in cluster["workerGroupSpecs"]:
            group.update(replicas=0, minReplicas=0, maxReplicas=0)
            group["rayStartParams"]["resources"] = json.loads(group["rayStartParams"]["resources"])
        for extra in ("gcsFaultToleranceOptions", "enableInTreeAutoscaling"):
            cluster.pop(extra, None)
        pods[name] = cluster
    assert pods["ours"] == pods["theirs"]


def test_workers_that_do_both_have_several_gpus_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("llama-3.1-70b", "--requests-per-s", "1", "--ttft", "2", "--tensor-parallel-size", "2")
    kv = ("--kv-cache-dtype", "int8")
    plan, serve, (service, _) = written(tmp_path, capsys, *words, *kv)
    assert not plan["disaggregate"]
    (tier,) = config_of(serve, SECRETS).tiers
    (pool,) = plan["together"]["pools"]
    assert (tier.prefill.num_replicas, tier.decode.num_replicas) == (0, pool["num_workers"])
    assert tier.engine.tensor_parallel_size == tier.decode.num_gpus == 2
    assert tier.engine.kv_cache_dtype == "int8"
    assert tier.engine.max_model_len == 1280  # two H100s have no room for 131,072 tokens of KV
    assert check_pods(service).tiers[0].decode.num_gpus == 2


def test_workers_of_unlike_sizes_are_those_of_the_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, serve, (service, _) = written(tmp_path, capsys, "llama-3-70b", "--requests-per-s", "1000")
    sizes = [pool["tensor_parallel"] for pool in plan["apart"]["pools"]]
    assert plan["disaggregate"] and sizes[0] != sizes[1]
    for tier in (*config_of(serve, SECRETS).tiers, *check_pods(service).tiers):
        pools = tier.prefill, tier.decode
        assert sizes == [tier.num_ranks(pool) for pool in pools] == [p.num_gpus for p in pools]


def test_workers_with_whole_experts_are_written_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("qwen3-30b-a3b", "--requests-per-s", "1", "--ttft", "2", "--enable-expert-parallel")
    for size in (1, 2):
        to = tmp_path / str(size)
        plan, serve, _ = written(to, capsys, *words, "--tensor-parallel-size", str(size))
        assert {each["expert_parallel"] for each in plan["workers"]} == {size > 1}
        assert config_of(serve, SECRETS).tiers[0].engine.enable_expert_parallel == (size > 1)


def test_pools_on_unlike_gpus_say_which_nodes_they_want(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = ("--gpu", "h100", "--gpu", "h200", "--price", "h100=1", "--price", "h200=1.2")
    plan, serve, _ = written(tmp_path, capsys, *APART, *gpus)
    kinds = {pool["role"]: pool["gpu"] for pool in plan["apart"]["pools"]}
    assert plan["disaggregate"] and len(set(kinds.values())) == 2
    (tier,) = config_of(serve, SECRETS).tiers
    assert (tier.prefill.resources, tier.decode.resources) == ({"prefill": 1}, {"decode": 1})
    text = (tmp_path / "serve.yaml").read_text()
    for role, gpu in kinds.items():
        assert f"{role} on {gpu}" in (tmp_path / "rayservice.yaml").read_text()
        assert f"# Start nodes with {gpu} with `ray start --resources='{{\"{role}\": N}}'`" in text


def test_what_is_written_can_be_served_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`disagg serve --config` reads Serve's YAML, with its secrets from the environment."""
    words = ("demo-large", "--gpu", "cpu", "--price", "cpu=0.05", "--requests-per-s", "2")
    lengths = ("--input-tokens", "100", "--output-tokens", "20")
    _, serve, (service, _) = written(tmp_path, capsys, *words, *lengths)
    assert check_pods(service).tiers[0].model == "demo-large"  # the image has it
    on_pods = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert on_pods["http_options"]["host"] == "0.0.0.0"  # else no other pod reaches them
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--config", str(tmp_path / "serve.yaml")])
    config = layers_of(arguments).config()
    assert config.tiers == config_of(serve, SECRETS).tiers
    assert config.tiers[0].engine.device == "cpu" and config.tiers[0].decode.num_gpus == 0
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8000)
    assert (config.cluster_key, config.http.api_key) == tuple(SECRETS.values())


def test_files_that_are_there_stay_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("llama-3-8b", "--requests-per-s", "20", "--no-play", "--write", str(tmp_path))
    (tmp_path / "serve.yaml").write_text("mine")
    assert "already has serve.yaml; overwrite with --force" in refused(capsys, *words)
    assert (tmp_path / "serve.yaml").read_text() == "mine"
    assert main(["plan", *words, "--force"]) == 0
    assert f"Written: {tmp_path}/serve.yaml" in capsys.readouterr().out
    assert "disagg plan llama-3-8b --requests-per-s 20" in (tmp_path / "serve.yaml").read_text()


def test_what_cannot_be_served_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ("--write", str(tmp_path / "fleet"))
    load = ("llama-3-8b", "--requests-per-s", "20", "--no-play")
    assert "--write needs a load" in refused(capsys, "llama-3-8b", *to)
    assert "add --write DIR, or leave out --force" in refused(capsys, *load, "--force")
    assert "multiplies fp8 weights in 16 bits" in refused(capsys, *load, "--weights", "fp8", *to)
    assert "does not support AMD GPUs" in refused(capsys, *load, "--gpu", "mi300x", *to)
    (tmp_path / "file").write_text("")
    assert "is a file; --write needs a directory" in refused(
        capsys, *load, "--write", str(tmp_path / "file")
    )
    assert "Cannot write to" in refused(capsys, *load, "--write", str(tmp_path / "file" / "in"))
    assert not (tmp_path / "fleet").exists()


def test_a_pool_on_cpus_beside_one_on_gpus_is_not_written(tmp_path: Path) -> None:
    shape = read_shape("demo-large")
    pools = tuple(
        Pool(placements(Placement(shape, gpu))[0], 1, 1.0, 0.5, 8)
        for gpu in (CPU_CORE, GPUS["h100"])
    )
    for each in (pools, pools[::-1]):
        fleet = FleetPlan(each, 0.1, 0.01)
        load = Workload(1.0, [(100, 20)])
        plan = Written(fleet, load, Slo(1.0, 0.05), 1e9, "demo-large", "disagg plan")
        with pytest.raises(StartupError, match="one pool on CPUs and one on GPUs"):
            files_of(plan)
    assert not (tmp_path / "fleet").exists()


def test_a_serve_yaml_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    for applications in ([], [{"import_path": "other:app", "args": {}}], "disagg"):
        file.write_text(yaml.safe_dump({"applications": applications}))
        assert main(["serve", "--config", str(file)]) == 2
        assert "its only application must be disagg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("of_the_file", "of_the_application", "message"),
    [
        ({}, {"deployments": [{"name": "x-decode"}]}, "does not support deployments of the app"),
        (
            {"http_options": {"port": 1, "root_path": "/x"}},
            {},
            "not support root_path of http_options",
        ),
        ({"target_capacity": 50}, {}, "does not support target_capacity in "),
        ({}, {"route_prefix": "/models"}, "serves at / only, but "),
        ({"http_options": 8000}, {}, "http_options in "),
        ({}, {"args": {"http": 8000}}, "$.http"),
    ],
)
def test_what_would_be_ignored_of_a_serve_yaml_is_refused(
    of_the_file: dict[str, Any],
    of_the_application: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours: dict[str, Any] = {"import_path": "disagg.app.build:build", "args": {}}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [ours | of_the_application], **of_the_file}))
    assert main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_file_of_several_documents_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", str(DEPLOYED)]) == 2
    assert f"`kubectl apply -f {DEPLOYED}`" in capsys.readouterr().err
    file = tmp_path / "two.yaml"
    file.write_text("tiers: []\n---\ntiers: []\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert "one YAML document" in capsys.readouterr().err


def test_a_configuration_that_is_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["serve", "--config", str(file)]) == 2
    assert f"Cannot read the configuration {file}" in capsys.readouterr().err
