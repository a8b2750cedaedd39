"""Measures the resident memory of a worker process without its model and its KV cache.

    python -m bench.worker_memory [--tiny]

`disagg serve` runs with demo-small (1.8 MB) and a cache of 4 MiB, and one request has gone
through a prefill and a decode worker. So the figures are those of the interpreter, torch, Ray, NIXL
and disagg. RSS counts shared pages in every process, PSS divides them, USS leaves them out. The
rows below are bare interpreters that import the parts one after the other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from bench.processes import find
from bench.report import finish, print_table
from disagg.cli.ports import free_port

TARGET_MB = 900
CACHE_NBYTES = 4 << 20
MODEL = "demo-small"
START_TIMEOUT_S = 120.0
PARTS = {
    "ingress": "ServeReplica:disagg:Ingress",
    "prefill worker": f"ServeReplica:disagg:{MODEL}-prefill",
    "decode worker": f"ServeReplica:disagg:{MODEL}-decode",
}
IMPORTS = (
    ("python", "pass"),
    ("+ msgspec, our messages", "import disagg.messages"),
    ("+ torch", "import disagg.messages, torch"),
    ("+ our engine", "import torch, disagg.engine.device.runner, disagg.worker.worker"),
    ("+ NIXL", "import torch, disagg.engine.device.runner, disagg.worker.worker, nixl"),
    (
        "+ Ray Serve",
        "import torch, disagg.engine.device.runner, disagg.worker.worker, nixl,"
        " disagg.app.deployments",
    ),
)


def figures(process: psutil.Process) -> dict[str, float]:
    memory = process.memory_full_info()
    return {f"{kind} MB": getattr(memory, kind.lower()) / 1e6 for kind in ("RSS", "PSS", "USS")}


def of_imports() -> list[dict[str, Any]]:
    """A row for each step of importing."""
    rows = []
    for name, statement in IMPORTS:
        with _child(["-c", f"{statement}\nprint('ready', flush=True)\ninput()"]) as process:
            rows.append({"process": name, **figures(process)})
    return rows


@contextmanager
def _child(arguments: list[str]) -> Iterator[psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("a process did not start; its words are above")
        yield psutil.Process(process.pid)
    finally:
        process.communicate("\n", timeout=60)


def of_workers() -> list[dict[str, Any]]:
    """A row for each process of ours in a running system."""
    with _served() as (url, server):
        _ask(url)
        return [
            {"process": part, **figures(process)}
            for part, mark in PARTS.items()
            for process in find(server, mark)
        ]


@contextmanager
def _served() -> Iterator[tuple[str, psutil.Process]]:
    port = free_port()
    flags = f"--port {port} --no-redis --no-haproxy --num-threads 1 --max-model-len 512"
    cache = f"--kv-cache-memory-bytes {CACHE_NBYTES}"
    process = subprocess.Popen(
        [sys.executable, "-m", "disagg.cli.main", "serve", MODEL, *flags.split(), *cache.split()],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("disagg serve did not start")
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:  # noqa: S310
            body: bytes = answer.read()
            return b'"num_prefill":1,"num_decode":1' in body
    except OSError:
        return False


def _ask(url: str) -> None:
    """One request that is prefilled by one worker and decoded by the other."""
    body = b'{"prompt": "%s", "max_tokens": 16, "temperature": 0}' % (b"many words " * 100)
    request = urllib.request.Request(  # noqa: S310
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        answer.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="only the imports")
    arguments = parser.parse_args()
    rows = of_imports() if arguments.tiny else [*of_workers(), *of_imports()]
    print_table(rows)
    finish("worker_memory", rows, target_rss_mb=TARGET_MB)


if __name__ == "__main__":
    main()
