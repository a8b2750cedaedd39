"""`disagg cascade calibrate`: what it refuses, and that `disagg serve` takes what it writes."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from disagg.cli.main import main
from disagg.cli.serve_arguments import add_arguments
from disagg.cli.serve_config import layers_of
from disagg.config import CascadeConfig, EngineConfig, PromptJudge, ServeConfig, TierConfig
from disagg.errors import DisaggError
from disagg.tools.calibrate.report import as_yaml

GOOD = '{"prompt": "What is 2 + 3?", "label": "5"}'
PROMPTS = [
    ("What is the capital of France?", "Paris"),
    ("What is 2 + 3?", "5"),
    ("What is 86517 + 97768?", "184285"),
    ("Calculate 937 times 8.", "7496"),
]


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made NaN before its first use (`tests/poison.py`), and thousands take a second."""
    few = partial(EngineConfig, num_gpu_blocks_override=256)
    monkeypatch.setattr("disagg.tools.calibrate.command.EngineConfig", few)


def calibrate(file: Path, *more: str) -> int:
    return main(["cascade", "calibrate", "demo-small", "demo-large", "--prompts", str(file), *more])


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([GOOD, '{"prompt": "2 + 2 ="}'], "line 2: Object missing required field `label`"),
        ([GOOD, "", "{"], "line 3: Input data was truncated"),
        ([GOOD, '{"label": "5"}'], "line 2: a line has either a prompt or messages"),
        ([GOOD, '{"prompt": "x", "messages": [{}], "label": "5"}'], "line 2: a line has"),
        ([GOOD, '{"messages": [], "label": "5"}'], "line 2: Expected `array` of length >= 1"),
        ([GOOD, '{"prompt": "x", "label": 5}'], "line 2: Expected `str`, got `int`"),
        ([GOOD, '{"prompt": "x", "answer": "5", "label": "5"}'], "unknown field `answer`"),
        ([""], "has no lines"),
    ],
)
def test_a_set_that_nothing_can_be_learned_from_is_refused(
    lines: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    assert calibrate(file) == 2
    output = capsys.readouterr().err
    assert reason in output and "(--prompts)" in output


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--quality", "1.5"], "at most 1. (--quality)"),
        (["--quality", "0"], "above 0"),
        (["--risk", "1"], "at least 0 and below 1. (--risk)"),
        (["--threshold", "-0.1"], "give --signal too. (--threshold)"),
        (["--num-judged-tokens", "0"], "judged tokens must be at least 1"),
        (["--url", "http://127.0.0.1:9"], "Cannot reach"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(GOOD)
    assert calibrate(file, *flags) == 2
    assert reason in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(tmp_path / "none.jsonl") == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err


def test_what_it_writes_serve_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, written = tmp_path / "prompts.jsonl", tmp_path / "cascade.yaml"
    lines = [json.dumps({"prompt": prompt, "label": label}) for prompt, label in PROMPTS]
    messages = [{"role": "user", "content": "Which city is the capital of Italy?"}]
    lines.append(json.dumps({"messages": messages, "label": "Rome"}))
    file.write_text("\n".join(lines))
    flags = ["--signal", "minimum", "--quality", "1", "--write", str(written)]
    assert calibrate(file, *flags) == 0
    output = capsys.readouterr().out
    assert "demo-small: 60.0% correct with 918,912 parameters" in output
    assert "demo-large: 100.0% with 7,770,880" in output
    assert "40.0% escalate" in output
    assert "5 prompts are too few to show that earlier releases lose at most 0.50%" in output
    assert "Use at least 460 prompts" in output
    cascade = read_again(written.read_text(), tmp_path)
    assert cascade is not None and cascade.signal == "minimum"
    assert -0.3 < cascade.thresholds[0] < -0.001


def test_all_that_was_found_is_read_again(tmp_path: Path) -> None:
    weights = tuple((token, token / 8 - 2) for token in range(30))
    found = CascadeConfig(
        signal="margin",
        num_judged_tokens=9,
        thresholds=(1.5,),
        leads=(6.25,),
        prompt_judges=(PromptJudge(-1.25, weights, -0.5),),
    )
    assert read_again(as_yaml(found), tmp_path) == found


def test_a_file_of_an_earlier_version_is_read_and_judges_all_tokens(tmp_path: Path) -> None:
    text = "cascade:\n  signal: minimum\n  num_judged_tokens: 16\n  thresholds: [-0.25]\n"
    assert read_again(text, tmp_path) == CascadeConfig(thresholds=(-0.25,))


def read_again(text: str, folder: Path) -> CascadeConfig | None:
    written = folder / "cascade.yaml"
    written.write_text(text)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["demo-small", "demo-large", "--cascade", str(written)]
    return layers_of(parser.parse_args(words)).config().cascade


def test_no_prompt_is_refused_because_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts, all at once: on a slow machine the last ones wait for minutes."""
    asked: list[ServeConfig] = []

    def running(config: ServeConfig) -> NoReturn:
        asked.append(config)
        raise DisaggError("enough was seen")

    monkeypatch.setattr("disagg.local.running", running)
    file = tmp_path / "prompts.jsonl"
    file.write_text(GOOD)
    assert calibrate(file) != 0
    (config,) = asked
    slowest_s = 60.0 + TierConfig(model="demo-small").ttft_limit_s
    assert all(tier.ttft_limit_s > 10 * slowest_s for tier in config.tiers)


def test_a_threshold_that_is_given_is_kept(tmp_path: Path) -> None:
    file, written = tmp_path / "prompts.jsonl", tmp_path / "cascade.yaml"
    lines = [json.dumps({"prompt": prompt, "label": label}) for prompt, label in PROMPTS]
    file.write_text("\n".join(lines))
    flags = ["--signal", "mean", "--threshold", "-0.3", "--write", str(written)]
    assert calibrate(file, *flags) == 0
    assert "thresholds: [-0.3]" in written.read_text()
