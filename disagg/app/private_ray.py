"""Everything private of Ray and Ray Serve that is used here: each version may change it.

Tried with Ray `TRIED`, which pyproject.toml requires. For another version, compare each function
with Ray's sources, run tests/app and tests/e2e, and change `TRIED`. Private, too, are: what Serve
writes for HAProxy, in which `haproxy_launcher` finds its places and names those that it does not
find; and `_node_ip_address` and `_temp_dir` of `ray.init` (`cluster`) and the name of a request
router's deployment (`routing`), which fail with an error if they are gone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.experimental import internal_kv

from disagg.app import raylet_agent

TRIED = "2.60."
# Methods of Ray's node that each start a Python process that we do not need, and that `ray.init`
# cannot disable: the API server of the dashboard, which sends usage statistics, and the monitors of
# logs and of Ray's autoscaler.
OBSERVERS = ("start_api_server", "start_log_monitor", "start_monitor")
# Variables with which a driver gives its workers a runtime environment, for which Ray has an agent.
RUNTIME_ENVIRONMENT = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")
# Functions of Serve's replica that start its servers.
SERVERS = {"grpc": "add_port_to_grpc_server", "http": "start_asgi_http_server"}
log = logging.getLogger(__name__)


def leave_out_observers() -> None:
    """Make a local Ray start without its observers, and with stand-ins for its raylet's agents, if
    its version was tried."""
    if not ray.__version__.startswith(TRIED):
        return
    for each in OBSERVERS:
        setattr(ray._private.node.Node, each, lambda *_, **__: None)
    if not any(map(os.environ.get, RUNTIME_ENVIRONMENT)):
        services = ray._private.services
        services._build_python_executable_command_memory_profileable = _agent_command


def _agent_command(agent: str, *_: Any, **__: Any) -> list[str]:
    """What executes an agent's script, which the raylet puts behind it with its flags."""
    return [sys.executable, "-I", "-S", raylet_agent.__file__, agent]


def wait_longer_for_proxies() -> None:
    """Make `serve.start` wait as long as Serve lets its proxies start, if that is above 60 s."""
    if ray.__version__.startswith(TRIED):
        from ray.serve._private import api, constants

        longest_s = max(constants.HTTP_PROXY_TIMEOUT, constants.PROXY_READY_CHECK_TIMEOUT_S)
        vars(api)["HTTP_PROXY_TIMEOUT"] = longest_s


def local_node() -> Any:
    """Ray's record of the processes that it started on this machine."""
    return ray._private.worker._global_node


def serve_address() -> tuple[str, int] | None:
    """Host and port of a Serve that runs already; None if none does."""
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    return None if client is None else (client.http_config.host, client.http_config.port)


def version_of(deployment: str, application: str) -> str:
    """The version of a deployment. Raises `KeyError` if there is none."""
    found, _ = serve.context._get_global_client().get_deployment_info(deployment, application)
    version: str = found.version
    return version


def with_version(deployment: serve.Deployment, version: str | None) -> serve.Deployment:
    """The deployment with a version of ours; None lets Serve make one."""
    return deployment.options(version=version, _internal=True)


def subscribe(handle: Any) -> None:
    """Make a handle follow its deployment now; otherwise its first call would do so."""
    handle._init()


def broadcaster_of(application: str) -> Any:
    """A handle of an application's ingress whose `broadcast` may be called in any thread."""
    handle = serve.get_app_handle(application)
    handle._init(_run_router_in_separate_loop=True)
    return handle


async def ask_all(handle: Any, method: str, *args: Any, timeout_s: float) -> list[Any]:
    """What the replicas of a handle return that answer in time; `results_async` wants all."""
    asked = await handle.broadcast(method, *args)._fetch_replica_results_async()
    answers = [asyncio.ensure_future(each.get_async()) for each in asked]
    done, late = await asyncio.wait(answers, timeout=timeout_s) if answers else (set(), set())
    for each in late:
        each.cancel()
    return [each.result() for each in answers if each in done and each.exception() is None]


def wrap_server(name: str, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper` in place of one of `SERVERS`, with the function as its first argument."""
    from ray.serve._private import replica

    name = SERVERS[name]
    serves = getattr(replica, name, None)
    if serves is None:
        log.warning(
            "This version of Ray has no %s (Ray %s has it), so Serve's own servers listen on more"
            " addresses than necessary: see docs/security.md for who can reach them.",
            name,
            f"{TRIED}x",
        )
    elif not isinstance(serves, functools.partial):  # not wrapped yet
        setattr(replica, name, functools.partial(wrapper, serves))


_NAMESPACE = b"disagg"


def put_shared(key: str, value: bytes) -> None:
    """Keep a small value in Ray's GCS, where all processes of the cluster find it."""
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_NAMESPACE)


def get_shared(key: str) -> bytes | None:
    found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_NAMESPACE)
    return found


def get_all_shared(prefix: str) -> Mapping[str, bytes]:
    """The values whose keys begin with `prefix`, by key."""
    keys = internal_kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)
    found = ((key.decode(), get_shared(key.decode())) for key in keys)
    return {key: value for key, value in found if value is not None}


def remove_shared(prefix: str) -> None:
    """Remove the values whose keys begin with `prefix`."""
    internal_kv._internal_kv_del(prefix.encode(), del_by_prefix=True, namespace=_NAMESPACE)
