from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from disagg.cli.main import main
from disagg.tools.sim import command as sim_command
from disagg.tools.sim.baselines import POLICIES

LINES = [
    {"timestamp": 400 * n, "input_length": 1500, "output_length": 9, "hash_ids": [n % 3, 9, n + 10]}
    for n in range(12)
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_policies_are_compared_and_two_runs_print_the_same(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sim", "--trace", str(trace), "--compare", "--speed", "1", "--speed", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed
    assert "simulated" in printed.splitlines()[0]
    figures = json.loads(printed.splitlines()[-1])
    assert figures["simulated"] is True
    reports = figures["reports"]
    assert [each["policy"] for each in reports] == [*POLICIES, *POLICIES]
    assert {each["num_failed"] for each in reports} == {0}


def test_sizes_may_have_the_suffixes_of_serve() -> None:
    parser = argparse.ArgumentParser()
    sim_command.add_arguments(parser)
    blocks, steps = ("--num-blocks", "2K"), ("--max-num-batched-tokens", "8k")
    parsed = parser.parse_args([*blocks, *steps, "--kv-bytes", "1m", "--num-requests", "1M"])
    assert (parsed.num_blocks, parsed.max_num_batched_tokens) == (2048, 8000)
    assert (parsed.kv_nbytes, parsed.num_requests) == (10**6, 1 << 20)


def test_load_is_made_up_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--num-requests", "20", "--fault", "decode-0@1+2"]) == 0
    (report,) = json.loads(capsys.readouterr().out.splitlines()[-1])["reports"]
    assert (report["num_requests"], report["num_failed"]) == (20, 0)
    assert report["hit_percent"] > 0


def test_a_broken_line_is_refused_with_its_number(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text() + '{"timestamp": "noon"}\n')
    assert main(["sim", "--trace", str(trace)]) == 2
    message = capsys.readouterr().err
    assert "line 13" in message and "timestamp" in message and "--trace" in message


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--num-requests", "0"], "number of requests must be at least 1"),
        (["--requests-per-s", "0"], "rate"),
        (["--requests-per-s", "nan"], "rate must be finite and greater than 0, not nan"),
        (["--speed", "nan"], "speed must be finite and greater than 0, but is nan. (--speed)"),
        (["--speed", "inf"], "speed must be finite and greater than 0, but is inf"),
        (["--ttft-slo-s", "-1"], "TTFT SLO must be finite and greater than 0, but is -1"),
        (["--tpot-slo-s", "nan"], "TPOT SLO must be finite and greater than 0, but is nan"),
        (["--link-bytes-per-s", "0"], "bandwidth of a link must be finite and greater than 0"),
        (["--fault", "decode-9@1+1"], "decode-9"),
        (["--block-size", "100"], "divide"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--num-requests", "5", *arguments]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fault", "decode-0"],
        ["--step-times", "1,2"],
        ["--step-times", "1,2,3,4,x"],
        ["--step-times", "1,2,3,4,nan"],
        ["--prefill", "4..1"],
    ],
)
def test_flags_that_cannot_be_read_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["sim", *arguments])
    assert arguments[1] in capsys.readouterr().err


def test_pools_follow_the_load_between_two_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", "--num-requests", "40", "--prefill", "1..4", "--decode", "0..2"]
    assert main([*arguments, "--ttft-slo-s", "0.3", "--start-s", "2"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    scaled = line["config"]["scale_prefill"]
    assert (scaled["min_replicas"], scaled["max_replicas"], scaled["start_s"]) == (1, 4, 2.0)
    assert line["config"]["tpot_slo_s"] is None  # infinite
    (report,) = line["reports"]
    assert report["num_failed"] == 0
    assert report["worker_hours"] > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ttft-slo-s", "0.001"], "0.0068 s"),
        (["--tpot-slo-s", "0.001"], "6.8 ms"),
        (["--slo-fraction", "2"], "slo_fraction"),
    ],
)
def test_an_slo_that_no_number_of_workers_holds_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--num-requests", "5", "--prefill", "1..4", *arguments]) == 2
    assert why in capsys.readouterr().err
