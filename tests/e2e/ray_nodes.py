"""Ray nodes on this machine, as `ray start` makes them, and what is deployed to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil

from disagg.host import free_port
from tests import plain_http
from tests.e2e.command import until, with_stand_in

BIN = Path(sys.executable).parent
RAY_START = (
    *(BIN / "ray", "start", "--block", "--node-ip-address=127.0.0.1"),
    *("--disable-usage-stats", "--include-log-monitor=false"),
)
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 2.0  # Ray's own processes wait for each other, some of them for ever


class RayNodes:
    """Ray nodes on this machine, each a tree of processes with files of its own."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self.gcs_port, self.dashboard_port = free_port(), free_port()
        self._environment = {
            **os.environ,
            "PYTHONPATH": with_stand_in(),
            "DISAGG_TEST_NO_AGENTS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",  # as `disagg serve` does
            "OMP_NUM_THREADS": "1",
            # Nobody asks what ran when, and no worker is needed before it is asked for.
            "RAY_task_events_report_interval_ms": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # which is 0.1 by itself
            **environment,
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"127.0.0.1:{self.gcs_port}"
        token = self._environment.get("RAY_AUTH_TOKEN")
        # For requests to the dashboard.
        self.headers = {"authorization": f"Bearer {token}"} if token else {}

    def start_head(self, num_gpus: int = 0) -> None:
        self._start(
            "--head",
            f"--num-gpus={num_gpus}",
            f"--port={self.gcs_port}",
            f"--dashboard-port={self.dashboard_port}",
            f"--ray-client-server-port={free_port()}",
            f"--temp-dir={self._directory}",
            "--num-cpus=1",
            "--no-monitor",  # of Ray's autoscaler
        )

    def start_node(self, resource: str) -> None:
        """A node with 8 of a resource."""
        resources = f"--resources={json.dumps({resource: 8})}"
        self._start(f"--address={self.address}", "--num-cpus=1", resources)

    def _start(self, *flags: str) -> None:
        log = (self._directory / f"node-{len(self._nodes)}.log").open("wb")
        with log:
            node = subprocess.Popen(
                [*RAY_START, *flags], stdout=log, stderr=subprocess.STDOUT, env=self._environment
            )
        self._nodes.append(node)
        self._wait_for_nodes()  # two that start at once may take the same name for their sockets

    def _wait_for_nodes(self) -> None:
        url = f"http://127.0.0.1:{self.dashboard_port}/api/v0/nodes"

        def are_alive() -> bool:
            assert all(node.poll() is None for node in self._nodes), self.logs()
            try:
                answer = plain_http.get(url, timeout=5, headers=self.headers)
                found = answer.json()["data"]["result"]["result"]
            except (httpx.HTTPError, KeyError, TypeError, ValueError):
                return False
            return [each["state"] for each in found] == ["ALIVE"] * len(self._nodes)

        until(are_alive, READY_TIMEOUT_S, self.logs)

    def deploy(self, config: Path) -> None:
        address = f"http://127.0.0.1:{self.dashboard_port}"
        done = subprocess.run(
            [BIN / "serve", "deploy", config, "-a", address],
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def drain(self, number: int) -> None:
        """Ask Ray to drain a node, as the hook of a pod that ends does (deploy/kuberay)."""
        (raylet,) = (each for each in self.processes_of(number) if each.name() == "raylet")
        (node_id,) = (word for word in raylet.cmdline() if word.startswith("--node_id="))
        words = "drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message end"
        where = ["--address", self.address, "--node-id", node_id.partition("=")[2]]
        deadline = ["--deadline-remaining-seconds", "120"]
        command = [str(BIN / "ray"), *words.split(), *where, *deadline]
        subprocess.run(command, env=self._environment, check=True)

    def processes_of(self, number: int) -> list[psutil.Process]:
        return psutil.Process(self._nodes[number].pid).children(recursive=True)

    def processes(self) -> list[psutil.Process]:
        """The processes of all nodes."""
        return [each for number in range(len(self._nodes)) for each in self.processes_of(number)]

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self._directory.glob("node-*.log")))

    def stop(self) -> None:
        alive = [psutil.Process(node.pid) for node in self._nodes if node.poll() is None]
        family = [*alive, *(each for node in alive for each in node.children(recursive=True))]
        for process in family:
            with suppress(psutil.NoSuchProcess):  # they end each other meanwhile
                process.terminate()
        _, left = psutil.wait_procs(family, STOP_TIMEOUT_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for node in self._nodes:
            node.wait(10)


@contextmanager
def ray_nodes(
    directory: Path,
    resources: tuple[str, ...],
    num_gpus: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RayNodes]:
    """A head with so many GPUs, and a node with each of `resources`."""
    nodes = RayNodes(directory, environment)
    try:
        nodes.start_head(num_gpus)
        for each in resources:
            nodes.start_node(each)
        yield nodes
    finally:
        nodes.stop()


def wait_until_ready(url: str, nodes: RayNodes) -> None:
    last = ""

    def is_ready() -> bool:
        nonlocal last
        try:
            answer = plain_http.get(f"{url}/ready", timeout=5)
            last = answer.text
            pools = answer.json()["pools"].values() if answer.status_code == 200 else ()
        except (httpx.HTTPError, ValueError) as error:
            last, pools = str(error), ()
        return bool(pools) and all(pool["num_prefill"] and pool["num_decode"] for pool in pools)

    until(is_ready, READY_TIMEOUT_S, lambda: f"not ready: {last}\n{nodes.logs()}")
