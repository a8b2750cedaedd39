"""`disagg serve --ray-address`: a guest lets go of a running cluster, and cleans up at its end."""

from __future__ import annotations

import httpx
import pytest

from disagg.config import EngineConfig
from tests.e2e.served import Served, served
from tests.e2e.single_engine import SingleEngine
from tests.e2e.test_deploy import RayNodes, ray_nodes
from tests.faults.system import until
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = "a prompt for a guest: "
MAX_TOKENS = 16


def is_guest(server: Served, nodes: RayNodes) -> bool:
    """Whether the cluster counts the command itself among those that use it."""
    jobs = httpx.get(f"http://127.0.0.1:{nodes.dashboard_port}/api/jobs/", timeout=10).json()
    return any(
        job["status"] == "RUNNING" and str(server.process.pid) == str(job["driver_info"]["pid"])
        for job in jobs
        if job["driver_info"] is not None
    )


def applications(nodes: RayNodes) -> dict[str, object]:
    url = f"http://127.0.0.1:{nodes.dashboard_port}/api/serve/applications/"
    found: dict[str, object] = httpx.get(url, timeout=10).json()["applications"]
    return found


def test_a_guest_leaves_serves_on_and_comes_back_to_clean_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    reference = SingleEngine(model, EngineConfig(dtype="float32", num_threads=1))
    directory = tmp_path_factory.mktemp("ray")
    with ray_nodes(directory, ()) as nodes:
        flags = ["--prefill", "1", "--decode", "1", "--dtype", "float32", "--num-threads", "1"]
        address = f"127.0.0.1:{nodes.gcs_port}"
        environment = {"RAY_AUTH_MODE": "disabled"}
        with served(
            [str(model), *flags, "--ray-address", address], directory, environment
        ) as server:
            until(lambda: not is_guest(server, nodes), 30, lambda: "it holds on to the cluster")
            assert list(applications(nodes)) == ["disagg"]
            body = {
                "messages": [{"role": "user", "content": PROMPT}],
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            text = answer["choices"][0]["message"]["content"]
            assert text == reference.chat(PROMPT, MAX_TOKENS)
        until(lambda: not applications(nodes), 60, lambda: "it left its application behind")
