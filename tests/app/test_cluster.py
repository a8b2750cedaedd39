"""A cluster that is not ours is let go while it serves, and joined again to take ours down."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services
from ray._private.node import Node
from ray._version import version as installed
from ray.serve.schema import ApplicationStatus

from disagg.app import cluster, private_ray, raylet_agent
from disagg.app.cluster import Cluster
from disagg.config import HttpConfig
from disagg.config_checks import parse_config
from disagg.errors import StartupError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own import


CONFIG = parse_config({"tiers": [{"model": "demo-small"}], "cluster_key": "key"})


class FakeRay:
    """Writes down what is called; stands for `ray` and `ray.serve`."""

    __version__ = "2.99.0"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_up = False

    def init(self, address: str, **options: Any) -> None:
        self.calls.append(f"init {address}")
        self.is_up = True

    def shutdown(self) -> None:
        self.calls.append("leave")
        self.is_up = False

    def is_initialized(self) -> bool:
        return self.is_up

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: self.calls.append(name)


class FakeServe(FakeRay):
    """Has at most one application, which is known by the version of its ingress."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.version = ""
        self.while_draining: Callable[[], None] = lambda: None
        self.context = SimpleNamespace(_get_global_client=lambda: self)

    def shutdown(self) -> None:
        self.calls.append("shut down")

    def status(self) -> Any:
        running = SimpleNamespace(status=ApplicationStatus.RUNNING)
        return SimpleNamespace(applications={"disagg": running} if self.version else {})

    def run_many(self, targets: list[str], **options: Any) -> None:
        self.calls.append("deploy")
        (self.version,) = targets

    def RunTarget(self, version: str, **options: Any) -> str:
        return version

    def get_app_handle(self, name: str) -> Any:
        return SimpleNamespace(_init=lambda **options: None, broadcast=self._broadcast)

    def _broadcast(self, method: str, *arguments: float) -> Any:
        self.calls.append(method)
        return SimpleNamespace(results=self._results)

    def _results(self, timeout_s: float) -> list[tuple[int, int]]:
        if self.calls[-1] == "drain":
            self.while_draining()
        return [(1, 0)]

    def delete(self, name: str) -> None:
        self.calls.append(f"delete {name}")
        self.version = ""

    def get_deployment_info(self, name: str, application: str) -> tuple[Any, None]:
        assert (name, application) == ("Ingress", "disagg")
        if not self.version:
            raise KeyError(name)
        return SimpleNamespace(version=self.version), None


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    fake_serve = FakeServe(fake.calls)
    for module in (cluster, private_ray):
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "serve", fake_serve)
    board = SimpleNamespace(close=lambda: fake.calls.append("close the board"))
    monkeypatch.setattr("disagg.app.start_board.Board", lambda: board)
    monkeypatch.setattr(cluster, "build_application", lambda config, version: version)
    return fake


@pytest.fixture
def serve(ray: FakeRay) -> FakeServe:
    found = vars(cluster)["serve"]
    assert isinstance(found, FakeServe)
    return found


def joined(address: str | None = "head:6379") -> Cluster:
    made = Cluster(address, Path("/nowhere"))
    made.connect()
    return made


@pytest.mark.parametrize(
    ("address", "is_left", "calls"),
    [
        ("head:6379", True, "leave, init head:6379, delete disagg, close the board, leave"),
        ("head:6379", False, "delete disagg, close the board, leave"),
        (None, True, "shut down, leave"),
    ],
    ids=["of others, left and joined again", "of others, after a failed start", "of our own"],
)
def test_what_is_ended_of_a_cluster(
    ray: FakeRay, address: str | None, is_left: bool, calls: str
) -> None:
    ours = joined(address)
    ours.start(HttpConfig())
    ours.deploy(CONFIG)
    if is_left:
        ours.leave()
    ours.stop()
    assert not ray.is_up
    begun = [f"init {address or 'local'}", "start", "deploy"]
    assert ray.calls == [*begun, *calls.split(", ")]


def test_the_application_of_another_command_is_not_replaced(serve: FakeServe) -> None:
    serve.version = "of another"
    ours = joined()
    with pytest.raises(StartupError, match=r"already has .* disagg \(status RUNNING\).*--replace"):
        ours.check_is_free()
    with pytest.raises(StartupError, match="already has"):  # if it came after the check
        ours.deploy(CONFIG)
    ours.stop()
    assert serve.version == "of another" and "deploy" not in serve.calls


