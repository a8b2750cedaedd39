"""What files for Ray Serve and for KubeRay must agree on, whoever wrote them."""

from __future__ import annotations

from typing import Any

import yaml
from ray.serve.schema import ServeDeploySchema

from disagg.config import ServeConfig
from disagg.config_checks import filled_in, parse_config


def config_of(serve: dict[str, Any], environment: dict[str, str]) -> ServeConfig:
    """Of a file that Serve's own schema and our checks take."""
    schema = ServeDeploySchema.model_validate(serve)
    (application,) = schema.applications
    assert application.import_path == "disagg.app.build:build"
    return parse_config(filled_in(application.args, environment))


def check_pods(service: dict[str, Any]) -> ServeConfig:
    """Pods have what their workers ask for; returns what these are built with."""
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [group["template"]["spec"]["containers"][0] for group in groups]
    names = [[each["name"] for each in container["env"]] for container in containers]
    assert names == [names[0]] * len(groups)  # Serve's processes read them on every pod

    config = config_of(yaml.safe_load(spec["serveConfigV2"]), dict.fromkeys(names[0], "secret"))
    assert config.cluster_key == config.http.api_key == "secret"
    sized = {role: pool for role, pool in config.tiers[0].pools.items() if pool.num_replicas}
    assert sorted(sized) == sorted(group["groupName"] for group in cluster["workerGroupSpecs"])
    for group in cluster["workerGroupSpecs"]:
        pool = sized[group["groupName"]]
        given = yaml.safe_load(yaml.safe_load(group["rayStartParams"]["resources"]))
        assert pool.resources == given == {group["groupName"]: 1}
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == pool.num_gpus
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_s
        assert group["minReplicas"] <= pool.num_replicas <= group["maxReplicas"]
    return config
