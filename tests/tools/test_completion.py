"""`disagg completion` in a real shell."""

from __future__ import annotations

import contextlib
import io
import subprocess

import pytest

from disagg.cli.main import VERBS, main


@pytest.fixture(scope="module")
def script() -> str:
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
