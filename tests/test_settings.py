"""Each setting is described once, in `config`: for flags, errors and the page of settings."""

from __future__ import annotations

import argparse

import pytest

from disagg.cli.serve_arguments import add_arguments
from disagg.config import EngineConfig, HttpConfig, ServeConfig, TierConfig
from disagg.config_checks import parse_config
from disagg.errors import StartupError
from disagg.settings import setting_at, settings_of


@pytest.mark.parametrize("struct", [ServeConfig, TierConfig, HttpConfig, EngineConfig])
def test_a_flag_of_a_setting_has_its_description(struct: type) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = settings_of(struct)
    flags = [each for each in parser._actions if each.option_strings and each.dest in settings]
    described = [each for each in flags if each.help and each.help != argparse.SUPPRESS]
    assert len(described) >= 5
    for each in described:
        if each.dest not in ("tenants", "cascade", "prefill", "decode"):  # of another form
            setting = settings[each.dest]
            assert (each.help or "").startswith(setting.help), each.dest
            assert each.default == argparse.SUPPRESS  # a file or a variable may say it


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        (
            {"engine": {"block_size": 300}},
            "`int` <= 256 - at `$.tiers[0].engine.block_size`. block_size: number of tokens in a"
            " KV block (default: 16 on a CPU, 64 on a GPU).",
        ),
        (
            {"decode": {"autoscaling": {"max_replicas": 0}}},
            "max_replicas: largest number of workers.",
        ),
        ({"engine": {"dtype": "f8"}}, "Supported: auto, bfloat16, float16, float32."),
        (
            {"engine": {"block_sise": 3}},
            "`block_sise` - at `$.tiers[0].engine`. Did you mean block_size?",
        ),
        ({"dtype": "auto"}, "`dtype` - at `$.tiers[0]`. dtype is a setting of tiers[].engine."),
        ({"nonsense": 3}, "unknown field `nonsense` - at `$.tiers[0]`."),
    ],
)
def test_an_error_says_what_the_setting_is(tier: dict[str, object], words: str) -> None:
    with pytest.raises(StartupError) as refused:
        parse_config({"tiers": [{"model": "demo-small", **tier}], "cluster_key": "a key"})
    assert refused.value.message.endswith(words)


def test_a_setting_is_found_at_its_path() -> None:
    found = setting_at("tenants[...].weight")
    assert found is not None and found.description.startswith("its share")
    assert setting_at("tiers[0].no_such") is None
