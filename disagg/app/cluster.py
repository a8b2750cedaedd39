"""Ray for the command line: start or join a cluster, deploy, watch, stop."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.schema import ApplicationStatus

from disagg.app import private_ray, start_board
from disagg.app.autoscaling import INGRESS
from disagg.app.build import build_application
from disagg.app.gpus import gpus_of_cluster, nodes_of_cluster
from disagg.app.haproxy import HOST_FOR_SERVE, HAProxyWatch
from disagg.app.watch import Say, Watch
from disagg.config import HttpConfig, ServeConfig, url_of
from disagg.devices import see_only
from disagg.errors import StartupError
from disagg.messages import StartsByPool

APPLICATION = "disagg"
DRAIN_MARGIN_S = 5.0
STOP_PERIOD_S = 0.2
NUM_RAY_STARTS = 4
_TOO_SLOW = "timed out during startup"  # Ray's message after 30 s, a limit that is not configurable
logger = logging.getLogger(__name__)

_FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


class Cluster:
    """The Ray cluster that the command uses: a local one or a running one.

    Args:
        address: address of a running cluster; None starts one on this machine, on loopback only.
        scratch: directory for the files of a local cluster; the caller removes it.
    """

    # Of a running cluster. Serve's host and port cannot be changed; None if it does not run.
    gpus, nodes = staticmethod(gpus_of_cluster), staticmethod(nodes_of_cluster)
    http_address = staticmethod(private_ray.serve_address)

    def __init__(self, address: str | None, scratch: Path) -> None:
        self._address = address
        self._scratch = scratch
        self._board: start_board.Board | None = None
        self._has_left = False
        self._is_serving = False
        # Serve keeps the version of our ingress, also if its controller is replaced.
        self._version = secrets.token_hex(8)
        self._is_deployed = False
        self._url = ""
        self._host = ""
        files = scratch / "h"  # HAProxy's files; they exist if we run HAProxy
        self._haproxy = files if address is None and files.exists() else None

    def connect(self, device_ids: Sequence[str] = ()) -> None:
        """Start Ray, or join a running cluster. Raises `StartupError` if that fails.

        Args:
            device_ids: the GPUs of a local cluster.
        """
        try:
            if self._address is None:
                self._start_local(device_ids)
            else:
                self._join()
        except Exception as error:  # Ray raises a plain Exception if its node is late
            if self._address is None:
                raise StartupError(f"Ray did not start: {_first_sentence(error)}") from error
            raise StartupError(
                f"Cannot join the Ray cluster at {self._address}: {_first_sentence(error)}"
                f"{_advice(error)}",
                param="ray_address",
            ) from error

    def start(self, http: HttpConfig) -> None:
        """Start Ray Serve. Raises `StartupError` if it does not start."""
        self._url, self._host = url_of(http), http.host
        self._is_serving = True
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        host = http.host if self._haproxy is None else HOST_FOR_SERVE
        # HAProxy serves HTTPS to clients, and uses HTTP to the ingresses behind it.
        certificate = (
            {"ssl_certfile": http.ssl_certfile, "ssl_keyfile": http.ssl_keyfile}
            if self._haproxy is None
            else {}
        )
        private_ray.wait_longer_for_proxies()
        try:
            serve.start(
                proxy_location=ProxyLocation.EveryNode,
                # There is no request_timeout_s, because it would cut streams without an error.
                http_options=HTTPOptions(host=host, port=http.port, **certificate),
            )
        except (RayError, TimeoutError) as error:
            raise StartupError(
                "Ray Serve's HTTP proxy did not start; check whether the machine is overloaded."
                f" Serve reports: {str(error).splitlines()[0]}"
            ) from error

    def _join(self) -> None:
        ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)

    def _start_local(self, device_ids: Sequence[str]) -> None:
        """Start Ray here, with up to `NUM_RAY_STARTS` attempts if the machine is too slow."""
        see_only(device_ids)
        this = psutil.Process()
        before = set(this.children(recursive=True))
        for num_left in reversed(range(NUM_RAY_STARTS)):
            try:
                return self._init_local(len(device_ids))
            except Exception as error:  # Ray raises a plain Exception
                if not num_left or _TOO_SLOW not in str(error):
                    raise
                logger.warning("Ray did not start in time, so it is started again: %s", error)
                for process in set(this.children(recursive=True)) - before:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    def _init_local(self, num_gpus: int) -> None:
        private_ray.leave_out_observers()
        ray.init(
            address="local",
            num_gpus=num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._scratch / "ray"),
        )

    def check_is_free(self) -> None:
        """Raises `StartupError` if the cluster already has an application of our name."""
        found = serve.status().applications.get(APPLICATION)
        if found is not None:
            raise StartupError(
                f"The Ray cluster at {self._address} already has an application named"
                f" {APPLICATION} (status {found.status.value}). Stop the `disagg serve` that"
                " started it, or run `serve shutdown`, or pass --replace to end it first.",
                param="ray_address",
            )

    def end_other(self, drain_s: float, stop: threading.Event) -> bool:
        """End the application of our name that runs there.

        Args:
            drain_s: time that its running requests have to finish.
            stop: set meanwhile, it lets the application serve again.

        Returns:
            Whether there was one and it has ended.
        """
        if APPLICATION not in serve.status().applications:
            return False
        self.drain(drain_s, stop)
        if stop.is_set():
            return False
        serve.delete(APPLICATION)
        return True

    def deploy(self, config: ServeConfig) -> None:
        """Deploy the application to Serve without waiting; `wait` waits for it.

        Raises:
            StartupError: another command deployed its application after the first check.
        """
        if self._address is not None:
            self.check_is_free()
        self._board = start_board.Board()  # created before any worker looks for it
        application = build_application(config, version=self._version)
        self._is_deployed = True
        serve.run_many(
            [serve.RunTarget(application, name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def wait(
        self, progress: Callable[[StartsByPool], None], timeout_s: float, stop: threading.Event
    ) -> None:
        """Wait until every replica runs. Calls `progress` with their progress; `stop` ends the
        wait.

        Raises:
            StartupError: a replica cannot start, with the replica's own message.
        """
        board, deadline = self._board, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if stop.wait(0.2):
                return
            application = serve.status().applications.get(APPLICATION)
            if board is not None:  # `deploy` makes it
                progress(board.read())  # after the status: what is running has said so
            if application is None:
                continue
            if application.status is ApplicationStatus.RUNNING:
                if board is not None:
                    board.close()
                return
            messages = [each.message for each in application.deployments.values()]
            refusal = _own_words([application.message, *messages])
            if refusal is not None:  # Serve would retry, but such an error is permanent
                raise StartupError(refusal)
            if application.status in _FAILED:
                raise StartupError("\n".join([application.message, *messages]))
        raise StartupError(
            f"The workers did not start within {timeout_s:.0f} s; see their logs in the log"
            " directory."
        )

    def watch(self, say: Say, stop: threading.Event) -> Watch:
        """Start to watch the processes of the application."""
        if self._address is not None:
            return Watch(None, None, self._url, say, stop)
        haproxy = (
            HAProxyWatch(self._haproxy, self._host, say) if self._haproxy is not None else None
        )
        return Watch(private_ray.local_node(), haproxy, self._url, say, stop)

    def is_replaced(self) -> bool:
        """Whether somebody else has replaced our application by another one."""
        try:
            self._come_back()
            version = private_ray.version_of(INGRESS, APPLICATION)
        except KeyError:  # not created yet, or removed
            return False
        except Exception as error:  # the next call to Ray or Serve fails, too
            logger.exception("Cannot find out whose application runs: %r", error)
            return False
        return version != self._version

    def drain(self, timeout_s: float, stop: threading.Event | None = None) -> tuple[int, int]:
        """Make every ingress finish its running requests and refuse new ones.

        Args:
            stop: set meanwhile, it ends the drain, and the ingresses accept requests again.

        Returns:
            The number of requests that finished, and of those that were cut after `timeout_s`.
        """
        try:
            self._come_back()
            handle = private_ray.broadcaster_of(APPLICATION)
            answers = _results(
                handle.broadcast("drain", timeout_s), timeout_s + DRAIN_MARGIN_S, stop
            )
            if stop is not None and stop.is_set():
                handle.broadcast("serve_again").results(timeout_s=DRAIN_MARGIN_S)
        except Exception as error:  # whatever failed, the application is stopped next
            logger.exception("Cannot drain the ingresses, so requests are cut off: %r", error)
            return 0, 0
        return sum(ended for ended, _ in answers), sum(cut for _, cut in answers)

    def leave(self) -> None:
        """Disconnect from a running cluster until `stop`.

        The application does not need this process, and Ray would end it, after a minute at full CPU
        load, if it were connected while the cluster's head is down.
        """
        if self._address is not None:
            ray.shutdown()
            self._has_left = True

    def stop(self) -> None:
        """Stop the application, and Ray if this object started it."""
        self._come_back()
        if not ray.is_initialized():
            return
        if self._is_serving and self._address is None:
            serve.shutdown()
        elif self._is_deployed and not self.is_replaced():
            serve.delete(APPLICATION)
            if self._board is not None:
                self._board.close()  # of a start that was given up
        ray.shutdown()

    def _come_back(self) -> None:
        if self._has_left:
            self._join()
            self._has_left = False


def _results(
    answers: DeploymentBroadcastResponse, timeout_s: float, stop: threading.Event | None
) -> list[tuple[int, int]]:
    """What the replicas return; nothing if `stop` is set before. Raises `TimeoutError`."""
    deadline = time.monotonic() + timeout_s
    while stop is None or not stop.is_set():
        left_s = max(0.0, deadline - time.monotonic())
        try:
            found: list[tuple[int, int]] = answers.results(
                timeout_s=left_s if stop is None else min(left_s, STOP_PERIOD_S)
            )
            return found
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
    return []


def _advice(error: Exception) -> str:
    if "auth" not in f"{type(error).__name__} {error}".lower():
        return ""
    return (
        " The cluster requires a token: copy ~/.ray/auth_token from its head node to this machine,"
        " or set RAY_AUTH_TOKEN (docs/reliability.md)."
    )


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")[:300] + "."


def _own_words(messages: list[str]) -> str | None:
    """Extract the message of our own error from Serve's message with a traceback."""
    for line in "\n".join(messages).splitlines():
        name, _, sentence = line.strip().partition(": ")
        if name.startswith("disagg.errors.") and sentence:
            return sentence
    return None
