"""`disagg bench` against a whole fleet, as its user runs it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from disagg.cli.main import main
from disagg.tools.bench.result import read_result
from tests.behind_uvicorn import FLEET, served_port


async def test_a_load_test_with_its_report_and_its_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, page = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "report.html"
    async with served_port(FLEET) as port:
        load = ["bench", "--url", f"http://127.0.0.1:{port}/v1", "--output-len", "5", "--json"]
        slos = ["--goodput", "ttft:600000", "tpot:600000"]
        closed = [*load, "--num-prompts", "6", "--turns", "2", "--input-len", "60", *slos]
        assert await asyncio.to_thread(main, [*closed, "--output", str(one)]) == 0
        closed_loop = json.loads(capsys.readouterr().out)
        trace = tmp_path / "trace.jsonl"
        line = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
        trace.write_text(2 * (json.dumps(line) + "\n"))
        replayed = [*load, "--trace", str(trace), "--endpoint", "/v1/completions"]
        assert await asyncio.to_thread(main, [*replayed, "--output", str(other)]) == 0
        open_loop = json.loads(capsys.readouterr().out)
    assert closed_loop["errors"] == open_loop["errors"] == {}
    assert closed_loop["figures"]["total_output_tokens"] == 30
    assert closed_loop["figures"]["slo_attainment"] == 1.0
    assert open_loop["figures"]["total_output_tokens"] == 6
    assert closed_loop["load"]["turns"] == 2 and "trace" in open_loop["load"]
    requests = read_result(one).requests
    assert len({each.id for each in requests}) == 6  # of which `disagg why` tells more
    assert all(each.due_s <= each.sent_s <= each.event_s[0] for each in requests)
    compare = ["bench", "compare", str(one), str(other), "--html", str(page)]
    assert main(compare) == 0
    assert "median_ttft_ms" in capsys.readouterr().out
    report = page.read_text()
    assert not re.search(r"src=|href=|@import|url\(", report)  # it fetches nothing
    charts = re.findall(r"<svg.*?</svg>", report)
    assert len(charts) == 6
    for chart in charts:
        assert ElementTree.fromstring(chart).findall("path")  # noqa: S314


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "Cannot reach http://127.0.0.1:9"),
        (["--model", "m", "--dataset", __file__.replace(".py", ".jsonl")], ".jsonl: No such file"),
        (["--request-rate", "0"], "greater than 0, not 0. (--request-rate)"),
        (["--trace", "x", "--request-rate", "1"], "leave out --request-rate"),
        (["--slo-search"], "A search needs SLOs"),
        (["--url", "ftp://host"], "'ftp://host' is not a URL"),
        (["compare", __file__, __file__], "is not a result of `disagg bench`"),
    ],
)
def test_what_cannot_be_ends_in_a_sentence(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("disagg: ")


def test_a_server_that_dies_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n')
    asked = ["--model", "m", "--dataset", str(data), "--num-prompts", "3"]
    dead = ["bench", "--url", "http://127.0.0.1:9"]
    assert main([*dead, *asked]) == 2
    assert "answers no request (connection failed)" in capsys.readouterr().err
    assert main([*dead, *asked, "--num-warmups", "0"]) == 1
    assert re.search(r"^3 failed: connection failed: ", capsys.readouterr().out, re.MULTILINE)
