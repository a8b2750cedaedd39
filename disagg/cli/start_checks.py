"""Checks before Ray starts. Each failure is reported at once, in one sentence."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from disagg.api_keys import read_key_file
from disagg.app.address import check_address
from disagg.cli.reports import Order
from disagg.config import HttpConfig, ServeConfig
from disagg.config_checks import check_secrets
from disagg.doctor.machine import read_memory
from disagg.errors import NotEnoughMemory, StartupError
from disagg.kvtransfer.ucx import ucx_settings
from disagg.router.autoscale import pools

MIN_OPEN_FILES = 1024  # Ray and Serve take some hundreds in their largest process
MIN_SHARED_MEMORY_NBYTES = 64 << 20  # what Docker gives a container
MIN_DISK_NBYTES = 256 << 20  # logs and sockets of Ray; KV is not on disk


def check_before_ray(order: Order) -> None:
    """Raises `StartupError` in words for the user."""
    check_secrets(order.config, order.config.http.host)
    check_port(order.config.http)
    check_certificate(order.config.http)
    if order.config.http.api_keys_file is not None:
        read_key_file(order.config.http.api_keys_file)
    if order.config.redis_url is not None:
        check_store(order.config.redis_url)
    if order.ray_address is not None:
        check_address(order.ray_address)
    else:
        check_one_node(order.config)
        ucx_settings(order.config.transfer_interface, {})  # the interface is one of this machine
        check_machine(Path(order.directory))
    if order.haproxy and order.ray_address is None:
        check_haproxy()


def check_one_node(config: ServeConfig) -> None:
    """Of a cluster that the command starts itself."""
    for tier in config.tiers:
        for role, pool in pools(tier):
            if tier.num_nodes(pool) > 1:
                raise StartupError(
                    f"The {role} workers of {tier.name!r} are to have nnodes = "
                    f"{tier.num_nodes(pool)}, and without --ray-address all runs on this machine."
                    " Start Ray on the nodes, and give its address (docs/deploying.md).",
                    param="nnodes",
                )


def check_port(http: HttpConfig) -> None:
    if not http.port:
        raise StartupError("Clients must know the port; choose one from 1 to 65535.", param="port")
    try:
        found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name that is too long is no text for the library
        why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise StartupError(
            f"{http.host!r:.100} is no address of this machine: {why}.", param="host"
        ) from error
    family, kind, protocol, _, address = found[0]
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


def hold_port(http: HttpConfig) -> socket.socket:
    """Keep others from starting on the same address, for as long as the socket is open.

    Two commands that start at once both find the port free, and HAProxy shares it with the other
    one: each would get some of the connections. The name of this socket is no file.

    Raises:
        StartupError: another command has it.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0disagg-serve-{http.host}-{http.port}")
    except OSError as error:
        held.close()
        raise StartupError(
            f"Another `disagg serve` starts on {http.host}:{http.port}; choose another port.",
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
            f"{http.ssl_certfile} and {http.ssl_keyfile} are not a certificate (PEM) and its key"
            f" without a password: {error.strerror or error}.",
            param="ssl_certfile",
        ) from error


def check_machine(directory: Path) -> None:
    """Open files, shared memory and disk: without them Ray fails late and in its own words."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # and for all that is started
    elif soft < MIN_OPEN_FILES:
        raise StartupError(
            f"A process may have only {soft} files open here, and Ray needs {MIN_OPEN_FILES};"
            f" raise the limit with `ulimit -n {4 * MIN_OPEN_FILES}`."
        )
    free_nbytes = shutil.disk_usage(directory).free
    if free_nbytes < MIN_DISK_NBYTES:
        raise StartupError(
            f"{directory.parent} has {free_nbytes >> 20} MiB left, and Ray keeps its files there;"
            f" make {MIN_DISK_NBYTES >> 20} MiB free."
        )
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    if not os.access(shared, os.W_OK):
        raise StartupError(f"{shared} cannot be written to, and Ray keeps its objects there.")
    free_nbytes = shutil.disk_usage(shared).free
    if free_nbytes < MIN_SHARED_MEMORY_NBYTES:
        raise StartupError(
            f"{shared} has {free_nbytes >> 20} MiB left, and workers and Ray share memory there;"
            f" give it {MIN_SHARED_MEMORY_NBYTES >> 20} MiB or more (Docker: --shm-size=1g)."
        )


def check_store(redis_url: str) -> None:
    """Whether the URL can be one; a server that is away is no reason not to start."""
    from disagg.store.redis_store import RedisBoard

    RedisBoard(redis_url, secret=b"")


def check_haproxy() -> None:
    from disagg.app.haproxy import find_haproxy

    find_haproxy()


def check_models(
    config: ServeConfig,
    gpu_nbytes: int | None = None,
    is_here: bool = True,
    gpu_name: str = "",
    tell: Callable[[str], object] = lambda sentence: None,
) -> None:
    """Refuse what cannot be served before any process starts. Arguments are as of `check_tier`."""
    from disagg.ingress.core import served_models
    from disagg.worker.check import check_tier

    served_models(config)
    wanted_nbytes = sum(
        check_tier(tier, gpu_nbytes, is_here, gpu_name, tell) for tier in config.tiers
    )
    has_nbytes, _ = read_memory()
    if is_here and wanted_nbytes > has_nbytes > 0:
        raise NotEnoughMemory(
            f"The workers would take {wanted_nbytes / 1e9:.1f} GB of memory for KV and their"
            f" largest steps, and this machine has {has_nbytes / 1e9:.1f} GB. Lower"
            " kv_cache_memory_bytes, num_gpu_blocks_override, kv_offloading_size or"
            " max_num_batched_tokens, or start fewer workers."
        )
