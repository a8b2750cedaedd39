"""Flags and files of `disagg serve` as configurations."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from disagg.cli import serve
from disagg.config import ServeConfig


def config_of(*words: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.config_from_arguments(parser.parse_args(words))


def test_every_start_has_a_cluster_key_of_its_own() -> None:
    keys = {config_of("demo-small").cluster_key for _ in range(3)}
    assert len(keys) == 3 and all(len(key) == 64 for key in keys)


@pytest.mark.parametrize(
    ("line", "is_drawn"), [("", True), ("cluster_key: ''", True), ("cluster_key: mine", False)]
)
def test_a_file_need_not_name_a_cluster_key(tmp_path: Path, line: str, is_drawn: bool) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"tiers: [{{model: demo-small}}]\n{line}\n")
    key = config_of("--config", str(file)).cluster_key
    assert len(key) == 64 if is_drawn else key == "mine"


def test_pools_without_workers_are_not_waited_for() -> None:
    config = config_of("demo-small", "demo-large", "--prefill", "0", "--decode", "2")
    assert serve._pool_sizes(config) == {"demo-small-decode": 2, "demo-large-decode": 2}
