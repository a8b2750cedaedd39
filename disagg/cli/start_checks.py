"""Checks that run before Ray starts, so that a failure is reported at once and clearly."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disagg.api_keys import read_key_file
from disagg.app.address import check_address
from disagg.app.haproxy import find_haproxy
from disagg.cli.reports import Order
from disagg.config import HttpConfig, ServeConfig
from disagg.config_checks import check_secrets
from disagg.errors import NotEnoughMemory, StartupError
from disagg.host import read_memory
from disagg.kvtransfer.ucx import ucx_settings

_EVERY_ADDRESS = "0.0.0.0", "::"
MIN_OPEN_FILES = 1024  # the largest process of Ray and Serve opens some hundreds of files
MIN_SHARED_MEMORY_NBYTES = 64 << 20  # Docker's default for a container
MIN_ADDRESS_SPACE_NBYTES = 4 << 30  # torch alone maps 2.7 GB, and Ray its objects beside it
MIN_DISK_NBYTES = 256 << 20  # for the logs and sockets of Ray; KV is never on disk


def check_before_ray(order: Order) -> None:
    """Check what can be checked before Ray is imported. Raises `StartupError`."""
    check_secrets(order.config, order.config.http.host)
    find_address(order.config.http)
    check_certificate(order.config.http)
    if order.config.http.api_keys_file is not None:
        read_key_file(order.config.http.api_keys_file)
    if order.config.redis_url is not None:
        from disagg.store.redis_store import RedisBoard

        # The URL only: the deployment may start while the Redis server is down.
        RedisBoard(order.config.redis_url, secret=b"")
    if order.ray_address is not None:
        check_address(order.ray_address)
    else:
        if not order.is_restart:
            check_port(order.config.http)
        check_one_node(order.config)
        ucx_settings(order.config.transfer_interface, {})  # raises if there is no such interface
        check_machine(Path(order.directory))
    if order.haproxy and order.ray_address is None:
        find_haproxy()


def check_one_node(config: ServeConfig) -> None:
    """Refuse workers over several nodes on a Ray instance that this command starts itself."""
    for tier in config.tiers:
        for role, pool in tier.pools.items():
            if tier.num_nodes(pool) > 1:
                raise StartupError(
                    f"The {role} workers of {tier.name!r} have nnodes = {tier.num_nodes(pool)}, but"
                    " without --ray-address everything runs on this machine. Start Ray on the"
                    " nodes and give its address with --ray-address"
                    " (docs/install.md#two-machines).",
                    param="nnodes",
                )


def find_address(http: HttpConfig) -> tuple[Any, ...]:
    """The first socket address of the HTTP server, as `socket.getaddrinfo` returns it."""
    if not http.port:
        raise StartupError(
            "Port 0 is not supported, because clients must know the port; choose one from 1 to"
            " 65535.",
            param="port",
        )
    try:
        found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the library raises UnicodeError for a long name
        why = error.strerror if isinstance(error, OSError) else "it is not a valid host name"
        raise StartupError(
            f"{http.host!r:.100} is not an address of this machine: {why}.", param="host"
        ) from error
    return found[0]


def check_port(http: HttpConfig) -> None:
    family, kind, protocol, _, address = find_address(http)
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StartupError(
            f"Cannot listen on {http.host}:{http.port}: {error.strerror}."
            " Stop the other program or choose another port.",
            param="port",
        ) from error


def check_serve_address(config: ServeConfig, running: tuple[str, int] | None) -> None:
    """Check the HTTP address on a running cluster.

    Args:
        running: host and port of a Ray Serve that runs there already, which cannot be changed.
    """
    if running is None:
        return check_port(config.http)
    host, port = running
    if port != config.http.port or host not in (config.http.host, *_EVERY_ADDRESS):
        raise StartupError(
            f"Ray Serve already runs on this cluster and listens on {host}:{port}. Pass"
            f" --host {host} --port {port}, or end Serve and all its applications with"
            " `serve shutdown`.",
            param="port",
        )
    check_secrets(config, host)


def hold_port(http: HttpConfig) -> socket.socket:
    """Keep other commands from starting on the same address while the returned socket is open.

    Two commands that start at the same time both find the port free, and HAProxy would share it
    between them, so that each gets some of the connections. The socket is in Linux's abstract
    namespace, so it leaves no file.

    Raises:
        StartupError: another command holds it.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0disagg-serve-{http.host}-{http.port}")
    except OSError as error:
        held.close()
        raise StartupError(
            f"Another `disagg serve` already uses {http.host}:{http.port}; choose another port.",
            param="port",
        ) from error
    return held


