"""Whatever stands in a model's files, they are served or refused in words."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ModelError
from disagg.models import gguf_model
from disagg.models.description import describe_model
from disagg.models.gguf_file import read_gguf
from disagg.models.parts import check_weights
from tests.grids import IS_WHOLE
from tests.models.checkpoints import write_checkpoint
from tests.models.gguf_files import write_gguf

STRANGE: list[Any] = [None, True, 0, -1, 7, 2**31 - 1, 2**64, 0.5, -1e300, math.nan, math.inf]
STRANGE += ["", "x", [], [0], ["x"], [None], [[]], {}, {"x": {}}, [{"x": []}]]
TOKENIZER_CONFIG = {"chat_template": "{{ 1 }}", "bos_token": "x", "eos_token": {"content": "y"}}
VARIANTS = ["llama-yarn", "qwen2-moe", "gemma3-odd", "gpt-oss", "qwen3-mixed-windows"]
NUM_DAMAGED = 400


def _is_refused(place: Path) -> bool:
    """Raises whatever is not a refusal in words."""
    try:
        model = describe_model(place)
        check_weights(model)
        assert model.num_parameters > 0 and model.fingerprint
        assert model.read_tokenizer() and model.defaults
        assert (model.chat_template, model.special_tokens, model.eos_token_ids) is not None
    except ModelError as error:
        assert str(place) in str(error), error
        return True
    return False


def _changed(said: Mapping[str, Any], variant: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key left out, and with each third of the strange values in another variant: these have
    most keys in common."""
    some = slice(None) if IS_WHOLE else slice(VARIANTS.index(variant) % 3, None, 3)
    for key in said:
        yield f"no {key}", {name: value for name, value in said.items() if name != key}
        for value in STRANGE[some]:
            yield f"{key} = {value!r}", {**said, key: value}


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_value_in_a_directory(variant: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    write_checkpoint(directory, variant)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    assert not _is_refused(directory)
    num_refused = 0
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = directory / name
        said = json.loads(file.read_text())
        for what, changed in _changed(said, variant):
            file.unlink()  # to write over it, ext4 first waits for the disk
            file.write_text(json.dumps(changed))
            try:
                num_refused += _is_refused(directory)
            except Exception as error:
                raise AssertionError(f"{name}: {what}") from error
        file.write_text(json.dumps(said))
    assert num_refused > 30


@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_any_setting_of_a_gguf_file(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "there", variant)
    file = write_gguf(tmp_path / "model.gguf", checkpoint.model)
    assert not _is_refused(file)
    header = read_gguf(file)
    num_refused = 0
    more = {"split.count": 1, "general.sampling.temp": 0.5, "llama.rope.scaling.attn_factor": 1.0}
    for what, changed in _changed({**header.settings, **more}, variant):
        strange = replace(header, settings=changed)
        monkeypatch.setattr(gguf_model, "read_gguf", lambda _, header=strange: header)
        try:
            num_refused += _is_refused(file)
        except Exception as error:
            raise AssertionError(what) from error
    assert num_refused > 30


def test_any_damage_to_the_header_of_a_gguf_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "there", "qwen3-moe")
    whole = write_gguf(tmp_path / "whole.gguf", checkpoint.model)
    header_nbytes, rng, num_refused = len(read_gguf(whole).raw), random.Random(5), 0
    file = tmp_path / "model.gguf"
    shutil.copyfile(whole, file)
    for number in range(NUM_DAMAGED):
        place, width = rng.randrange(header_nbytes), rng.choice([1, 1, 4, 8])
        with file.open("r+b") as opened:
            opened.seek(place)
            before = opened.read(width)
            opened.seek(place)
            opened.write(rng.choice([b"\xff", b"\0", rng.randbytes(1)]) * width)
        try:
            num_refused += _is_refused(file)
        except Exception as error:
            raise AssertionError(f"{number}: {width} bytes at {place}") from error
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(before)
    assert not _is_refused(file)
    assert num_refused > NUM_DAMAGED / 4
