"""Measures a stranger's first minute: from `git clone` to the first token.

    python -m bench.first_minute [--tiny]

Clones this commit into an empty directory, sets it up as `make serve` does, starts `disagg serve`,
and streams one answer. No cache of downloads is used. `MB` is what was received on the network,
`installed MB` the size of the environment. With `--tiny` it starts and asks in the environment of
the bench.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.report import finish, print_table
from disagg.host import free_port

ROOT = Path(__file__).parent.parent
INSTALL = ["make", "--silent", ".venv/.ready"]


def timed(what: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    what()
    return time.perf_counter() - began_s


def received_nbytes() -> int:
    """Bytes that this machine has received on all networks but loopback."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    counts = (line.replace(":", " ").split()[:2] for line in lines)
    return sum(int(nbytes) for name, nbytes in counts if name != "lo")


def installed_nbytes(directory: Path) -> int:
    return sum(file.lstat().st_size for file in directory.rglob("*"))


@contextlib.contextmanager
def serving(python: Path, home: Path) -> Iterator[str]:
    """The URL of a `disagg serve` that is ready."""
    port = free_port()
    command = [str(python), "-m", "disagg.cli.main", "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=home) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if json.loads(line)["event"] == "ready":
                    break
            else:
                raise RuntimeError(f"the server ended with {process.wait()} before it was ready")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def first_token(url: str) -> None:
    body = {"model": "demo-large", "messages": [{"role": "user", "content": "Hello!"}]}
    asked = {**body, "stream": True, "max_tokens": 8}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
                "content"
            ):
                return
    raise RuntimeError("the answer had no token")


def measure(home: Path | None) -> dict[str, Any]:
    """One row; `home` None starts what is installed here."""
    row: dict[str, Any] = {}
    python = Path(sys.executable)
    if home is not None:
        python = home / ".venv/bin/python"
        clean = {**os.environ, "UV_NO_CACHE": "1", "PIP_NO_CACHE_DIR": "1"}
        clean.pop("PYTHONPATH", None)
        clone = ["git", "clone", "--quiet", str(ROOT), str(home)]
        row["clone s"] = timed(lambda: subprocess.run(clone, check=True))
        before = received_nbytes()
        row["install s"] = timed(lambda: subprocess.run(INSTALL, cwd=home, env=clean, check=True))
        row["MB"] = (received_nbytes() - before) / 1e6
        row["installed MB"] = installed_nbytes(home / ".venv") / 1e6
    with contextlib.ExitStack() as stack:
        began_s = time.perf_counter()
        url = stack.enter_context(serving(python, home or ROOT))
        row["start s"] = time.perf_counter() - began_s
        row["first token s"] = timed(lambda: first_token(url))
    row["total s"] = sum(seconds for name, seconds in row.items() if name.endswith(" s"))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_minute", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="without the installations")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = [measure(None if arguments.tiny else Path(directory) / "clone")]
    print_table(rows)
    finish("first_minute", rows)


if __name__ == "__main__":
    main()
