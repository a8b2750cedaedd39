"""The advised fleet as a YAML file for Ray Serve, and one for KubeRay.

Both files describe the same workers, with the advice's pools, GPUs, step sizes, KV formats and
SLOs. They contain no secrets; the application reads those from environment variables. KubeRay's is
`assets/rayservice.yaml` with these workers, without Redis and autoscaling: one worker group per
pool, and one worker per pod.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from disagg.capacity.gpus import CPU_CORE
from disagg.capacity.roofline import MEMORY_SHARE
from disagg.capacity.shapes import ModelShape
from disagg.capacity.sizing import TRANSFER_LATENCY_S, FleetPlan, Pool, num_links
from disagg.capacity.worker_steps import step_sizes_of
from disagg.capacity.workload import Slo, Workload
from disagg.config import ASSETS
from disagg.config_checks import parse_config
from disagg.errors import StartupError
from disagg.yaml_text import to_yaml

SERVE_FILE, KUBERAY_FILE = "serve.yaml", "rayservice.yaml"
CLUSTER_KEY, API_KEY = "DISAGG_CLUSTER_KEY", "DISAGG_API_KEY"
TEMPLATE = ASSETS / "rayservice.yaml"
DRAIN_S = 120  # as in the template, whose pods wait for a little longer
# Resources of a pod for each of its GPUs.
CPUS_PER_GPU, MEMORY_GIB_PER_GPU, SHM_GIB_PER_GPU = 8, 64, 16
AMD = {"mi300x"}
ALL_HOSTS = "0.0.0.0"
ROLES = ("prefill", "decode")


class Written(msgspec.Struct, frozen=True):
    """An advised fleet, and what a deployment needs besides.

    Args:
        model: the model as `disagg serve` takes it.
        command: the command line that made the plan.
    """

    fleet: FleetPlan
    load: Workload
    slo: Slo
    link_bytes_per_s: float
    model: str
    command: str

    @property
    def is_on_cpu(self) -> bool:
        return self.fleet.pools[0].placement.gpu is CPU_CORE

    @property
    def pools(self) -> dict[str, Any]:
        """Pools by role. Workers that both prefill and decode are a lone decode pool."""
        pools = self.fleet.pools
        return dict(zip(ROLES if len(pools) == 2 else ROLES[1:], pools, strict=True))

    @property
    def has_unlike_gpus(self) -> bool:
        return len({pool.placement.gpu.name for pool in self.fleet.pools}) > 1


def not_served(shape: ModelShape, weights: str, kv: str) -> list[str]:
    """Sentences on why `disagg serve` cannot serve the model as planned."""
    reasons = []
    if shape.latent_size and kv != "bf16":
        reasons.append(
            f"`disagg serve` supports only a 16-bit KV cache for {shape.name} (latent vectors), so"
            f" it cannot serve a plan with --kv-cache-dtype {kv}; plan with bf16 instead."
        )
    if weights != "bf16":
        how = (
            "refuses NVFP4 checkpoints" if weights == "fp4" else "multiplies fp8 weights in 16 bits"
        )
        reasons.append(
            f"`disagg serve` {how}, so it cannot serve a plan with --weights {weights}; plan with"
            " --weights bf16 instead, also for a quantised checkpoint."
        )
    return reasons


def check_servable(shape: ModelShape, weights: str, kv: str) -> None:
    """Raises `StartupError` if `disagg serve` cannot serve the model as planned."""
    reasons = not_served(shape, weights, kv)
    if reasons:
        raise StartupError(" ".join(reasons), param="write")


def _check_gpus(fleet: FleetPlan) -> None:
    amd = sorted({pool.placement.gpu.name for pool in fleet.pools} & AMD)
    if amd:
        raise StartupError(
            f"The advised fleet uses {amd[0]}, but `disagg serve` does not support AMD GPUs. Choose"
            " another --gpu.",
            param="write",
        )
    on_cpu = [pool.placement.gpu is CPU_CORE for pool in fleet.pools]
    if any(on_cpu) and not all(on_cpu):
        raise StartupError(
            "The advised fleet has one pool on CPUs and one on GPUs, but `disagg serve` runs all"
            " workers of a model either on CPUs or on GPUs. Leave out --gpu cpu, or the GPUs.",
            param="write",
        )


def files_of(plan: Written) -> dict[str, str]:
    """The text of both files, by name. Raises `StartupError` if `disagg serve` cannot serve it."""
    _check_gpus(plan.fleet)
    args = serve_args(plan, plan.model)
    parse_config({**args, "cluster_key": "as the environment says"})  # raises if it is invalid
    here = _serve("127.0.0.1" if plan.is_on_cpu else ALL_HOSTS, args)
    # On a pod the model is on a volume, or in the image if it is bundled.
    is_bundled, name = (ASSETS / plan.model).is_dir(), plan.model.rstrip("/").rsplit("/", 1)[-1]
    on_pods = serve_args(plan, plan.model if is_bundled else f"/models/{name}", by_role=True)
    kuberay = _on_kuberay(plan.pools, to_yaml(_serve(ALL_HOSTS, on_pods)))
    notes, kuberay_notes = list(_SERVE_NOTES), list(_KUBERAY_NOTES)
    if plan.has_unlike_gpus:
        gpus = {role: pool.placement.gpu.name for role, pool in plan.pools.items()}
        notes += (
            f"Start nodes with {gpu} with `ray start --resources='{{\"{role}\": N}}'`, where N is"
            " the number of workers."
            for role, gpu in gpus.items()
        )
        kuberay_notes.append(
            "Give each group's pods a nodeSelector (nvidia.com/gpu.product) for its GPUs:"
            f" {', '.join(f'{role} on {gpu}' for role, gpu in gpus.items())}."
        )
    return {
        SERVE_FILE: _header(plan, notes) + to_yaml(here),
        KUBERAY_FILE: _header(plan, kuberay_notes) + to_yaml(*kuberay),
    }


def _on_kuberay(pools: Mapping[str, Pool], serve: str) -> list[dict[str, Any]]:
    """The documents of `TEMPLATE` with these pools, and with `serve` as Serve's configuration."""
    service, *others = yaml.safe_load_all(TEMPLATE.read_text(encoding="utf-8"))
    spec, cluster = service["spec"], service["spec"]["rayClusterConfig"]
    spec["serveConfigV2"] = serve
    del cluster["gcsFaultToleranceOptions"], cluster["enableInTreeAutoscaling"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    head["env"][:] = [each for each in head["env"] if "REDIS" not in each["name"]]  # of all pods
    template = cluster["workerGroupSpecs"][0]
    cluster["workerGroupSpecs"] = [_group(template, *each) for each in pools.items()]
    return [service, *others]


def _group(template: Mapping[str, Any], role: str, pool: Pool) -> dict[str, Any]:
    size = pool.placement.num_gpus
    gpus = {} if pool.placement.gpu is CPU_CORE else {"nvidia.com/gpu": size}
    limits = {"memory": f"{MEMORY_GIB_PER_GPU * size}Gi", **gpus}
    group = copy.deepcopy(dict(template))
    pod = group["template"]["spec"]
    pod["containers"][0]["resources"] = {
        "requests": {"cpu": str(CPUS_PER_GPU * size), **limits},
        "limits": limits,
    }
    (shm,) = (each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm")
    shm["sizeLimit"] = f"{SHM_GIB_PER_GPU * size}Gi"
    return group | {
        "groupName": role,
        "replicas": pool.num_workers,
        "minReplicas": pool.num_workers,
        "maxReplicas": pool.num_workers,
        "rayStartParams": {"resources": json.dumps(json.dumps({role: 1}))},  # a shell reads it
    }


def serve_args(plan: Written, model: str, by_role: bool = False) -> dict[str, Any]:
    """The fleet's `config.ServeConfig` as plain data.

    Args:
        by_role: whether workers request their role as a Ray resource, which KubeRay's pods have.
    """
    fleet, slo = plan.fleet, plan.slo
    first, last = fleet.pools[0].placement, fleet.pools[-1].placement
    by_role = by_role or plan.has_unlike_gpus
    tier: dict[str, Any] = {
        "model": model,
        "ttft_slo_s": slo.ttft_s,
        "tpot_slo_s": slo.tpot_s,
        "prefill": {"num_replicas": 0},
    }
    for role, pool in plan.pools.items():
        tier[role] = {"num_replicas": pool.num_workers}
        tier[role]["num_gpus"] = 0 if plan.is_on_cpu else pool.placement.num_gpus
        if pool.placement.num_gpus != first.num_gpus:  # the engine section has that of `first`
            tier[role]["tensor_parallel_size"] = pool.placement.num_gpus
        if by_role:
            tier[role]["resources"] = {role: 1}
    tier["engine"] = _engine(plan)
    return {
        "cluster_key": f"env:{CLUSTER_KEY}",
        "http": {"api_key": f"env:{API_KEY}"},
        "cold_tier_nbytes": 0,  # a cold tier would need a Redis server
        "num_ingress": 1 if plan.is_on_cpu else 2,
        "drain_s": DRAIN_S,
        "transfer_prior": {
            "latency_s": TRANSFER_LATENCY_S,
            "bytes_per_s": plan.link_bytes_per_s * num_links(first, last),
        },
        "tiers": [tier],
    }


def _engine(plan: Written) -> dict[str, Any]:
    placement = plan.fleet.pools[0].placement
    num_seqs, num_tokens = step_sizes_of(plan.fleet)
    engine: dict[str, Any] = {
        "device": "cpu" if plan.is_on_cpu else "cuda",
        "tensor_parallel_size": placement.num_gpus,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_tokens,
    }
    if any(pool.placement.num_holders > 1 for pool in plan.fleet.pools):
        engine["enable_expert_parallel"] = True
    if not plan.is_on_cpu:
        engine["gpu_memory_utilization"] = MEMORY_SHARE
    if placement.kv != "bf16":  # the default, "auto", is bf16 for these models
        engine["kv_cache_dtype"] = placement.kv
    room = min(pool.placement.num_kv_tokens for pool in plan.fleet.pools)
    if room < placement.shape.config.max_model_len:  # a request of the model's limit would not fit
        engine["max_model_len"] = plan.load.longest_tokens
    return engine


def served_model(model: str, repository: str) -> str:
    """The model as `disagg serve` takes it: a repository, an absolute path, or a name."""
    if repository:
        return repository
    return str(Path(model).resolve()) if Path(model).exists() else model


def _serve(host: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "proxy_location": "EveryNode",
        # There is no request_timeout_s, because it would cut long streams.
        "http_options": {"host": host, "port": 8000},
        "applications": [
            {
                "name": "disagg",
                "route_prefix": "/",
                "import_path": "disagg.app.build:build",
                "args": dict(args),
            }
        ],
    }


_SERVE_NOTES = (
    f"Set {CLUSTER_KEY} (`openssl rand -hex 32`) and {API_KEY} on all Ray nodes, then run:",
    f"  serve deploy {SERVE_FILE}            on a Ray cluster (docs/install.md#two-machines), or",
    f"  disagg serve --config {SERVE_FILE}   on this machine",
)
_KUBERAY_NOTES = (
    "Needs KubeRay 1.5.1 or newer, the image `disagg` (deploy/kuberay/Dockerfile), a volume claim",
    "`models` with the model's directory, and these secrets (docs/install.md#kubernetes):",
    "  kubectl create secret generic disagg --from-literal=cluster-key=... \\",
    "      --from-literal=api-key=...",
    f"  kubectl apply -f {KUBERAY_FILE}",
)


def _header(plan: Written, notes: Sequence[str]) -> str:
    fleet, load = plan.fleet, plan.load
    workers = " + ".join(map(str, fleet.pools))
    lines = (
        f"Written by: {plan.command}",
        f"{workers} for {load.requests_per_s:,.2f} requests/s of {load.mean_prompt_tokens:,.0f} +"
        f" {load.mean_output_tokens:,.0f} tokens. Predicted (not measured) for 95 % of requests:",
        f"TTFT {fleet.ttft_s * 1e3:,.0f} ms, TPOT {fleet.tpot_s * 1e3:.1f} ms;"
        f" ${fleet.usd_per_hour:,.2f} per hour.",
        *notes,
    )
    return "".join(f"# {line}\n" for line in lines)
