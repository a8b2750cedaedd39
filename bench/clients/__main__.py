"""Checks client libraries with `disagg serve` and a bundled model: `make clients`.

The libraries are in an environment of their own, `.clients`, because some of them need other
versions of packages that disagg uses. This starts the server, runs `matrix.py` in that environment,
and returns its exit status: 1 if a check failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from disagg.host import free_port

HERE = Path(__file__).parent
MODEL = "demo-small"
ROOT = HERE.parent.parent
TOKENIZER = ROOT / "disagg" / "assets" / MODEL
START_TIMEOUT_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    parser.add_argument("--clients", type=Path, default=Path(".clients"), help="the environment")
    parser.add_argument("libraries", nargs="*", help="only these")
    asked = parser.parse_args()
    clients = asked.clients.resolve()
    environment = os.environ | {
        "CLIENTS_NODE": str(clients / "node"),
        "CLIENTS_AIPERF": str(clients / "aiperf" / "bin" / "aiperf"),
    }
    environment.pop("PYTHONPATH", None)  # that of another environment
    with _served() as url:
        command = [str(clients / "bin" / "python"), "-m", "bench.clients.matrix"]
        options = [url, MODEL, str(TOKENIZER), *asked.libraries]
        return subprocess.call([*command, *options], env=environment, cwd=ROOT)


@contextmanager
def _served() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "disagg.cli.main", "serve", MODEL]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=sys.stderr)
    try:
        _wait(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise SystemExit(f"disagg serve ended with {process.returncode}.")
        try:
            if httpx.get(f"{url}/ready", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"disagg serve was not ready after {START_TIMEOUT_S:g} s.")


if __name__ == "__main__":
    sys.exit(main())
