"""`disagg completion` in a real shell, and what `disagg collect-env` tells strangers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from disagg.cli.main import VERBS, main
from disagg.tools.collect_env import package_names, shown_variables


@pytest.fixture(scope="module")
def script() -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    return out.getvalue()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("disagg ", " ".join(VERBS)),
        ("disagg se", "serve"),
        ("disagg serve --max-mo", "--max-model-len"),
        ("disagg serve demo-small --log-format ", "auto text json"),
        ("disagg config ", "show validate schema"),
        ("disagg config show --por", "--port"),
        ("disagg bench comp", "compare"),
        ("disagg serve --config ./se", ""),  # bash completes the name of a file
        ("disagg plan --po", ""),
    ],
)
def test_a_shell_completes(script: str, typed: str, offered: str) -> None:
    words = typed.split(" ")
    given = f"COMP_WORDS=({' '.join(word or chr(39) * 2 for word in words)})"
    asked = f"{given}; COMP_CWORD={len(words) - 1}; _disagg; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-uc", f"{script}\n{asked}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == offered and not done.stderr


def test_fish_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    serve = "complete -c disagg -n '__fish_seen_subcommand_from serve' -l "
    assert f"{serve}log-format -r -f -a 'auto text json'" in lines
    assert f"{serve}insecure" in lines


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
    """As with `disagg completion bash | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "disagg.cli.main", "completion", "bash"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