def test_an_application_that_replaced_ours_is_left_alone(serve: FakeServe) -> None:
    first, second = (Cluster("head:6379", Path("/nowhere")) for _ in range(2))
    first.connect()
    first.deploy(CONFIG)
    assert not first.is_replaced()
    first.leave()
    second.connect()
    assert second.end_other(1.0, threading.Event())
    second.deploy(CONFIG)
    second.leave()
    assert serve.version == second._version
    assert first.is_replaced()
    first.stop()
    assert serve.version == second._version
    second.stop()
    assert not serve.version


def test_an_application_serves_on_if_the_command_that_ends_it_is_stopped(
    serve: FakeServe,
) -> None:
    def interrupted() -> None:
        stop.set()
        raise TimeoutError

    stop = threading.Event()
    serve.version, serve.while_draining = "of another", interrupted
    ours = joined()
    assert not ours.end_other(60.0, stop)
    ours.stop()
    assert serve.version == "of another"
    assert serve.calls == ["init head:6379", "drain", "serve_again", "leave"]


def test_what_never_started_needs_no_end(ray: FakeRay) -> None:
    Cluster("head:6379", Path("/nowhere")).stop()
    assert ray.calls == []


def test_a_proxy_that_does_not_come_up_is_said_in_words(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(**options: Any) -> None:
        raise TimeoutError("HTTP proxies not available after 60s.")

    monkeypatch.setattr(vars(cluster)["serve"], "start", late, raising=False)
    with pytest.raises(StartupError, match="HTTP proxies not available"):
        cluster.Cluster(None, Path("/nowhere")).start(HttpConfig())


def test_who_has_not_begun_to_serve_takes_nothing_down(ray: FakeRay) -> None:
    """An application of our name on a cluster that refused us is somebody else's."""
    joined().stop()
    assert ray.calls == ["init head:6379", "leave"]


@pytest.mark.parametrize("num_slow", [0, 2, 4])
def test_a_node_that_is_too_slow_is_started_again(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, num_slow: int
) -> None:
    """Ray leaves the processes of such a start running. They are ended."""
    left: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        if len(left) < num_slow:
            left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception("The current node timed out during startup. This could happen because")
        ray.is_up = True

    monkeypatch.setattr(ray, "init", init)
    try:
        if num_slow == 4:
            with pytest.raises(StartupError, match="timed out during startup"):
                Cluster(None, Path("/nowhere")).connect()
        else:
            Cluster(None, Path("/nowhere")).connect()
        assert ray.is_up == (num_slow < 4)
        assert [each.wait(10) for each in left[:2]] == [-signal.SIGKILL] * min(num_slow, 2)
    finally:
        for each in left:
            each.kill()
            each.wait()


class FakeNode:
    def start_monitor(self) -> str:
        return "a process"


@pytest.mark.parametrize(
    ("version", "environment", "monitors", "has_stand_ins"),
    [
        ("", {}, None, True),
        ("", {"RAY_RUNTIME_ENV_HOOK": "a.hook"}, None, False),  # somebody needs an agent
        ("2.99.0", {}, "a process", False),
    ],
)
def test_what_observes_is_left_out_of_the_ray_that_was_tried_only(
    version: str,
    environment: dict[str, str],
    monitors: str | None,
    has_stand_ins: bool,
    ray: FakeRay,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    assert all(hasattr(Node, each) for each in private_ray.OBSERVERS)
    monkeypatch.setattr(cluster, "see_only", lambda device_ids: None)
    node = type("Node", (FakeNode,), {})
    monkeypatch.setattr(ray, "__version__", version or installed)
    name = "_build_python_executable_command_memory_profileable"
    of_agents = SimpleNamespace(**{name: getattr(services, name)})
    parts = SimpleNamespace(node=SimpleNamespace(Node=node), services=of_agents)
    monkeypatch.setattr(ray, "_private", parts, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    cluster.Cluster(None, tmp_path).connect()
    assert ray.calls == ["init local"]
    assert node().start_monitor() == monitors
    command = getattr(of_agents, name)("dashboard_agent", "session")
    assert (raylet_agent.__file__ in command) == has_stand_ins
