"""Damage that downloads and copies leave is found from the headers, in words with what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.config import EngineConfig
from disagg.engine.device.check import check_engine
from disagg.errors import ModelError
from disagg.models.checkpoint import checkpoint_files, read_header
from disagg.models.description import describe_model
from tests.models.checkpoints import write_checkpoint

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 4976698672\n"
)
WEIGHTS = "model.safetensors"


def _cut(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


def _cut_in_the_header(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:100])


def _pointer(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(POINTER)


def _length(num_bytes: int) -> Callable[[Path], object]:
    return lambda directory: (directory / WEIGHTS).write_bytes(
        num_bytes.to_bytes(8, "little") + bytes(100)
    )


def _header(header: object) -> Callable[[Path], object]:
    raw = json.dumps(header).encode()
    return lambda directory: (directory / WEIGHTS).write_bytes(
        len(raw).to_bytes(8, "little") + raw + bytes(64)
    )


def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return damage


def _check(directory: Path) -> None:
    config = EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 20)
    check_engine(config, describe_model(directory))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "is cut off: it has [0-9,]+ of [0-9,]+ bytes; download it again"),
        (_cut_in_the_header, "is cut off: it has 100 of"),
        (_pointer(WEIGHTS), "git-LFS pointer, not the file itself: run `git lfs pull` in"),
        (_pointer("config.json"), "git-LFS pointer"),
        (_length(2**63), "not a readable safetensors file: it does not begin with the length"),
        (_length(10**11), "not a readable safetensors file"),
        (_length(50), "its header cannot be read"),
        (lambda directory: (directory / WEIGHTS).write_bytes(b""), "does not begin with"),
        (lambda directory: (directory / WEIGHTS).write_bytes(b"\x08"), "does not begin with"),
        (_header([1]), "its header cannot be read"),
        (_header({"a": {"dtype": "F32", "shape": [4]}}), "its header cannot be read"),
        (
            _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}),
            "a has 12 bytes for",
        ),
        (
            _header(
                {
                    "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                    "b": {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]},
                }
            ),
            "a and b share bytes",
        ),
        (
            _header({"a": {"dtype": "F32", "shape": [math.inf], "data_offsets": [0, 16]}}),
            "its header cannot be read",
        ),
        (
            _header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}}),
            "lies outside the file",
        ),
        (_edit(lambda tensors: tensors.pop("model.norm.weight")), "missing tensors: model.norm"),
        (
            _edit(lambda tensors: tensors.update({"model.norm.weight": torch.ones(4)})),
            r"model.norm.weight is \[4\], not \[48\]",
        ),
        (
            _edit(lambda tensors: tensors.update({"model.norm.weight": torch.ones(48).int()})),
            r"only float weights are\): model\.norm\.weight is I32",
        ),
        (lambda directory: (directory / WEIGHTS).unlink(), "there are no weights; download"),
    ],
)
def test_found_before_anything_starts(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    write_checkpoint(tmp_path, "llama")
    check_engine(
        EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 20), describe_model(tmp_path)
    )
    damage(tmp_path)
    with pytest.raises(ModelError, match=words):
        check_engine(
            EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 20), describe_model(tmp_path)
        )


def test_headers_agree_with_the_library(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16)
    header = read_header(tmp_path / WEIGHTS)
    loaded = load_file(tmp_path / WEIGHTS)
    assert set(header.tensors) == set(loaded)
    raw = (tmp_path / WEIGHTS).read_bytes()
    for name, tensor in header.tensors.items():
        assert (tensor.dtype, tensor.shape) == ("BF16", tuple(loaded[name].shape))
        stored = torch.frombuffer(bytearray(raw[tensor.begin : tensor.end]), dtype=torch.bfloat16)
        assert torch.equal(stored.view(tensor.shape), loaded[name])


def test_other_files_beside_the_model_are_no_part_of_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "consolidated.safetensors").write_text(POINTER)
    assert [file.name for file in checkpoint_files(tmp_path)] == [WEIGHTS]
    check_engine(
        EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 20), describe_model(tmp_path)
    )
