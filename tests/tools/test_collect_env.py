"""What `disagg collect-env` tells strangers, and a reader that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from disagg.cli.main import main
from disagg.tools.collect_env import package_names, shown_variables


def test_the_environment_is_collected_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_API_KEY", "a-secret")
    assert main(["collect-env", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["variables"]["DISAGG_API_KEY"] == "(set)" and "a-secret" not in out
    assert found["packages"]["torch"] and found["system"]["Python"] and found["findings"]["memory"]
    assert main(["collect-env"]) == 0
    assert "== findings\n" in capsys.readouterr().out


def test_variables_of_other_programs_are_none_of_ours() -> None:
    variables = {
        "UCX_TLS": "rc",
        "HF_TOKEN": "x",
        "AWS_SECRET": "y",
        "DISAGG_REDIS_URL": "redis://p@h",
    }
    shown = {"DISAGG_REDIS_URL": "(set)", "HF_TOKEN": "(set)", "UCX_TLS": "rc"}
    assert shown_variables(variables) == shown
    assert {"torch", "ray", "msgspec", "vllm"} <= {*package_names()}


def test_whoever_reads_no_further_sees_no_traceback() -> None:
    """As with `disagg config schema | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "disagg.cli.main", "config", "schema"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
