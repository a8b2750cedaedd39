"""The Ray cluster of a planned fleet for KubeRay, like deploy/kuberay/rayservice.yaml.

There is one worker group per pool and one worker per pod.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from disagg.capacity.gpus import CPU_CORE
from disagg.tools.plan.sizing import Pool

RAY_VERSION = "2.60.0"
LABELS = {"app": "disagg"}
IMAGE = "disagg"
DRAIN_MARGIN_S = 30  # for Serve to notice that a node drains, after `drain_s`
GRACE_S = 20  # for Ray to stop after that

# Resources of a worker for each of its GPUs.
CPUS_PER_GPU, MEMORY_GIB_PER_GPU, SHM_GIB_PER_GPU = 8, 64, 16

# Serve reads these when its processes start, so they are the same on every pod.
_SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
_SECRETS = {"DISAGG_CLUSTER_KEY": "cluster-key", "DISAGG_API_KEY": "api-key"}
_PORTS = {6379: "gcs-server", 8265: "dashboard", 10001: "client", 8000: "serve", 30000: "ingress"}
# `ray stop` alone would kill the workers at once. Serve moves the replicas of a draining node. If
# no head takes the drain (the whole cluster ends), there is nothing to wait for.
_PRE_STOP = """\
timeout 30 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION \\
    --reason-message 'the pod ends' --deadline-remaining-seconds {seconds} &&
for _ in $(seq {seconds}); do
    grep -aqs '^ray::ServeReplica' /proc/[0-9]*/cmdline || break
    sleep 1
done
ray stop
"""


def cluster_of(pools: Mapping[str, Pool], drain_s: float) -> dict[str, Any]:
    """`rayClusterConfig` of a RayService: a head, and one worker group per role."""
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},  # KubeRay makes a token and gives it to every pod
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},  # so that only Ray's own processes run there
            "template": {
                "metadata": {"labels": LABELS},
                "spec": {"containers": [_container("ray-head", _resources(4, 16, 0))]},
            },
        },
        "workerGroupSpecs": [_group(role, pool, drain_s) for role, pool in pools.items()],
    }


def policy_of() -> dict[str, Any]:
    """A NetworkPolicy. The pods and KubeRay's operator reach the pods, clients only the API, and
    Prometheus each ingress.

    It is needed because KV transfers are not authenticated (docs/security.md).
    """
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    prometheus = {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "disagg"},
        "spec": {
            "podSelector": {"matchLabels": LABELS},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": LABELS}}]},
                {"from": [{"namespaceSelector": {}, "podSelector": operator}]},
                {
                    "from": [{"namespaceSelector": {}, "podSelector": prometheus}],
                    "ports": [{"protocol": "TCP", "port": 30000, "endPort": 30009}],
                },
                {"ports": [{"protocol": "TCP", "port": 8000}]},
            ],
        },
    }


def _group(role: str, pool: Pool, drain_s: float) -> dict[str, Any]:
    placement = pool.placement
    size = placement.num_gpus
    num_gpus = 0 if placement.gpu is CPU_CORE else size
    container = _container(
        "worker", _resources(CPUS_PER_GPU * size, MEMORY_GIB_PER_GPU * size, num_gpus)
    )
    leave_s = int(drain_s) + DRAIN_MARGIN_S
    pre_stop = ["/bin/sh", "-c", _PRE_STOP.format(seconds=leave_s)]
    container["lifecycle"] = {"preStop": {"exec": {"command": pre_stop}}}
    container["volumeMounts"] = [
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    shm = {"medium": "Memory", "sizeLimit": f"{SHM_GIB_PER_GPU * size}Gi"}
    return {
        "groupName": role,
        "replicas": pool.num_workers,
        "minReplicas": pool.num_workers,
        "maxReplicas": pool.num_workers,
        "rayStartParams": {"resources": json.dumps(json.dumps({role: 1}))},  # a shell reads it
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {
                # A worker that stops needs time to hand its requests over with their KV.
                "terminationGracePeriodSeconds": leave_s + GRACE_S,
                "containers": [container],
                "volumes": [
                    {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
                    {"name": "shm", "emptyDir": shm},
                ],
            },
        },
    }


def _container(name: str, resources: Mapping[str, Any]) -> dict[str, Any]:
    settings = [{"name": key, "value": value} for key, value in _SETTINGS.items()]
    secrets = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": "disagg", "key": secret}}}
        for key, secret in _SECRETS.items()
    ]
    return {
        "name": name,
        "image": IMAGE,
        "env": [*settings, *secrets],
        "ports": [{"containerPort": port, "name": port_name} for port, port_name in _PORTS.items()],
        "resources": dict(resources),
    }


def _resources(num_cpus: int, num_gib: int, num_gpus: int) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": num_gpus} if num_gpus else {}
    memory = {"memory": f"{num_gib}Gi"}
    return {"requests": {"cpu": str(num_cpus), **memory, **gpus}, "limits": {**memory, **gpus}}
