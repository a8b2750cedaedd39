"""What cannot be served is refused in words with numbers, and leaves no process behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from disagg.cli.ports import free_port
from tests.e2e.command import LEFT_TIMEOUT_S, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(360)]


def refusal(
    *arguments: str, port: int | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """What `disagg serve` says when it gives up. Nothing that it started may outlive it."""
    port = free_port() if port is None else port
    # A mark in the environment, which children inherit whatever becomes of their parents.
    mark = f"DISAGG_TEST_MARK={os.urandom(8).hex()}"
    name, value = mark.split("=")
    done = subprocess.run(
        [sys.executable, "-m", "disagg.cli.main", "serve", *arguments, "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(environment or {}), name: value, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr

    def left() -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _has(process, name, value)]

    until(lambda: not left(), LEFT_TIMEOUT_S, lambda: f"{left()}")
    return done.stderr


def _has(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.environ().get(name) == value
    except psutil.Error:
        return False


def test_missing_model() -> None:
    said = refusal("no-such-model")
    assert "'no-such-model'" in said and "demo-large" in said


def test_broken_model_directory(tmp_path: Path) -> None:
    assert "config.json" in refusal(str(tmp_path))


def test_unknown_architecture(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["GPTNeoXForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refusal(str(tmp_path))
    assert "GPTNeoXForCausalLM" in said and "LlamaForCausalLM" in said


def test_port_in_use(model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port}" in refusal(str(model), port=port)


def test_no_room_for_one_sequence(model: Path) -> None:
    said = refusal(str(model), "--num-gpu-blocks-override", "3")
    assert "512" in said and "32" in said and "num-gpu-blocks-override" in said
