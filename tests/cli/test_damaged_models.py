"""`disagg serve` of a directory that cannot be served ends before Ray or anything else starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from disagg.cli.main import main
from disagg.cli.ports import free_port
from tests.models.test_damaged_checkpoints import POINTER
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_write("model.safetensors", POINTER), ["model.safetensors", "git lfs pull"]),
        (_write("tokenizer.json", POINTER), ["tokenizer.json", "git lfs pull"]),
        (_write("tokenizer.json", "{}"), ["tokenizer.json of", "cannot be read as a tokenizer"]),
        (
            _write("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
            ["tokenizer.json of", "has no tokens"],
        ),
        (lambda directory: (directory / "tokenizer.json").unlink(), ["has no tokenizer.json"]),
        (
            _write("tokenizer_config.json", json.dumps({"chat_template": "{% for %}"})),
            ["chat template does not compile"],
        ),
        (_write("generation_config.json", '{"top_p": 7}'), ["generation_config.json", "top_p"]),
    ],
)
def test_refused_in_words(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
    words: list[str],
) -> None:
    def fail(**_: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", fail)
    directory = tmp_path / "damaged"
    shutil.copytree(model, directory)
    damage(directory)
    assert main(["serve", str(directory), "--port", str(free_port())]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "words"), [("absent", "No such file"), (".", "Is a directory"), ("binary", "utf-8")]
)
def test_a_chat_template_that_cannot_be_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    template = str(tmp_path / name)
    port = str(free_port())
    assert main(["serve", str(model), "--chat-template", template, "--port", port]) == 2
    said = capsys.readouterr().err
    assert f"The chat template {template} cannot be read" in said and words in said
