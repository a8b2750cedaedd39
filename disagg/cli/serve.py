"""Serve one or more models over HTTP, on a Ray of its own or on a running cluster."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markup import escape

from disagg.cli.embedded_redis import EmbeddedRedis, keep_running
from disagg.cli.ports import free_port
from disagg.cli.serve_arguments import add_arguments, config_from_arguments, raw_config
from disagg.cli.start_lines import StartLog, one_line
from disagg.config import AUTO, ServeConfig, TierConfig, parse_config
from disagg.errors import StartupError
from disagg.kernels.devices import Gpus, gpus_here
from disagg.messages import StartsByPool
from disagg.planner.device_plan import DevicePlan, plan_devices, unsized_tiers

READY_TIMEOUT_S = 600.0

__all__ = ["add_arguments", "config_from_arguments", "run"]

console = Console(highlight=False)


def run(arguments: argparse.Namespace) -> int:
    """Start everything, print one ready line, serve until SIGINT or SIGTERM, stop everything."""
    began_s = time.monotonic()
    raw = raw_config(arguments)
    config = parse_config(raw)
    _check_port(config)
    is_here = arguments.ray_address is None
    plan = _plan(config, gpus_here(), raw) if is_here else DevicePlan(config)
    _check_models(plan.config, plan.gpu_nbytes, is_here)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(_scratch_directory()))
        config, redis = _with_store(plan.config, cleanup, scratch)
        cluster = _cluster(arguments, scratch)
        with _phase("starting Ray"):
            cleanup.callback(cluster.stop)
            cluster.start(config.http, plan.device_ids)
        if not is_here:
            config = _plan(config, cluster.gpus(), raw).config
        with _phase("starting workers", _pool_sizes(config)) as tell:
            cluster.deploy(config)
            cluster.wait(tell, READY_TIMEOUT_S, stop)
            ready = None if stop.is_set() else _wait_until_ready(config, stop)
            cluster.leave()
        if ready is not None:
            _print_ready_line(config, ready, time.monotonic() - began_s)
        if redis is None:
            stop.wait()
        else:
            keep_running(redis, stop, console.print)
        console.print("stopping: finishing what is running (again Ctrl-C: at once)")
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return 0


@contextmanager
def _phase(
    name: str, pool_sizes: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Callable[[StartsByPool], None]]:
    """Show a part of the start: one line that changes on a terminal, rare lines in a log."""
    if console.is_terminal:
        with console.status(name) as status:
            yield lambda pools: status.update(escape(one_line(pools, pool_sizes)))
        return
    log = StartLog(pool_sizes)

    def tell(pools: StartsByPool) -> None:
        for line in log.news(pools):
            console.print(line, markup=False, soft_wrap=True)

    console.print(name)
    yield tell


def _pool_sizes(config: ServeConfig) -> dict[str, int]:
    return {
        f"{tier.name}-{role}": pool.num_replicas
        for tier in config.tiers
        for role, pool in (("prefill", tier.prefill), ("decode", tier.decode))
        if pool.num_replicas > 0
    }


def _scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """In /tmp whatever TMPDIR says: sockets lie in it, whose paths may have 97 characters only."""
    return tempfile.TemporaryDirectory(
        prefix="disagg-", dir="/tmp" if os.path.isdir("/tmp") else None, ignore_cleanup_errors=True
    )


def _check_port(config: ServeConfig) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.http.host, config.http.port))
        except OSError as error:
            raise StartupError(
                f"Cannot listen on {config.http.host}:{config.http.port}: {error.strerror}."
                " Stop the other program or choose another port.",
                param="port",
            ) from error


def _plan(config: ServeConfig, gpus: Gpus, raw: Mapping[str, Any]) -> DevicePlan:
    """Which workers are on which devices; says so."""
    plan = plan_devices(config, gpus, unsized_tiers(raw, config))
    console.print(plan.line, markup=False, soft_wrap=True)
    return plan


def _check_models(config: ServeConfig, gpu_nbytes: int | None = None, is_here: bool = True) -> None:
    """Refuse a model that cannot be served before any process starts.

    Args:
        gpu_nbytes: memory of each GPU, where it is known.
        is_here: whether workers run on this machine.
    """
    from disagg.api.ingress import served_models
    from disagg.worker.check import check_tier

    for tier in config.tiers:
        check_tier(tier, gpu_nbytes, is_here)
    served_models(config)


def _with_store(
    config: ServeConfig, cleanup: ExitStack, scratch: Path
) -> tuple[ServeConfig, EmbeddedRedis | None]:
    import msgspec

    if config.redis_url is not None or not config.cold_tier_nbytes:
        return config, None
    redis = EmbeddedRedis(scratch / "redis", max_memory_nbytes=config.cold_tier_nbytes)
    redis.start()
    cleanup.callback(redis.stop)
    return msgspec.structs.replace(config, redis_url=redis.url), redis


def _cluster(arguments: argparse.Namespace, scratch: Path) -> Any:
    # Serve reads its switches from the environment when it is first imported.
    if arguments.haproxy:
        os.environ.update(haproxy_environment(scratch / "h"))
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    # Ray runs its workers at nice 15, behind whatever else the machine does; ours are the service.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Serve kills a proxy that is not there after 5 s, and with it a start on a busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    from disagg.app.cluster import Cluster

    return Cluster(arguments.ray_address, scratch)


def haproxy_environment(directory: Path) -> dict[str, str]:
    """Switches of Serve's HAProxy mode, with every path of its own so that clusters can share a
    machine. Read by Ray processes at start, so they must be set before Ray is imported."""
    directory.mkdir(parents=True, exist_ok=True)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }


def _url(config: ServeConfig) -> str:
    host = "127.0.0.1" if config.http.host == "0.0.0.0" else config.http.host
    return f"http://{host}:{config.http.port}"


def _wait_until_ready(config: ServeConfig, stop: threading.Event) -> dict[str, Any] | None:
    """A body of `GET /ready` once every ingress reaches every worker; None when told to stop."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    last = "none"
    complete: set[str] = set()  # ingresses; the proxy decides which one answers
    while time.monotonic() < deadline and not stop.wait(0.1):
        try:
            with urllib.request.urlopen(f"{_url(config)}/ready", timeout=5) as answer:  # noqa: S310
                body: dict[str, Any] = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            last = error.read().decode(errors="replace")[:500]
        except OSError as error:
            last = str(error)
        else:
            last = str(body)
            if all(_is_complete(tier, body["pools"][tier.name]) for tier in config.tiers):
                complete.add(body["ingress"])
            if len(complete) == config.num_ingress:
                return body
    if stop.is_set():
        return None
    raise StartupError(f"Not ready after {READY_TIMEOUT_S:.0f} s; the last answer was: {last}.")