def check_certificate(http: HttpConfig) -> None:
    if http.ssl_certfile is None and http.ssl_keyfile is None:
        return
    if http.ssl_certfile is None or http.ssl_keyfile is None:
        raise StartupError(
            "HTTPS needs both --ssl-certfile and --ssl-keyfile.", param="ssl_certfile"
        )
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            http.ssl_certfile, http.ssl_keyfile, password=lambda: ""
        )
    except OSError as error:  # SSLError is one
        raise StartupError(
            f"{http.ssl_certfile} and {http.ssl_keyfile} must be a PEM certificate and its private"
            f" key without a password: {error.strerror or error}.",
            param="ssl_certfile",
        ) from error


def check_machine(directory: Path) -> None:
    """Check open files, address space, shared memory and disk.

    Ray fails late and unclearly without them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # child processes inherit it
    elif soft < MIN_OPEN_FILES:
        raise StartupError(
            f"The limit of open files is {soft}, but Ray needs {MIN_OPEN_FILES}; raise it with"
            f" `ulimit -n {4 * MIN_OPEN_FILES}`."
        )
    space_nbytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space_nbytes != resource.RLIM_INFINITY and space_nbytes < MIN_ADDRESS_SPACE_NBYTES:
        raise StartupError(
            f"A process may have only {space_nbytes >> 20} MiB of address space, too little for"
            " Ray and the workers; lift the limit with `ulimit -v unlimited` (systemd:"
            " LimitAS=infinity)."
        )
    free_nbytes = shutil.disk_usage(directory).free
    if free_nbytes < MIN_DISK_NBYTES:
        raise StartupError(
            f"{directory.parent} has only {free_nbytes >> 20} MiB left, and Ray keeps its files"
            f" there; free at least {MIN_DISK_NBYTES >> 20} MiB."
        )
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    if not os.access(shared, os.W_OK):
        raise StartupError(
            f"Cannot write to {shared}, where Ray keeps its objects; make it writable."
        )
    free_nbytes = shutil.disk_usage(shared).free
    if free_nbytes < MIN_SHARED_MEMORY_NBYTES:
        raise StartupError(
            f"{shared} has only {free_nbytes >> 20} MiB left, and workers and Ray share memory"
            f" there; give it at least {MIN_SHARED_MEMORY_NBYTES >> 20} MiB (Docker:"
            " --shm-size=1g)."
        )


def check_models(
    config: ServeConfig,
    gpu_nbytes: int | None = None,
    is_here: bool = True,
    gpu_name: str = "",
    tell: Callable[[str], object] = lambda sentence: None,
) -> None:
    """Refuse models that cannot be served. The arguments are those of `check_tier`."""
    from disagg.ingress.core import served_models
    from disagg.worker.check import check_tier

    served = served_models(config)
    for tier in config.tiers:
        for sentence in served[tier.name].remarks:
            tell(sentence)
    needed_nbytes = sum(
        check_tier(tier, gpu_nbytes, is_here, gpu_name, tell) for tier in config.tiers
    )
    total_nbytes, _ = read_memory()
    if is_here and needed_nbytes > total_nbytes > 0:
        raise NotEnoughMemory(
            f"The workers would take {needed_nbytes / 1e9:.1f} GB of memory for KV and their"
            f" largest steps, but this machine has {total_nbytes / 1e9:.1f} GB. Lower"
            " kv_cache_memory_bytes, num_gpu_blocks_override, kv_offloading_size or"
            " max_num_batched_tokens, or start fewer workers."
        )
