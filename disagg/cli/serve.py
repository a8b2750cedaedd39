"""Serve one or more models over HTTP, on a Ray of its own or on a running cluster."""

from __future__ import annotations

import argparse
import json
import os
import secrets
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
from disagg.cli.start_lines import StartLog, one_line
from disagg.config import EngineConfig, ServeConfig, TierConfig, parse_config
from disagg.errors import StartupError
from disagg.messages import StartsByPool

DEFAULT_MODEL = "demo-large"
READY_TIMEOUT_S = 600.0

console = Console(highlight=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="*",
        help=f"model directories or bundled models, small to large (default: {DEFAULT_MODEL})",
    )
    _add_serving_arguments(parser.add_argument_group("serving"))
    _add_engine_arguments(parser.add_argument_group("engine (names follow vLLM)"))
    _add_cluster_arguments(parser.add_argument_group("cluster"))


def _add_serving_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="where HTTP listens")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--api-key", default=os.environ.get("DISAGG_API_KEY"))
    group.add_argument(
        "--ttft-slo-s",
        type=float,
        default=30.0,
        help="refuse a request whose first token is predicted to come later (default: 30)",
    )
    group.add_argument(
        "--served-model-name", nargs="*", default=[], help="one per model, in their order"
    )
    group.add_argument("--chat-template", help="path of a Jinja template")
    group.add_argument("--prefill", type=int, default=1, help="prefill workers per model")
    group.add_argument("--decode", type=int, default=1, help="decode workers per model")
    group.add_argument("--ingress", type=int, default=1, help="ingress replicas")


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", default="auto")
    group.add_argument("--device", default="auto")
    group.add_argument("--block-size", type=int)
    group.add_argument("--max-model-len", type=int)
    group.add_argument("--max-num-seqs", type=int, default=64)
    group.add_argument("--max-num-batched-tokens", type=int, default=1024)
    group.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    group.add_argument("--kv-cache-memory-bytes", type=int)
    group.add_argument("--num-gpu-blocks-override", type=int)
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    group.add_argument(
        "--num-threads",
        type=int,
        help="torch threads per worker on a CPU (default: the cores, shared out)",
    )


def _add_cluster_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", help="YAML or JSON of a whole deployment; replaces the flags")
    group.add_argument("--ray-address", help="a running cluster; default: start Ray here")
    group.add_argument("--redis-url", help="default: an embedded server")
    group.add_argument("--no-redis", action="store_true", help="no store: without the cold KV tier")
    group.add_argument("--cold-tier-bytes", type=int, default=1 << 30)
    group.add_argument("--transport", default="nixl", help="how KV moves: nixl or local")
    group.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="HAProxy in front of the ingress instead of Serve's Python proxy",
    )


def config_from_arguments(arguments: argparse.Namespace) -> ServeConfig:
    """Flags (or the file given by --config) as a checked configuration."""
    if arguments.config:
        raw = _read_config_file(Path(arguments.config))
        return parse_config({**raw, "cluster_key": raw.get("cluster_key") or _new_key()})
    models = arguments.model or [DEFAULT_MODEL]
    names = arguments.served_model_name
    if names and len(names) != len(models):
        raise StartupError(
            f"{len(models)} models but {len(names)} served names were given; give one per model.",
            param="served_model_name",
        )
    if arguments.num_threads is None and arguments.ray_address is None:
        # All workers are on this machine; more threads than cores cost several times their work.
        num_workers = len(models) * (arguments.prefill + arguments.decode)
        arguments.num_threads = max(1, (os.cpu_count() or 1) // max(1, num_workers))
    engine = {
        key: value
        for key in EngineConfig.__struct_fields__
        if (value := getattr(arguments, key, None)) is not None  # not every setting has a flag
    }
    tiers = [
        {
            "model": model,
            "served_model_name": name,
            "prefill": {"num_replicas": arguments.prefill},
            "decode": {"num_replicas": arguments.decode},
            "engine": engine,
            "chat_template": arguments.chat_template,
            "ttft_slo_s": arguments.ttft_slo_s,
        }
        for model, name in zip(models, names or [None] * len(models), strict=True)
    ]
    return parse_config(
        {
            "tiers": tiers,
            "http": {
                "host": arguments.host,
                "port": arguments.port,
                "api_key": arguments.api_key,
            },
            "num_ingress": arguments.ingress,
            "transport": arguments.transport,
            "redis_url": arguments.redis_url,
            "cold_tier_nbytes": 0 if arguments.no_redis else arguments.cold_tier_bytes,
            "link_host": None if arguments.ray_address else "127.0.0.1",
            "cluster_key": _new_key(),
        }
    )


def _new_key() -> str:
    return secrets.token_hex(32)


def _read_config_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise StartupError(f"Cannot read the configuration {path}: {error}.", param="config") from (
            error
        )
    if not isinstance(raw, dict):
        raise StartupError(f"The configuration {path} is not a mapping.", param="config")
    return raw


def run(arguments: argparse.Namespace) -> int:
    """Start everything, print one ready line, serve until SIGINT or SIGTERM, stop everything."""
    began_s = time.monotonic()
    config = config_from_arguments(arguments)
    _check_port(config)
    _check_models(config)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(_scratch_directory()))
        config, redis = _with_store(config, cleanup, scratch)
        cluster = _cluster(arguments, scratch)
        with _phase("starting Ray"):
            cleanup.callback(cluster.stop)
            cluster.start(config.http)
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


def _check_models(config: ServeConfig) -> None:
    """Refuse a model that cannot be served before any process starts."""
    from disagg.worker.check import check_tier

    for tier in config.tiers:
        check_tier(tier)


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
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port()),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
        f" {pool['num_kv_blocks']} KV blocks of {pool['block_size']} tokens"
        for name, pool in ready["pools"].items()
    )
    console.print(f"ready after {seconds:.0f} s: {url}/v1  ({pools})", soft_wrap=True)
    console.print(
        f"\n  {curl_example(url, config.tiers[0], config.http.api_key)}\n", soft_wrap=True
    )


def curl_example(url: str, tier: TierConfig, api_key: str | None) -> str:
    body = {
        "model": tier.name,
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