def _is_complete(tier: TierConfig, pool: dict[str, int]) -> bool:
    wanted = (tier.prefill.num_replicas, tier.decode.num_replicas)
    return pool["num_prefill"] >= wanted[0] and pool["num_decode"] >= wanted[1]


def _print_ready_line(config: ServeConfig, ready: dict[str, Any], seconds: float) -> None:
    url = _url(config)
    pools = "; ".join(
        f"{name}: {pool['num_prefill']} prefill + {pool['num_decode']} decode,"
        f" {pool['num_kv_blocks']} KV blocks of {pool['block_size']} tokens, steps of up to"
        f" {pool['max_num_seqs']} sequences and {pool['max_num_batched_tokens']} tokens"
        for name, pool in ready["pools"].items()
    )
    console.print(f"ready after {seconds:.0f} s: {url}/v1  ({pools})", soft_wrap=True)
    model = config.tiers[0].name if config.cascade is None else AUTO
    console.print(f"\n  {curl_example(url, model, config.http.api_key)}\n", soft_wrap=True)


def curl_example(url: str, model: str, api_key: str | None) -> str:
    body = {
        "model": model,
        "messages": [
            {
                "role": "user",
                "content": "The code of Anna is 4821. The code of Peter is 1937."
                " What is the code of Anna?",
            }
        ],
        "stream": True,
        "temperature": 0,
    }
    key = " -H 'Authorization: Bearer $DISAGG_API_KEY'" if api_key else ""
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key}"
        f" -d '{json.dumps(body)}'"
    )
