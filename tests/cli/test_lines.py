"""What the command prints, on a terminal and elsewhere."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from disagg.cli.lines import Lines, LogFormat

EXAMPLE = "\n  curl -N http://127.0.0.1:8000/v1/chat/completions -d '{\"a\": 1}'\n"


def test_json_has_no_empty_lines_and_indentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines("json", tmp_path / "log")
    lines.say("example", EXAMPLE, port=8000)
    lines.close()
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "log").read_text()
    line = json.loads(printed)
    assert (line["event"], line["message"], line["port"]) == ("example", EXAMPLE.strip(), 8000)


@pytest.mark.parametrize("form", ["text", "auto"])
def test_a_terminal_shows_a_message_as_it_is(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    output.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", output)
    Lines(form).say("example", EXAMPLE)
    assert output.getvalue() == EXAMPLE + "\n"


def test_a_closed_output_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    lines = Lines("auto", tmp_path / "log")
    lines.say("example", EXAMPLE)
    lines.close()
    assert "curl" in (tmp_path / "log").read_text()
