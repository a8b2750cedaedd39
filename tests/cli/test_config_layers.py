"""A file, over it environment variables, over them flags; and errors that name the place."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from disagg.cli import serve
from disagg.cli.main import main
from disagg.cli.serve_arguments import variable_of
from disagg.cli.serve_config import Layers, flags_of_serve, layers_of
from disagg.errors import StartupError
from disagg.settings import json_schema

ROOT = Path(__file__).parent.parent.parent
FILE = """\
tiers:
  - model: demo-small
    engine:
      dtype: float32
      max_num_seqs: 3
    decode: {num_replicas: 2, autoscaling: {min_replicas: 1, max_replicas: 2}}
  - model: demo-large
http: {port: 9001}
insecure: true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def layers(*words: str) -> Layers:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return layers_of(parser.parse_args(words))


def test_flags_replace_variables_which_replace_a_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("DISAGG_PORT", "9002")
    monkeypatch.setenv("DISAGG_INSECURE", "0")
    made = layers("--config", str(file), "--port", "9003", "--decode", "1", "--no-haproxy")
    config = made.config()
    assert [tier.engine.max_num_seqs for tier in config.tiers] == [5, 5]
    assert [tier.engine.dtype for tier in config.tiers] == ["float32", "auto"]
    assert [tier.decode.num_replicas for tier in config.tiers] == [1, 1]
    assert config.tiers[0].decode.autoscaling is None  # a number is no range
    assert (config.http.port, config.insecure) == (9003, False)
    origins = {
        "http.port": "--port",
        "insecure": "DISAGG_INSECURE",
        "tiers[1].engine.max_num_seqs": "DISAGG_MAX_NUM_SEQS",
        "tiers[0].engine.dtype": f"{file}, line 4",
        "tiers[0].decode.num_replicas": "--decode",
        "http.host": "",
    }
    assert {path: made.origin(path) for path in origins} == origins


def test_every_flag_has_a_variable_of_its_own() -> None:
    flags = flags_of_serve()
    assert len({variable_of(flag) for flag in flags.values()}) == len(flags) > 40


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DISAGG_PORT", "many", "DISAGG_PORT in the environment: 'many' is not a number"),
        ("DISAGG_INSECURE", "maybe", "neither 1 (true) nor 0 (false)"),
        ("DISAGG_ENGINE", "x", "'x' is none of disagg, vllm"),
        ("DISAGG_MAX_NUM_SEQS", "0", "DISAGG_MAX_NUM_SEQS: The configuration is not valid"),
    ],
)
def test_a_variable_without_a_valid_value_is_named(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as refused:
        layers().config()
    assert words in refused.value.message


def test_a_variable_that_kubernetes_sets_for_a_service_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISAGG_PORT", "tcp://10.0.0.7:8000")
    assert layers().config().http.port == 8000


def test_the_key_of_the_environment_is_no_tenants(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients read DISAGG_API_KEY, too: in a file with keys of tenants it is one of theirs."""
    monkeypatch.setenv("DISAGG_API_KEY", "of-the-environment")
    assert layers("--config", str(file)).config().http.api_key == "of-the-environment"
    file.write_text("tiers: [{model: demo-small}]\nhttp: {api_keys: {a: of-the-environment}}\n")
    assert layers("--config", str(file)).config().http.api_key is None


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("dtype", "dtyp", 4, "Did you mean dtype?"),
        ("float32", "f8", 4, "Supported: auto,"),
        ("{port: 9001}", "{port: x}", 8, "port of the HTTP server"),
        ("insecure", "insecur", 9, "Did you mean insecure?"),
        ("- model: demo-large", "- revision: main", 7, "missing required field `model`"),
        ("num_replicas: 2", "num_replicas: 5", 6, "begins with 5 decode workers"),
    ],
)
def test_an_error_names_the_file_and_the_line(
    file: Path, before: str, after: str, line: int, words: str
) -> None:
    file.write_text(FILE.replace(before, after))
    with pytest.raises(StartupError) as refused:
        layers("--config", str(file)).config()
    assert refused.value.message.startswith(f"{file}, line {line}: ")
    assert words in refused.value.message


def test_a_file_names_its_models(file: Path) -> None:
    with pytest.raises(StartupError, match="names its models, so demo-large beside --config"):
        layers("--config", str(file), "demo-large")


def test_what_is_shown_says_where_it_was_set(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_PORTS", "1")
    words = ["config", "show", "--config", str(file), "--api-key", "0123456789abcdef"]
    assert main([*words, "--json"]) == 0
    out, error = capsys.readouterr()
    shown = json.loads(out)
    assert shown["http.port"] == {"value": 9001, "from": f"{file}, line 8"}
    assert shown["http.api_key"] == {"value": "(secret)", "from": "--api-key"}
    assert shown["cluster_key"]["value"] == "(secret)" and "http.host" not in shown
    assert error == "disagg: Nothing reads DISAGG_PORTS; did you mean DISAGG_PORT?\n"
    assert main([*words, "--all"]) == 0
    assert "http.host" in capsys.readouterr().out


def test_validation_tells_of_every_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = file.with_name("wrong.yaml")
    wrong.write_text(FILE.replace("dtype", "dtyp"))
    assert main(["config", "validate", str(file)]) == 0
    assert main(["config", "validate", str(wrong), str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[2]] == [f"{file}: valid"] * 2
    assert lines[1].startswith(f"{wrong}, line 4: ")


def arguments_of(path: Path) -> dict[str, Any]:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    arguments: dict[str, Any] = application["args"]
    return arguments


def test_the_schema_describes_the_files_of_deploy() -> None:
    schema = json_schema()
    files = sorted((ROOT / "deploy/serve").glob("*.yaml"))
    assert len(files) > 5
    for path in files:
        jsonschema.validate(arguments_of(path), schema)
    wrong = arguments_of(files[0])
    wrong["tiers"][0]["engine"] = {"dtyp": "auto"}
    with pytest.raises(jsonschema.ValidationError, match="dtyp"):
        jsonschema.validate(wrong, schema)
    http = schema["$defs"]["HttpConfig"]["properties"]
    assert all(each["description"] for each in http.values())
