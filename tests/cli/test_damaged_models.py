"""`disagg serve` of a directory that cannot be served ends before Ray or anything else starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.cli.start_checks import check_models
from disagg.config_checks import parse_config
from disagg.errors import StartupError
from disagg.host import free_port
from tests.models.test_damaged_checkpoints import POINTER


def refusal(directory: Path | str, **tier: Any) -> str:
    """What the check of models says, which `disagg serve` makes before it starts anything."""
    raw = {"tiers": [{"model": str(directory), **tier}], "cluster_key": "of-a-test"}
    with pytest.raises(StartupError) as refused:
        check_models(parse_config(raw))
    return refused.value.message


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_write("model.safetensors", POINTER), ["model.safetensors", "git lfs pull"]),
        (_write("tokenizer.json", POINTER), ["tokenizer.json", "git lfs pull"]),
        (_write("tokenizer.json", "{}"), ["tokenizer.json of", "is invalid"]),
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
    model: Path, tmp_path: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(model, directory)
    damage(directory)
    sentence = refusal(directory)
    assert all(word in sentence for word in words), sentence


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    sentence = refusal("no-such-model")
    assert "'no-such-model'" in sentence and "demo-large" in sentence
    assert "config.json" in refusal(tmp_path)


def test_an_unknown_architecture(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["GPTNeoXForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentence = refusal(tmp_path)
    assert "GPTNeoXForCausalLM" in sentence and "LlamaForCausalLM" in sentence


def test_no_room_for_one_sequence(model: Path) -> None:
    sentence = refusal(model, engine={"num_gpu_blocks_override": 3})
    assert "512" in sentence and "32" in sentence and "num_gpu_blocks_override" in sentence


def serve(model: Path, *flags: str) -> tuple[int, str, str]:
    """Exit status and output of `disagg serve`, which ends all children of its process."""
    words = [sys.executable, "-m", "disagg.cli.main", "serve", str(model), *flags]
    words += ["--port", str(free_port())]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command_says_it_and_ends(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(model, directory)
    _write("tokenizer.json", POINTER)(directory)
    status, shown, sentence = serve(directory)
    assert status == 2
    assert refusal(directory) in sentence and "Traceback" not in sentence
    assert "logs: " in shown + sentence and "starting Ray" not in shown + sentence


@pytest.mark.parametrize(
    ("name", "words"), [("absent", "No such file"), (".", "Is a directory"), ("binary", "utf-8")]
)
def test_a_chat_template_that_cannot_be_read(
    model: Path, tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    template = str(tmp_path / name)
    sentence = refusal(model, chat_template=template)
    assert f"Cannot read the chat template {template}" in sentence and words in sentence


def test_the_command_takes_the_template_that_it_is_given(model: Path, tmp_path: Path) -> None:
    template = str(tmp_path / "absent")
    status, _, sentence = serve(model, "--chat-template", template)
    assert status == 2
    assert refusal(model, chat_template=template) in sentence and "Traceback" not in sentence
