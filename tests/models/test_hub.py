"""Models of a hub: what is needed of them is fetched once, and then served without a network."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from disagg.capacity.shapes import read_shape
from disagg.config import TierConfig
from disagg.errors import ModelError, StartupError
from disagg.models.description import describe_model
from disagg.models.hub import fetch_repository, is_repository, needed_files
from tests.models.checkpoints import write_checkpoint
from tests.models.fake_hub import COMMIT, TOKEN, FakeHub, fake_hub
from tests.models.test_fetched import Said, go_on

NAME = "acme/tiny-1.5"
_INDEX = "model.safetensors.index.json"


def _index_of(*files: str) -> bytes:
    return json.dumps(
        {"weight_map": {f"tensor {i}": name for i, name in enumerate(files)}}
    ).encode()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository as makers have them: with weights in other formats and other places too."""
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, "llama", shard="40KB")
    found = {file.name: file.read_bytes() for file in directory.iterdir()}
    others = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "original/params.json")
    return {**found, "tokenizer.json": b"{}", **dict.fromkeys(others, b"not needed")}


@pytest.fixture
def hub(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    config = json.loads(files["config.json"])
    later = {**config, "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    repositories: dict[str, dict[str, Any]] = {
        NAME: files,
        "acme/later": {**files, "config.json": json.dumps(later).encode()},
        "acme/mixed": {
            **files,
            "hf_quant_config.json": b'{"quantization": {"quant_algo": "MIXED_PRECISION"}}',
        },
        "acme/gguf": {"tiny.Q4_K_M.gguf": b"GGUF"},
        "acme/pickles": {
            "config.json": files["config.json"],
            "tokenizer.json": b"{}",
            "pytorch_model.bin": b"x",
        },
        "acme/no-tokenizer": {**files, "tokenizer.json": None},
        "acme/no-index": {
            name: raw
            for name, raw in files.items()
            if name not in (_INDEX, "consolidated.safetensors")
        },
        "acme/outside": {**files, _INDEX: _index_of("../../x", "model-00001.safetensors")},
        "acme/star": {**files, _INDEX: _index_of("*"), "*": b"weights of a strange name"},
    }
    there = {
        name: {path: raw for path, raw in repository.items() if raw is not None}
        for name, repository in repositories.items()
    }
    with fake_hub(there) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")[2]
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{running.url}/{{repo_id}}{template}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield running
    close_session()


def test_what_is_needed_is_fetched_and_then_there(hub: FakeHub, files: dict[str, bytes]) -> None:
    tier = TierConfig(model=NAME)
    with pytest.raises(ModelError, match=rf"`disagg serve {NAME}` fetches it"):
        assert tier.directory
    said = Said()
    assert fetch_repository(NAME, None, said, go_on)
    assert said.lines[0].startswith(f"fetching {NAME} (0 MiB in ")
    assert said.lines[-1].startswith(f"{NAME} is in ")
    directory = tier.directory
    there = {file.name for file in directory.iterdir()}
    weights = {name for name in files if name.startswith("model")}
    assert len(weights) > 3
    assert there == weights | {"config.json", "generation_config.json", "tokenizer.json"}
    assert describe_model(directory).num_parameters > 0
    assert tier.name == "tiny-1.5"
    hub.asked.clear()
    assert fetch_repository(NAME, None, silent := Said(), go_on)
    assert (hub.asked, silent.lines) == ([], [])


def test_a_revision_is_fetched_for_itself(hub: FakeHub) -> None:
    assert fetch_repository(NAME, "v1", Said(), go_on)
    assert TierConfig(model=NAME, revision="v1").directory.name == COMMIT
    assert TierConfig(model=NAME, revision=COMMIT).directory.name == COMMIT
    with pytest.raises(ModelError, match="fetches it"):  # nobody said what main is
        assert TierConfig(model=NAME).directory
    with pytest.raises(StartupError, match="has no revision 'v2'"):
        fetch_repository(NAME, "v2", Said(), go_on)


def test_what_cannot_be_served_is_refused_before_its_weights_come(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"^acme/later: .*Llama4ForCausalLM \(not yet: chunked"):
        fetch_repository("acme/later", None, Said(), go_on)
    with pytest.raises(ModelError, match=r"^acme/mixed: .*quant_algo MIXED_PRECISION"):
        fetch_repository("acme/mixed", None, Said(), go_on)
    with pytest.raises(ModelError, match="has GGUF files and no config"):
        fetch_repository("acme/gguf", None, Said(), go_on)
    with pytest.raises(ModelError, match=r"^acme/no-tokenizer: it has no tokenizer\.json"):
        fetch_repository("acme/no-tokenizer", None, Said(), go_on)
    with pytest.raises(ModelError, match=r"no \*\.safetensors files, only \.bin"):
        fetch_repository("acme/pickles", None, Said(), go_on)
    assert not [path for path in hub.asked if ".safetensors" in path or ".bin" in path]


def test_planning_needs_no_more_than_the_configuration(hub: FakeHub) -> None:
    shape = read_shape(NAME)
    assert (shape.name, shape.config.num_layers, shape.config.hidden_size) == ("tiny-1.5", 3, 48)
    assert [path for path in hub.asked if "safetensors" in path] == []
    assert "/resolve/" in hub.asked[0]
    with pytest.raises(StartupError, match="no such model on"):
        read_shape("acme/none")
    with pytest.raises(ModelError, match="quant_algo MIXED_PRECISION"):  # in a file of its own
        read_shape("acme/mixed")


def test_settings_come_before_weights(hub: FakeHub) -> None:
    """What was stopped half way and has weights says how to use them, and is not whole."""
    assert fetch_repository(NAME, None, Said(), go_on)
    files = [path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path]
    weights = next(i for i, name in enumerate(files) if name.endswith(".safetensors"))
    settings = ("config.json", "generation_config.json", "tokenizer.json")
    assert [files.index(name) < weights for name in settings] == [True, True, False]
    assert files[-1] == "tokenizer.json"


def test_what_is_gated_needs_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(NAME)
    with pytest.raises(StartupError, match=rf"Accept them on {hub.url}/{NAME}, and set HF_TOKEN"):
        fetch_repository(NAME, None, Said(), go_on)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch_repository(NAME, None, Said(), go_on)


def test_a_signal_before_the_weights_ends_it(hub: FakeHub) -> None:
    assert not fetch_repository(NAME, None, Said(), lambda: True)
    with pytest.raises(ModelError, match="nor whole"):
        assert TierConfig(model=NAME).directory
    assert fetch_repository(NAME, None, Said(), go_on)


@pytest.mark.parametrize("repository", [NAME, "acme/no-index"])
def test_a_signal_among_the_weights_ends_it_and_the_next_time_goes_on(
    hub: FakeHub, tmp_path: Path, repository: str
) -> None:
    """It comes when one file of weights is whole, and the last one is still on its way."""
    weights = sorted(name for name in hub.files[repository] if name.startswith("model-"))

    def whole() -> set[str]:
        return {file.name for file in (tmp_path / "hub").rglob("snapshots/*/model-*")}

    def is_stopped() -> bool:
        return bool(whole())

    def wait(name: str) -> None:
        until_s = time.monotonic() + 60
        while name == weights[-1] and not is_stopped() and time.monotonic() < until_s:
            time.sleep(0.01)

    hub.held = wait
    said = Said()
    assert not fetch_repository(repository, None, said, is_stopped)
    assert said.lines[0].startswith(f"fetching {repository} ")
    assert not any("is in" in line for line in said.lines)
    kept = whole()
    assert kept and weights[-1] not in kept
    with pytest.raises(ModelError, match="nor whole"):
        assert TierConfig(model=repository).directory
    hub.asked.clear()
    assert fetch_repository(repository, None, Said(), go_on)
    again = {path.rpartition("/")[2] for path in hub.asked if path.endswith(".safetensors")}
    assert again == {*weights} - kept
    assert TierConfig(model=repository).directory.is_dir()


def _refuse_xet(**options: object) -> None:
    raise OSError("this came over Xet")


def test_weights_come_over_http_which_can_be_stopped(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.xet_get", _refuse_xet)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    assert fetch_repository(NAME, None, Said(), go_on)
    assert not constants.HF_HUB_DISABLE_XET


def test_files_too_large_for_http_come_over_xet(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.xet_get", _refuse_xet)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 20_000)
    with pytest.raises(StartupError, match="this came over Xet"):
        fetch_repository(NAME, None, Said(), go_on)


def test_without_room_nothing_is_fetched(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 20_000

    monkeypatch.setattr("disagg.models.hub.shutil.disk_usage", lambda place: Full)
    with pytest.raises(StartupError, match=r"0\.0 GB left; free space there"):
        fetch_repository(NAME, None, Said(), go_on)


def test_files_left_incomplete_do_not_count(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed leaves them, and the library fetches such a file as a whole."""
    blobs = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "abc.1234.incomplete").open("wb") as left:
        left.truncate(5 << 20)
    with monkeypatch.context() as full:
        usage = SimpleNamespace(free=20_000)
        full.setattr("disagg.models.hub.shutil.disk_usage", lambda place: usage)
        with pytest.raises(StartupError, match=r"0\.0 GB left; free space there"):
            fetch_repository(NAME, None, Said(), go_on)
    said = Said()
    assert fetch_repository(NAME, None, said, go_on)
    assert not [line for line in said.lines if line.startswith("fetched 5 of")]


def test_sentences_without_a_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="There is no model directory 'acme/none' here, and no"):
        fetch_repository("acme/none", None, Said(), go_on)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StartupError, match=r"cannot be fetched: .*Without a network, run"):
        fetch_repository(NAME, None, Said(), go_on)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE forbids"):
        fetch_repository(NAME, None, Said(), go_on)


def test_the_command_takes_the_hub_from_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    """Its tokenizer is none, which is found after all was fetched and before Ray starts."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "disagg.cli.main", "serve", NAME, "--port", "0"]
    done = subprocess.run(
        [*command, "--log-dir", str(tmp_path / "logs")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert f"{NAME} is in {tmp_path / 'home' / 'hub'}" in done.stdout + done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("Qwen/Qwen3-8B", True),
        ("meta-llama/Llama-3.1-8B_x", True),
        ("disagg/assets", False),  # a directory that is there
        ("demo-small", False),
        ("./a/b", False),
        ("/a/b", False),
        ("~/b", False),
        ("../b", False),
        ("a/b/c", False),
        ("a/b/", False),
        ("a b/c", False),
        ("s3://bucket/model", False),
        # What the hub's library refuses as well.
        ("a..b/c", False),
        ("a/b--c", False),
        ("a/b.git", False),
        ("a/b-", False),
        ("é/b", False),
        ("a/" + "b" * 96, True),
        ("a/" + "b" * 97, False),
        ("a" * 300 + "/b", False),
    ],
)
def test_what_is_written_like_a_repository(
    model: str, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert is_repository(model) is is_one


@pytest.mark.parametrize("revision", ["../../../etc/passwd", "/etc/passwd", "a//b", "", "-x"])
def test_a_path_is_no_revision(revision: str) -> None:
    with pytest.raises(ModelError, match="is not a valid name of a branch, a tag or a commit"):
        fetch_repository(NAME, revision, Said(), go_on)
    with pytest.raises(ModelError, match="is not a valid name of a branch, a tag or a commit"):
        assert TierConfig(model=NAME, revision=revision).directory


def test_a_cache_that_cannot_be_written_to_is_named(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*arguments: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", is_full)
    with pytest.raises(StartupError, match=rf"cannot be stored in {tmp_path / 'hub'}: .*No space"):
        fetch_repository(NAME, None, Said(), go_on)


def test_an_index_may_name_no_other_place(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"^acme/outside: its model.safetensors.index.json is bro"):
        fetch_repository("acme/outside", None, Said(), go_on)
    assert not [path for path in hub.asked if path.endswith(".safetensors")]


def test_a_huge_file_of_settings_is_not_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.models.hub.MAX_TEXT_NBYTES", 100)
    with pytest.raises(ModelError, match=rf"^{NAME}: its config.json has 0.0 GB, but such files"):
        fetch_repository(NAME, None, Said(), go_on)
    assert not [path for path in hub.asked if "/resolve/" in path]


def test_a_name_with_a_star_is_one_file(hub: FakeHub, files: dict[str, bytes]) -> None:
    """Else it would bring all that it matches."""
    assert fetch_repository("acme/star", None, Said(), go_on)
    there = {file.name for file in TierConfig(model="acme/star").directory.iterdir()}
    assert "*" in there and "README.md" not in there


def test_stores_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="models are not read from s3 stores; mount"):
        assert TierConfig(model="s3://bucket/model").directory


def test_one_checkpoint_is_chosen_as_transformers_does() -> None:
    names = ["config.json", "a.safetensors", "sub/b.safetensors", "adapter.safetensors"]
    assert needed_files(names, ()) == ["a.safetensors", "adapter.safetensors", "config.json"]
    assert needed_files([*names, "model.safetensors"], ()) == ["config.json", "model.safetensors"]
    assert needed_files([*names, "model.safetensors.index.json"], ["a.safetensors"]) == [
        "a.safetensors",
        "config.json",
        "model.safetensors.index.json",
    ]
