"""Workers of several GPUs or nodes on the nodes of a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.capacity.device_plan import with_devices
from disagg.capacity.node_check import Node, check_nodes
from disagg.config_checks import parse_config
from disagg.errors import StartupError


def check(nodes: list[Node], engine: dict[str, Any], **decode: Any) -> None:
    tier = {"model": "m", "engine": engine, "prefill": {"num_replicas": 0}, "decode": decode}
    config = parse_config({"tiers": [tier], "cluster_key": "key"})
    has_gpus = any("GPU" in node.resources for node in nodes)
    check_nodes(with_devices(config, has_gpus), nodes)


def of_gpus(*numbers: float) -> list[Node]:
    return [
        Node(f"10.0.0.{index}", {"CPU": 8.0, "GPU": number})
        for index, number in enumerate(numbers, start=1)
    ]


def test_what_fits_is_let_through() -> None:
    check(of_gpus(8, 8), {"tensor_parallel_size": 16, "nnodes": 2})
    check(of_gpus(8, 0, 8), {"tensor_parallel_size": 16}, nnodes=2)
    check(of_gpus(8), {"tensor_parallel_size": 8})
    check([Node("a", {"CPU": 1}), Node("b", {"CPU": 1})], {"tensor_parallel_size": 2, "nnodes": 2})
    check([], {})  # nodes may come when a worker asks for one


@pytest.mark.parametrize(
    ("nodes", "engine", "decode", "words"),
    [
        (
            of_gpus(8, 4),
            {"tensor_parallel_size": 16, "nnodes": 2},
            {},
            r"needs 2 nodes with 8 GPU each, and the cluster has 1 \(10\.0\.0\.1 has 8 GPU;"
            r" 10\.0\.0\.2 has 4 GPU\)\. Add nodes",
        ),
        (
            of_gpus(8, 8),
            {"tensor_parallel_size": 16},
            {},
            r"\(16 ranks\) needs 1 node with 16 GPU, .* has 0 .*Set nnodes to 2 to divide",
        ),
        (
            [Node("a", {"CPU": 1, "decode": 1}), Node("b", {"CPU": 1})],
            {"tensor_parallel_size": 2},
            {"nnodes": 2, "resources": {"decode": 1}},
            r"needs 2 nodes with 1 decode each, .* has 1 .*b has 0 decode",
        ),
        (
            [Node("a", {"CPU": 1})],
            {"tensor_parallel_size": 2, "nnodes": 2},
            {},
            r"needs 2 nodes, and the cluster has 1 \(a\)\. Add",
        ),
        (
            [Node("a", {"CPU": 1}), Node("head", {})],
            {"tensor_parallel_size": 2, "nnodes": 2},
            {},
            r"needs 2 nodes with 0\.001 CPU each, .* has 1 \(a has 1 CPU; head has 0 CPU\)\. Add",
        ),
    ],
)
def test_what_no_node_can_hold_is_refused(
    nodes: list[Node], engine: dict[str, Any], decode: dict[str, Any], words: str
) -> None:
    with pytest.raises(StartupError, match=words):
        check(nodes, engine, **decode)
